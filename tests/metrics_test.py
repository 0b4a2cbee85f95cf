"""Every figure of METRICS.md against numbers worked out by hand."""

import math

import numpy as np
import pytest

from specdec_jax import metrics

# C109: four drafts a round, nothing cut, so each round emits one token more than it accepts.
WORKED = [[(4, 4, 5), (4, 0, 1), (4, 2, 3)], [(4, 1, 2)]]


def test_worked_example():
  figures = metrics.acceptance(WORKED)
  assert figures["conditional_acceptance"] == pytest.approx([0.75, 2 / 3, 0.5, 1.0])
  del figures["conditional_acceptance"]
  assert figures == {
    "accepted_length": 2.75,
    "accepted_drafts": 1.75,
    "draft_acceptance_rate": 0.4375,
    "verify_length": 5.0,
    "wasted_verify_tokens": 9 / 20,
    "position_acceptance": [0.75, 0.5, 0.25, 0.25],
    "accepted_histogram": [1, 1, 1, 0, 1],
    "request_mean_accepted_length": 2.5,
    "rounds": 4,
    "requests": 2,
  }
  assert figures["accepted_length"] * figures["rounds"] + len(WORKED) == 13  # With the prefill tokens.


def test_rounds_of_different_lengths_divide_by_those_that_reach_a_position():
  figures = metrics.acceptance([[(1, 1, 2), (3, 1, 2), (0, 0, 1)]])
  assert figures["position_acceptance"] == [1.0, 0.0, 0.0]
  assert figures["conditional_acceptance"] == [1.0, 0.0, None]  # No round came to position 3 with 2 accepted.
  assert figures["verify_length"] == 7 / 3
  assert figures["accepted_histogram"] == [1, 2, 0, 0]


@pytest.mark.parametrize("cut, length", [((5, 3, 3), 3.0), ((5, 5, 3), 3.0), ((4, 2, 2), 2.0)], ids=str)
def test_cut_rounds_count_committed_tokens(cut, length):
  """C111: a stop after three of five good drafts, told either way, and a cap of three tokens with a perfect drafter."""
  figures = metrics.acceptance([[cut]])
  assert figures["accepted_length"] == length
  assert figures["accepted_drafts"] == cut[1]


def test_no_rounds_give_none_never_zero():
  for requests in ([], [[], []]):
    figures = metrics.acceptance(requests)
    assert figures.pop("rounds") == 0 and figures.pop("requests") == len(requests)
    assert all(value is None or value == [] for value in figures.values())
  assert metrics.acceptance([[(0, 0, 1)]])["draft_acceptance_rate"] is None
  assert metrics.acceptance([*WORKED, []])["request_mean_accepted_length"] == 2.5


@pytest.mark.parametrize("bad", [(4, 5, 5), (4, 2, 4), (-1, 0, 0), (4, -1, 0), (4, 2, -1), (4, 2), (4, 2.0, 3)], ids=str)
def test_impossible_counts_are_named(bad):
  with pytest.raises(ValueError, match="request 1, round 2"):
    metrics.acceptance([[(4, 1, 2)], [(4, 1, 2), (4, 4, 5), bad]])


def test_counts_may_be_numpy():
  assert metrics.acceptance([np.array(r, np.int32) for r in WORKED]) == metrics.acceptance(WORKED)


def test_expected_length_is_from_conditional_counts():
  """C113."""
  assert metrics.expected_accepted_length([0.8, 0.5, 0.5]) == pytest.approx(2.4)
  halves = metrics.acceptance([[(3, 3, 4), (3, 0, 1)]])
  assert metrics.expected_accepted_length(halves["conditional_acceptance"]) == halves["accepted_length"] == 2.5
  assert metrics.expected_accepted_length(halves["position_acceptance"]) == 1.875  # The marginals' wrong answer.
  assert metrics.expected_accepted_length([0.0, None]) == 1
  assert metrics.expected_accepted_length([0.5, None]) is None
  assert "proxy" in metrics.FORMULAS["expected_accepted_length"]
  with pytest.raises(ValueError, match="position 2"):
    metrics.expected_accepted_length([0.5, 1.5])


def test_sums_before_ratios():
  """C115: 3 of 4 on one device and 1 of 1 on another."""
  assert metrics.pooled([(3, 4), (1, 1)]) == 0.8
  assert metrics.acceptance([[(4, 3, 4)], [(1, 1, 2)]])["draft_acceptance_rate"] == 0.8
  assert metrics.pooled([]) is None
  with pytest.raises(ValueError, match="part 1"):
    metrics.pooled([(3, 4), (2, 1)])


def test_macro_mean_weighs_data_sets_alike():
  assert metrics.macro_accepted_length({"a": WORKED, "b": [[(4, 0, 1)]], "empty": []}) == (2.75 + 1) / 2
  assert metrics.macro_accepted_length({}) is None


def test_percentiles():
  """C117."""
  assert metrics.percentiles(range(1, 11)) == pytest.approx({"p50": 5.5, "p90": 9.1, "p99": 9.91, "n": 10})
  assert metrics.percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "n": 1}
  assert metrics.percentiles([]) == {"p50": None, "p90": None, "p99": None, "n": 0}
  with pytest.raises(ValueError, match="value 1"):
    metrics.percentiles([1.0, math.nan])


@pytest.mark.parametrize("tokens, length", [([], 0), ([7], 1), ([1, 2, 2, 1], 2), ([1, 2, 1, 2], 1), ([3] * 100, 100)])
def test_longest_repeat(tokens, length):
  assert metrics.longest_repeat(tokens) == metrics.longest_repeat(tokens[::-1]) == length


def test_speeds():
  assert metrics.tpot(1.0, 3.0, 5) == 0.5
  assert metrics.tpot(1.0, 1.0, 1) is None
  assert metrics.user_tps(0.5) == 2 and metrics.user_tps(None) is None
  assert metrics.speedup(30, 20) == 1.5
  assert metrics.speedup(30, None) is None and metrics.speedup(None, 20) is None
  with pytest.raises(ValueError, match="before the first"):
    metrics.tpot(3.0, 1.0, 5)


def test_peak_memory_is_in_bytes_and_never_falls():
  before = metrics.peak_memory_bytes()
  block = np.ones(8 << 20)  # 64 MiB, touched.
  after = metrics.peak_memory_bytes()
  assert 10 << 20 < before <= after < 1 << 40
  assert after >= block.nbytes


def test_every_figure_has_a_formula():
  assert set(metrics.acceptance(WORKED)) <= set(metrics.FORMULAS)


def test_intervals_are_paired_by_document():
  """Methods that differ by a constant factor on every document have a ratio without spread; unpaired ones would not."""
  lengths = np.random.default_rng(0).integers(1, 5, 40).tolist()
  rounds = lambda scale: [[(9, scale * e - 1, scale * e)] for e in lengths]
  assert metrics.bootstrap(metrics.accepted_length_ratio, rounds(2), rounds(1), resamples=50) == (2.0, 2.0)
  low, high = metrics.bootstrap(lambda x: float(np.mean(x)), np.random.default_rng(1).normal(size=400).tolist())
  assert low < 0.06 and high > -0.06 and 0.15 < high - low < 0.25  # 2 · 1.96 / 20.
