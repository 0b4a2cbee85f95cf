"""Schedules and calibration: published cases, hand-made cases, what is no probability, what peeks."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import calibrate, schedule, verify
from specdec_jax.decode import Completion
from specdec_jax.sampling import Role, draw, make_sampling
from tests.enumeration import emitted, error, outcomes, tables

GOLDEN = pathlib.Path(os.environ.get("SPECDEC_GOLDEN") or pathlib.Path(__file__).parents[2] / "shared" / "golden")
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folder at {GOLDEN}; set SPECDEC_GOLDEN")
ints = lambda x: np.asarray(x).tolist()
numbers = lambda x: np.array(x, float)  # With NaN for None, as the reference has it.


def golden(pattern: str):
  return sorted(GOLDEN.glob(pattern)) if GOLDEN.is_dir() else []


@jax.jit
def both(confidence, sps):
  """Lengths of both rules, their expected throughputs, and the survivals."""
  early, best = schedule.causal(confidence, sps), schedule.unconstrained(confidence, sps)
  theta = lambda lengths: schedule.expected_throughput(confidence, lengths, sps)
  return early, best, theta(early), theta(best), schedule.survival(confidence)


def same_drafts(survival, order, count: int) -> bool:
  """Whether the first `count` drafts of the reference's order are ours too: products that tie in one precision may differ in the
  other, and throughput alone tells of those."""
  ours = np.argsort(-survival.reshape(-1), kind="stable")[:count]
  return set(ours.tolist()) == {int(r) * survival.shape[1] + int(j) for r, j in order[:count]}


@needs_golden
@pytest.mark.parametrize("path", golden("*scheduler*/cases.npz"), ids=lambda p: p.parent.name)
def test_golden_schedules(path):
  f = np.load(path)
  checked = compared = 0
  for case in [k.removesuffix("_conf") for k in f.files if k.endswith("_conf")]:
    g = {k: f[f"{case}_{k}"] for k in (
        "conf", "sps", "early_lengths", "early_theta", "global_lengths", "global_theta", "decision_margin", "survival", "theta_path",
        "order", "early_stop_index")}
    early, best, theta_early, theta_best, survival = map(np.asarray, both(g["conf"].astype(np.float32), g["sps"][1:].astype(np.float32)))
    np.testing.assert_allclose(survival, g["survival"], rtol=1e-5, atol=1e-7)
    assert theta_best == pytest.approx(float(g["global_theta"]), rel=1e-5), case
    path_top = np.sort(g["theta_path"])[::-1]
    apart = len(path_top) < 2 or path_top[0] - path_top[1] > 1e-5 * path_top[0]
    if apart and same_drafts(survival, g["order"], int(np.argmax(g["theta_path"]))):
      assert ints(best) == ints(g["global_lengths"]), case
    if g["decision_margin"] > 1e-5:  # Below, float32 may decide a tie the other way.
      checked += 1
      assert theta_early == pytest.approx(float(g["early_theta"]), rel=1e-5), case
      if same_drafts(survival, g["order"], int(g["early_stop_index"])):
        compared += 1
        assert ints(early) == ints(g["early_lengths"]), case
  assert checked, "every decision of every case is a tie"
  assert compared > 0.8 * checked, "the lengths of most cases should be compared, not their throughput alone"


@needs_golden
@pytest.mark.parametrize("path", golden("*calibration*/calib.npz"), ids=lambda p: p.parent.name)
def test_golden_calibration(path, monkeypatch):
  monkeypatch.setattr(calibrate, "FEWEST", 1)  # The reference fits whatever there is.
  monkeypatch.setattr(calibrate, "FEW_OF_ONE", 0)
  f = np.load(path)
  logits, observed = f["confidence_logits"], f["effective_length"]
  accepted = f["prefix_accept"].sum(1)
  temperatures = calibrate.fit(logits, accepted, observed, grid=f["sts_grid"])
  np.testing.assert_allclose(temperatures, f["sts_temperatures"], atol=1e-9)
  for t, name in ((None, "before"), (temperatures, "after")):
    found = calibrate.assess(calibrate.survivals(logits, t), accepted, observed)
    for mine, theirs in (("ece", "ece"), ("auc", "auc"), ("brier", "brier"), ("prediction", "pred_mean"),
                         ("outcome", "target_mean"), ("samples", "total_weight")):
      np.testing.assert_allclose(numbers(found[mine]), f[f"{name}_{theirs}"], atol=2e-6, err_msg=f"{name} {mine}")
    means = [found[f"mean_{k}"] for k in ("ece", "auc", "brier", "prediction", "outcome")]
    np.testing.assert_allclose(numbers(means), f[f"{name}_summary"], atol=2e-6)
    for i, kind in enumerate(("count", "pred_sum", "target_sum")):
      # Before, the reference takes the sigmoid in float32, which moves a sample at the edge of a bin to the next.
      np.testing.assert_allclose(found["bins"][:, i], f[f"{name}_coarse_{kind}"], atol=3.0 if name == "before" else 1e-6)
  shown = f["sts_calibrated_prefix_probs"]
  np.testing.assert_allclose(calibrate.survivals(logits, temperatures)[: len(shown)], shown, atol=1e-9)


def test_allocation_across_requests():
  """C33."""
  c = jnp.array([[0.9, 0.5, 0.2], [0.6, 0.6, 0.6]])
  sps = jnp.array([110.0, 100, 90, 80, 70, 60, 50, 40])
  assert ints(schedule.causal(c, sps)) == [1, 1]
  assert float(schedule.expected_throughput(c, jnp.array([1, 1]), sps)) == pytest.approx(280)
  flat = jnp.full(8, 50.0)
  assert ints(schedule.causal(c, flat)) == [3, 3] == ints(schedule.unconstrained(c, flat))
  assert float(schedule.expected_throughput(c, jnp.array([3, 3]), flat)) == pytest.approx(230.8)
  assert [ints(schedule.by_rank(c, n)) for n in range(8)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [2, 3], [3, 3], [3, 3]]


def test_survival_not_single_confidence():
  """C37."""
  c = jnp.full((1, 4), 0.9)
  assert ints(schedule.by_threshold(c, 0.7)) == [3] and ints(schedule.by_threshold(c, 0.0)) == [4] and ints(schedule.fixed(c, 2)) == [2]


def test_ties_go_by_request_then_position():
  c = jnp.array([[1.0, 0.5, 1.0], [0.5, 1.0, 1.0]])  # Survivals 1, 0.5, 0.5 and 0.5, 0.5, 0.5.
  assert [ints(schedule.by_rank(c, n)) for n in range(7)] == [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3]]


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1, np.inf])
def test_what_is_no_probability_counts_as_zero(bad):
  c = jnp.array([[0.9, bad, 0.9], [0.8, 0.8, 0.8]])
  sps = jnp.full(8, 10.0)
  for run in (lambda: schedule.causal(c, sps), lambda: schedule.unconstrained(c, sps), lambda: schedule.by_rank(c, 9),
              lambda: schedule.by_threshold(c, 0.1), lambda: schedule.asynchronous(c, c, sps)):
    assert ints(run()) == [1, 3]
  assert int(schedule.invalid(c)) == 1 and int(schedule.invalid(jnp.clip(c, 0, 1))) == int(np.isnan(bad))
  # C35: nothing to draft, every request keeps its own token.
  assert ints(schedule.causal(jnp.zeros((3, 4)), jnp.full(15, 10.0))) == [0, 0, 0]


def test_stairs():
  """The causal rule stops at the edge of a stair; the asynchronous one crosses it with a budget from older confidences."""
  c = jnp.full((2, 4), 0.95)
  stairs = jnp.array([100.0, 100, 60, 60, 60, 60, 60, 60, 60, 60])
  assert ints(schedule.causal(c, stairs)) == [0, 0]
  assert ints(schedule.unconstrained(c, stairs)) == [4, 4] == ints(schedule.asynchronous(c, c, stairs))
  low = jnp.full((2, 4), 0.1)
  assert ints(schedule.asynchronous(c, low, stairs)) == [0, 0]
  assert ints(schedule.asynchronous(
      jnp.array([[0.9, 0.9, 0.2, 0.2], [0.3, 0.3, 0.3, 0.3]]), jnp.array([[0.9, 0.9, 0.0, 0.0], [0.0] * 4]),
      jnp.array([9.0] * 10))) == [2, 0]
  with pytest.raises(ValueError, match="2 entries for steps of up to 5 tokens"):  # Tokens beyond the table would be free.
    schedule.causal(jnp.full((1, 4), 0.5), jnp.array([10.0, 9.0]))


def choose(run):
  """Lengths by path for p = (0.7, 0.3), q = (0.5, 0.5): confidences 0.8, then by the first draft 1.0 or 0.0 (DSpark appendix A)."""
  sps = jnp.array([1.0, 0.5, 0.45])
  t = tables(lambda prefix: np.array([0.7, 0.3]), lambda prefix: np.array([0.5, 0.5]), 2)
  lengths = [int(run(jnp.array([[0.8, 1.0 if x[0] == 0 else 0.0]]), sps)[0]) for x in t.paths]
  chance, after = outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(lengths, jnp.int32), "token")
  return lengths, emitted(lambda prefix: np.array([0.7, 0.3]), t, chance, after)


def test_peeking_counterexample():
  """DSpark appendix A by enumeration: the best prefix of current confidences turns (0.7, 0.3) into (0.85, 0.15)."""
  p = lambda prefix: np.array([0.7, 0.3])
  lengths, joint = choose(schedule.unconstrained)
  assert lengths == [2, 2, 0, 0]
  np.testing.assert_allclose(joint.sum((1, 2)), [0.85, 0.15], atol=1e-6)
  lengths, joint = choose(schedule.causal)
  assert lengths == [0, 0, 0, 0] and error(joint, p) < 1e-6
  older = jnp.array([[0.8, 1.0]])
  lengths, joint = choose(lambda c, sps: schedule.asynchronous(c, older, sps))
  assert lengths == [2, 2, 1, 1] and error(joint, p) < 1e-6


@pytest.mark.parametrize("rule", verify.RULES)
def test_schedules_are_exact(rule):
  """Every schedule but the peeking one, on confidences that know the drafts before theirs: exact by enumeration."""
  from tests.enumeration import random_model

  p, q = random_model(1), random_model(101, 0.5)
  t = tables(p, q, 3)
  confidence = jnp.asarray([[np.random.default_rng([5, *x[:k]]).uniform(0.3, 1.0) for k in range(3)] for x in t.paths])
  sps = jnp.array([10.0, 9.0, 8.0, 5.0])
  older = jnp.asarray(np.random.default_rng(1).uniform(0.3, 1.0, (1, 3)))
  for run in (lambda c: schedule.causal(c, sps), lambda c: schedule.by_threshold(c, 0.4),
              lambda c: schedule.asynchronous(c, older, sps), lambda c: schedule.by_rank(c, 2)):
    lengths = jnp.concatenate([run(c[None]) for c in confidence])
    assert error(emitted(p, t, *outcomes(t.p, t.claimed, jnp.asarray(t.paths), lengths, rule)), p) < 1e-6


def two_requests(seed, by_position: bool):
  """The first two tokens of a request whose discarded drafts set its neighbour's length, and so what the neighbour is sure of when
  both are scheduled again. p and q look at nothing; the neighbour's drafter is perfect and its target counts its tokens."""
  p, q = jnp.array([0.5, 0.5]), jnp.array([0.8, 0.2])
  sampling = make_sampling(1, 2, 1.0).replace(keys=jax.random.key(seed)[None])
  start, others, tokens = jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.zeros(16, jnp.int32)
  for t in range(2):
    keys = (sampling.position_keys if by_position else sampling.round_keys)(start, 4)
    drafts = jnp.stack([draw(keys[:, k], q[None], Role.DRAFT) for k in range(3)], 1)
    mine = jnp.array([0.95, 0.95, 0.0]).at[2].set(jnp.where(drafts[0, 1] == 0, 0.99, 0.1))
    other = jnp.where(others == 2, 0.99, 0.0) * jnp.ones(3) if t else jnp.array([0.6, 0.1, 0.1])
    lengths = schedule.by_rank(jnp.stack([mine, other]), 3)
    verdict = verify.accept(jnp.broadcast_to(p, (1, 4, 2)), jnp.broadcast_to(q, (1, 3, 2)), drafts, lengths[:1], keys)
    new = jnp.where(jnp.arange(4) == verdict.accepted[0], verdict.next_token[0], jnp.pad(drafts[0], (0, 1)))
    tokens = jax.lax.dynamic_update_slice(tokens, new, (start[0],))
    start, others = start + verdict.accepted + 1, others + 1 + jnp.minimum(lengths[1], 1)
  return tokens[:2]


def test_noise_does_not_come_back_through_a_neighbour():
  """Requests that share a budget: with keys by round the second token is the target's; mutant: keys by output position draw the
  discarded drafts' noise again, after a neighbour's length has told of it."""
  n = 40_000
  zero = [
      float((jax.jit(jax.vmap(lambda s, b=b: two_requests(s, b)))(jnp.arange(n, dtype=jnp.uint32))[:, 1] == 0).mean())
      for b in (False, True)]
  assert abs(zero[0] - 0.5) < 4.5 * 0.5 / n**0.5 and zero[1] > 0.52


def test_few_samples():
  """C43: a position of too few samples, or of none, keeps the identity, with a note; nothing is NaN, no order changes."""
  rng = np.random.default_rng(0)
  logits = rng.normal(1.0, 1.0, (200, 6))
  accepted = (rng.random((200, 6)) < 1 / (1 + np.exp(-logits / 2))).cumprod(1).sum(1)
  observed = np.full(200, 4)
  observed[:3], accepted[:3] = 5, 5
  notes = []
  temperatures = calibrate.fit(logits, np.minimum(accepted, observed), observed, notes)
  assert temperatures[4] == temperatures[5] == 1.0 and np.all(np.isfinite(temperatures)) and (
      np.all((temperatures >= 0.2) & (temperatures <= 5)))
  assert temperatures[0] > 1.2  # The logits are twice too sure.
  assert notes == ["position 5: 3 samples, 3 of them accepted; temperature 1", "position 6: 0 samples, 0 of them accepted; temperature 1"]
  found = calibrate.assess(calibrate.survivals(logits, temperatures), np.minimum(accepted, observed), observed)
  assert found["auc"][4] is None and found["ece"][5] is None and found["samples"] == [200, 200, 200, 200, 3, 0]
  raw = calibrate.assess(calibrate.survivals(logits), np.minimum(accepted, observed), observed)
  assert found["ece"][0] < raw["ece"][0] and found["auc"][0] == pytest.approx(raw["auc"][0], abs=5e-3)


def test_calibration_files_and_refusals(tmp_path):
  made = calibrate.Calibration((1.2, 0.9), "chat", 100, "2026-11-30", "abc", ("note",))
  made.save(tmp_path)
  assert calibrate.load(tmp_path, "abc", 2) == made and calibrate.load(tmp_path / "none", "abc", 2) is None
  for arguments, message in ((("xyz", 2), "fitted on other weights"), (("abc", 3), "expected 3 positive temperatures")):
    with pytest.raises(ValueError, match=message):
      calibrate.load(tmp_path, *arguments)
  completion = lambda reason, rounds, drafts: Completion([], None, reason, rounds, None, None, drafts, [[0.5] * 3] * len(rounds))
  whole = completion("stop", [(3, 3, 4), (3, 2, 2)], [[1, 2, 3], [4, 9, 5]])  # 9 ends the text: what stands behind it does not count.
  capped = completion("length", [(3, 0, 1), (3, 3, 4), (3, 0, 1), (3, 1, 1)], [[9, 1, 1], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
  _, accepted, observed = calibrate.blocks([whole, capped], [9], 3, 8)  # Rounds from the fourth token on might be cut at 8.
  assert (accepted.tolist(), observed.tolist()) == ([3, 0, 3], [3, 1, 3])
  with pytest.raises(calibrate.TruncatedBlocks, match="1 of 3 blocks were cut short of 3"):
    calibrate.blocks([whole, completion("stop", [(2, 1, 2)], [[1, 2, 3]])], [9], 3, 20)
  assert calibrate.blocks([whole], [9], 3, 20)[1].tolist() == [3, 2]
  sweep = calibrate.threshold_sweep(np.array([[0.9, 0.5], [0.8, 0.1]]), np.array([2, 0]), (0.0, 0.6, 0.95))
  assert [(x["accepted_drafts"], x["rejected_drafts"], x["draft_acceptance_rate"]) for x in sweep] == [
      (1.0, 1.0, 0.5), (0.5, 0.5, 0.5), (0.0, 0.0, None)]
  with pytest.raises(ValueError, match="counts from 0 to 3"):
    calibrate.fit(np.zeros((2, 3)), np.array([4, 0]))
