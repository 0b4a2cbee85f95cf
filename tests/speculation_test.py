"""How much is drafted: what rounds were seen to cost weighs more than what a table says, and what does not pay is tried again."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import cost, schedule, speculation
from specdec_jax.speculation import Speculation, Worth

TABLE = cost.CostTable((4, 8, 20), (1.0, 1.01, 1.02), (0.0,) * 3, {})


@pytest.mark.parametrize("seed", range(6))
def test_budget_on_the_host_is_the_unconstrained_schedule(seed):
  draws = np.random.default_rng(seed)
  confidence = draws.uniform(size=(5, 4)).astype(np.float32)
  confidence[draws.uniform(size=(5, 4)) < 0.1] = 0
  sps = np.sort(draws.uniform(1, 100, 25))[::-1].astype(np.float32)
  expected = int(schedule.unconstrained(jnp.asarray(confidence), jnp.asarray(sps)).sum())
  budget, theta = speculation.best_budget(np.cumprod(confidence, 1), 5, sps)
  assert budget == expected
  lengths = schedule.unconstrained(jnp.asarray(confidence), jnp.asarray(sps))
  assert theta == pytest.approx(float(schedule.expected_throughput(jnp.asarray(confidence), lengths, jnp.asarray(sps))), rel=1e-5)


def test_few_requests_in_many_slots():
  """As many tokens as slots are not a round without drafts."""
  assert speculation.best_budget(np.array([[0.9], [0.8]]), 2, 1 / np.array([1, 1, 1, 1, 9, 9, 9, 9.0]), 4)[0] == 0


@pytest.mark.parametrize("seconds,adaptive,share", [
    pytest.param({4: 1.0, 8: 1.01, 20: 1.02}, True, 1.0, id="as the table says"),
    pytest.param({4: 1.0, 8: 9.0, 20: 50.0}, True, 0.03, id="drafts are dear"),
    pytest.param({4: 1.0, 8: 9.0, 20: 50.0}, False, 1.0, id="and nobody looks"),
    pytest.param({4: 1.0, 8: 1.1, 20: 50.0}, True, 0.8, id="many are dear, few are not")])
def test_served_rounds_decide(seconds, adaptive, share):
  """Four requests whose drafts are accepted at .8, 300 rounds: the share of rounds with drafts, and the best bucket in the end."""
  policy = Speculation(4, {4: (4, 8, 20)}, adaptive)
  policy.use_costs({4: TABLE})
  worths, drafted, last = [Worth() for _ in range(4)], [], None
  for _ in range(300):
    most = [policy.most(w) for w in worths]
    may = [w for w, m in zip(worths, most) if m]
    wanted = policy.plan(may, 4, 4, (4,))[0] if may else 0
    policy.launched(wanted > 0)
    last = 4 if not wanted else 8 if wanted <= 4 else 20
    drafted.append(wanted > 0)
    policy.observe(4, last, seconds[last])
    for w in may:
      policy.learn(w, wanted // 4, round(0.8 * (wanted // 4)), 0.8 ** np.arange(1, 5) if wanted else None, 4, 4)
  assert abs(np.mean(drafted) - share) < 0.1 and (share > 0.5 or sum(drafted[100:]) >= 1)
  assert share < 1.0 or last == 20
  assert last == 8 or seconds[8] != 1.1


def test_a_request_that_drafts_do_not_pay_for_goes_without():
  """It is judged after some rounds with drafts, rests, is tried again, and rests twice as long; one that they pay for never rests."""
  policy = Speculation(4, {4: (4, 20)}, True)
  policy.use_costs({4: cost.CostTable((4, 20), (1.0, 2.0), (0.0, 0.0), {})})
  assert policy.price(4, 4) == pytest.approx(0.25) and policy.price(0, 4) is None and policy.price(4, 8) is None
  bad, good, rounds = Worth(), Worth(), []
  for _ in range(60):
    drafts = policy.most(bad)
    rounds.append(drafts)
    policy.learn(bad, drafts, 0, None, 4, 4)
    assert policy.most(good) == 4
    policy.learn(good, 4, 4, None, 4, 4)
  n, pause = speculation.JUDGED_AFTER, speculation.PAUSE
  assert rounds == ([4] * n + [0] * pause + [4] * n + [0] * 2 * pause)[:60]


def test_only_those_are_drafted_for_whom_it_pays():
  """Two requests of eight whose drafts are good: a pass over a quarter of the slots, and over more only where passes are free. The place
  of the worse of the two goes round among the others, so that one that becomes good is found."""
  table = cost.CostTable((8, 64), (1.0, 3.0), (0.0, 0.0), {}, draft=((2, 0.3), (4, 0.9), (8, 1.8)))
  policy = Speculation(7, {8: (8, 24, 64)}, True)
  policy.use_costs({8: cost.CostTable((8, 24, 64), (1.0, 2.2, 4.0), (0.0,) * 3, {}, table.draft)})
  good, bad = 0.95 ** np.arange(1, 8), 0.2 ** np.arange(1, 8)
  worths = [Worth(survival=good if i in (3, 5) else bad) for i in range(8)]
  seen = set()
  for _ in range(20):
    wanted, chosen = policy.plan(worths, 8, 8, (2, 4, 8))
    assert 5 <= wanted <= 14 and len(chosen) in (2, 4) and set(chosen) & {3, 5}
    seen |= set(chosen)
    for i in chosen:
      policy.learn(worths[i], 1, 1, good if i in (3, 5) else bad, 8, 8)
  assert seen == set(range(8))
  policy.use_costs({8: cost.CostTable((8, 24, 64), (1.0, 1.01, 1.02), (0.0,) * 3, {}, ((2, 0.0), (4, 0.0), (8, 0.0)))})
  assert len(policy.plan(worths, 8, 8, (2, 4, 8))[1]) == 8


def test_a_pass_over_one_goes_round_too():
  """One request's drafts are good, so the pass is cut to it; those of the others become better yet, which is seen, and all are drafted for.
  """
  policy = Speculation(4, {4: (4, 8, 20)}, True)
  policy.use_costs({4: cost.CostTable((4, 8, 20), (1.0, 2.0, 2.6), (0.0,) * 3, {}, ((1, 0.1), (2, 0.5), (4, 0.9)))})
  good, bad, better = 0.95 ** np.arange(1, 5), 0.1 ** np.arange(1, 5), 0.99 ** np.arange(1, 5)
  worths, passes = [Worth(survival=good if i == 1 else bad) for i in range(4)], []
  for _ in range(600):
    wanted, chosen = policy.plan(worths, 4, 4, (1, 2, 4))
    assert 1 <= wanted <= 4 * len(chosen)
    passes.append(chosen)
    for i in chosen:
      policy.learn(worths[i], 1, 1, good if i == 1 else better, 4, 4)
  assert passes[: speculation.PROBE_EVERY - 1] == [[1]] * (speculation.PROBE_EVERY - 1) and sorted(passes[-1]) == [0, 1, 2, 3]
  assert {i for p in passes if len(p) == 1 for i in p} == {0, 1, 2, 3}


def test_that_nothing_pays_is_not_weighed_every_round():
  """Every sixteenth, or at once where others are there, one was seen anew, or there are other cost tables."""
  policy = Speculation(4, {4: (4, 20)}, True)
  dear = {4: cost.CostTable((4, 20), (1.0, 50.0), (0.0, 0.0), {})}
  policy.use_costs(dear)
  weighed, best = [], policy._best
  policy._best = lambda *args: weighed.append(1) or best(*args)
  worths = [Worth(survival=np.full(4, 0.5)) for _ in range(4)]
  plan = lambda which: policy.plan(which, len(which), 4, (4,))
  for _ in range(33):
    assert plan(worths) == (0, [])
  assert len(weighed) == 3
  for change in (
      lambda: plan(worths[:3]), lambda: policy.learn(worths[0], 0, 0, np.full(4, 0.6), 3, 4) or plan(worths[:3]),
      lambda: policy.use_costs(dear) or plan(worths[:3])):
    before = len(weighed)
    change()
    assert len(weighed) == before + 1


def test_whether_a_context_is_kept_for_drafts():
  """As long as little is known it is; then where requests like the last ones would gain on the whole, also by a few of them that gain
  much; else for one in many."""
  good, bad, fair = 0.95 ** np.arange(1, 8), 0.1 ** np.arange(1, 8), 0.5 ** np.arange(1, 8)
  table = lambda dear, alone: cost.CostTable((4, 8, 32), (1.0, dear, dear), (0.0,) * 3, {}, alone=alone)

  def kept(dear, survivals, running=4, alone=None):
    policy = Speculation(7, {4: (4, 8, 32)}, True)
    policy.use_costs({4: table(dear, alone)})
    assert policy.keeps(running, 4, (4,))
    for survival in survivals:
      policy.ended(Worth(survival=survival))
    policy.ended(Worth())  # It has had no drafts, which says nothing.
    return [policy.keeps(running, 4, (4,)) for _ in range(2 * speculation.PROBE_REQUESTS * running)]

  assert all(kept(2.0, [good] * 8)) and all(kept(9.0, [bad] * 7))
  assert sum(kept(9.0, [good] * 8)) == 2 and sum(kept(2.0, [bad] * 8)) == 2
  assert all(kept(3.0, [good] * 8 + [bad] * 8)) and sum(kept(3.0, [fair] * 16)) == 2
  # Where a fifth of the requests is served twice as fast, all together are so only by a tenth.
  assert sum(kept(3.0, [good] * 4 + [bad] * 16)) == 2
  # The price of a context, in every round.
  assert sum(kept(2.0, [good] * 8, alone=0.3)) == 2


def test_rounds_without_a_context_are_counted_now_and_then():
  """One of eight of those in a row, so that they cost the host little; the others, every one."""
  policy, counted = Speculation(7, {4: (4, 32)}, True), []
  policy.use_costs({4: cost.CostTable((4, 32), (1.0, 2.0), (0.0,) * 2, {})})
  policy.costs[4].observe = lambda *args: counted.append(args[1:])
  for kept in [False] * 20 + [True] * 3 + [False] * 8:
    policy.observe(4, 4, 1.0, None, kept)
  assert counted == [(1.0, None, False)] * 2 + [(1.0, None, True)] * 3 + [(1.0, None, False)]
