"""Advice: replays of recorded blocks against sums done by hand."""

import numpy as np
import pytest

from specdec_jax import advise


def test_fixed_lengths_by_hand():
  """Every block the same: Θ is emitted tokens over step time, at the bucket that the lengths make."""
  sps = 1 / np.arange(10.0, 22.0)  # A step of n tokens takes 9 + n seconds.
  found = advise.replay(np.full((5, 3), 0.9), np.full(5, 2), sps, 3, advise.fixed(3))
  assert found.throughput == pytest.approx(3 * 3 / 21) and found.user_tps == pytest.approx(3 / 21)
  assert (found.accepted_length, found.verify_length) == (3.0, 4.0)
  shorter = advise.replay(np.full((5, 3), 0.9), np.full(5, 2), sps, 3, advise.fixed(1))
  assert shorter.throughput == pytest.approx(3 * 2 / 15) and shorter.verify_length == 2.0
  assert advise.alone(sps, 3).throughput == pytest.approx(3 / 12)


def test_the_schedule_knows_groups_apart():
  """Sure and unsure requests in one batch: verified are the drafts of the sure ones, and that beats every fixed length."""
  confidence = np.array([[0.99] * 4] * 50 + [[0.05] * 4] * 50)
  accepted, group = np.array([4] * 50 + [0] * 50), np.repeat([0, 1], 50)
  sps = 1 / (10 + np.arange(1.0, 41.0))
  scheduled = advise.replay(confidence, accepted, sps, 8, group=group)
  fixed = [advise.replay(confidence, accepted, sps, 8, advise.fixed(n), group) for n in range(1, 5)]
  assert scheduled.throughput > 1.1 * max(f.throughput for f in fixed)
  assert 2.5 < scheduled.verify_length < 3.5 and scheduled.accepted_length == pytest.approx(scheduled.verify_length)


def test_drafting_costs_and_crossing_points():
  np.testing.assert_allclose(advise.with_drafting(np.array([1.0, 0.5, 0.25]), 2, 4.0), [1.0, 0.5, 0.125])
  outlook = lambda x: advise.Outlook(x, x, 1.0, 1.0)
  found = {c: {"alone": outlook(1.0), "drafts": outlook(t)} for c, t in ((1, 2.0), (4, 1.5), (16, 0.9), (64, 1.1))}
  assert advise.pays_until(found, "drafts", "alone") == 4 and advise.pays_until(found, "drafts", "alone", 1.6) == 1
  assert advise.pays_until(found, "drafts", "alone", 3.0) is None
  with pytest.raises(ValueError, match="a block or more"):
    advise.replay(np.zeros((0, 3)), np.zeros(0), np.ones(9), 1)
