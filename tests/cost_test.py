"""Cost tables: what was measured stays as it was, nothing is free, nothing foreign is used."""

import numpy as np
import pytest

from specdec_jax import cost


def test_lookup():
  table = cost.CostTable((1, 2, 4, 8), (1.0, 1.0, 1.5, 4.0), (0.1,) * 4, {"device": "toy"})
  np.testing.assert_allclose(1 / table.sps(), [1, 1, 1.5, 1.5, 4, 4, 4, 4])  # Stairs, as measured.
  np.testing.assert_allclose(1 / table.sps(18)[8:], [4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9])  # Beyond the end: never free.
  assert [table.bucket(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
  for wrong in (0, 9):
    with pytest.raises(ValueError, match="does not fit the buckets 1 … 8"):
      table.bucket(wrong)


def test_buckets():
  found = cost.buckets(256)
  assert found[:16] == tuple(range(1, 17)) and found[-1] == 256 and len(found) < 60
  assert all(b <= max(a + 1, a * 1.08) for a, b in zip(found, found[1:])) and cost.buckets(5) == (1, 2, 3, 4, 5)


def test_measured_in_turn():
  """Every bucket is warmed once, then all take turns; median and half the quartile distance are kept, not sorted by size."""
  calls, clock = [], {4: iter([9.0, 2.0, 4.0, 3.0]), 1: iter([9.0, 5.0, 5.0, 5.0])}
  steps = {n: lambda n=n: (calls.append(n), next(clock[n]))[1] for n in (4, 1)}
  table = cost.measure(steps, 3, {"device": "toy"})
  assert calls == [1, 4] * 4 and table.tokens == (1, 4) and table.seconds == (5.0, 3.0) and table.spread == (0.0, 1.0)


def test_files_and_refusals(tmp_path):
  table = cost.CostTable((1, 2), (1.0, 2.0), (0.0, 0.0), {"device": "toy", "target": "abc"}, ((1, 0.25),), 0.75)
  table.save(tmp_path / "sps.json")
  assert cost.load(tmp_path / "sps.json", {"target": "abc"}) == table
  with pytest.raises(ValueError, match="measured with target 'abc', not 'xyz'"):
    cost.load(tmp_path / "sps.json", {"target": "xyz"})
  with pytest.raises(cost.CostTableMissing, match="no cost table there"):
    cost.load(tmp_path / "none.json")
  for tokens, seconds in (((), ()), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1,), (0.0,)), ((1,), (float("nan"),))):
    with pytest.raises(ValueError, match="a cost table needs"):
      cost.CostTable(tokens, seconds, (0.0,) * len(tokens), {})
  for alone in (0.0, -1.0, float("nan")):
    with pytest.raises(ValueError, match="keeps no context"):
      cost.CostTable((1,), (1.0,), (0.0,), {}, alone=alone)


def test_roofline():
  table = cost.roofline(27e9, 2, 1e15, 4.8e12, (1, 64, 1024), overhead=1e-3)
  memory = 54e9 / 4.8e12
  np.testing.assert_allclose(table.seconds, [memory + 1e-3, memory + 1e-3, 2 * 27e9 * 1024 / 1e15 + 1e-3])


def test_served_costs_correct_the_table():
  """What rounds take while they are served weighs more than what a table says; what was not seen follows the nearest that was."""
  table = cost.CostTable((4, 8, 16, 32), (1.0, 1.2, 1.4, 2.0), (0.0,) * 4, {})
  costs = cost.ServedCosts(table, (4, 8, 16, 32))
  assert costs.sps().shape == (32,) and not costs.served
  np.testing.assert_allclose(1 / costs.sps()[[0, 3, 4, 7, 8, 31]], [1, 1, 1.2, 1.2, 1.4, 2])
  for _ in range(100):
    costs.observe(4, 0.5)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7, 31]], [0.5, 0.6, 1.0], rtol=1e-3)  # The whole machine is faster.
  for _ in range(100):
    costs.observe(16, 2.8)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7, 15, 31]], [0.5, 2.4, 2.8, 4.0], rtol=1e-3)  # Drafts are dearer.
  fresh = cost.ServedCosts(table, (4, 8, 16, 32))
  fresh.observe(8, 2.4)
  np.testing.assert_allclose(1 / fresh.sps()[[3, 7, 31]], [1.0, 2.4, 4.0])  # Rounds without drafts are tried before they are called dear.
  assert set(costs.served) == {4, 16} and costs.served[16] == pytest.approx(2.8, rel=1e-3)
  for _ in range(300):
    costs.observe(4, 1.0)
  # All of it is slower, also what is not seen.
  np.testing.assert_allclose(1 / costs.sps()[[3, 7, 15, 31]], [1.0, 4.8, 5.6, 8.0], rtol=3e-2)
  before = costs.served[16]
  costs.observe(16, 1000.0)  # One round that was held up.
  assert costs.served[16] == pytest.approx(before * (1 + cost.OBSERVED[1] * (cost.OUTLIER - 1)), rel=1e-3)


def test_what_was_seen_long_ago_counts_no_more():
  """A bucket whose only round was held up is not shut out for good; nor are rounds without drafts called dear for the pace of before."""
  costs = cost.ServedCosts(cost.CostTable((4, 8, 16), (1.0, 1.2, 1.4), (0.0,) * 3, {}), (4, 8, 16))
  costs.observe(8, 1000.0)
  for _ in range(cost.STALE):
    costs.observe(4, 1.0)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7, 15]], [1.0, 2.4, 2.8])
  costs.observe(4, 1.0)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7, 15]], [1.0, 1.2, 1.4])
  for _ in range(cost.STALE):
    costs.observe(16, 0.7)
  np.testing.assert_allclose(1 / costs.sps()[[3, 15]], [1.0, 0.7])
  costs.observe(16, 0.7)
  np.testing.assert_allclose(1 / costs.sps()[[3, 15]], [0.5, 0.7])
  costs.observe(4, 0.6)
  np.testing.assert_allclose(1 / costs.sps()[[3, 15]], [0.6, 0.7])


@pytest.mark.parametrize("pace", [1.0, 3.0, 10.0])
def test_what_rounds_cost_is_learned_at_any_pace(pace):
  """After a long time with drafts only, one round without shows what such rounds cost, however much slower than the table all is."""
  costs = cost.ServedCosts(cost.CostTable((4, 8), (1.0, 1.2), (0.0,) * 2, {}), (4, 8))
  for _ in range(300):
    costs.observe(4, pace)
    costs.observe(8, 1.2 * pace)
  for _ in range(cost.STALE + 1):
    costs.observe(8, 1.2 * pace)
  costs.observe(4, pace)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7]], [pace, 1.2 * pace], rtol=1e-3)


def test_a_pass_over_fewer_requests_takes_less():
  """What the drafter's pass over some of the slots saves is counted in, and out again of rounds that were served with it."""
  table = cost.CostTable((4, 8, 16), (1.0, 3.0, 4.0), (0.0,) * 3, {}, draft=((1, 0.5), (2, 0.8), (4, 1.5)))
  costs = cost.ServedCosts(table, (4, 8, 16))
  np.testing.assert_allclose(1 / costs.sps(1)[[3, 7, 15]], [1.0, 2.0, 3.0])
  np.testing.assert_allclose(1 / costs.sps(4), 1 / costs.sps())
  costs.observe(8, 2.5, 1)
  np.testing.assert_allclose(1 / costs.sps()[7], 3.5)
  np.testing.assert_allclose(1 / costs.sps(1)[7], 2.5)
  costs.observe(4, 1.1)
  np.testing.assert_allclose(1 / costs.sps(1)[3], 1.1)


def test_rounds_that_keep_no_context_are_counted_in_those_that_do():
  """What they take less is the table's to say: seen, they tell the pace."""
  costs = cost.ServedCosts(cost.CostTable((4, 8), (1.0, 2.0), (0.0,) * 2, {}, alone=0.8), (4, 8))
  assert costs.alone == pytest.approx(0.8)
  for _ in range(100):
    costs.observe(4, 1.6, kept=False)
  np.testing.assert_allclose(1 / costs.sps()[[3, 7]], [2.0, 4.0], rtol=1e-3)
  for alone in (None, 1.2):  # Not measured, or by chance longer.
    assert cost.ServedCosts(cost.CostTable((4, 8), (1.0, 2.0), (0.0,) * 2, {}, alone=alone), (4, 8)).alone == 1.0
  other = cost.ServedCosts(cost.CostTable((1, 8), (1.0, 2.0), (0.0,) * 2, {}, alone=0.8), (16, 32))  # More slots than the table's.
  assert other.alone == pytest.approx(0.8)
