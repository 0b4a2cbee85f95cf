"""The checks on real outputs find what they are for."""

import dataclasses

import pytest

import specdec_jax
from specdec_jax import lossless
from tests import toys

PROMPTS = [[i, i + 1, 3] for i in range(32)]


def sample(temperature, drafter=None):
  seeds = list(range(32))
  return specdec_jax.generate(toys.target(), drafter, PROMPTS, 24, temperature=temperature, seed=seeds, ignore_eos=True)


@pytest.mark.slow
def test_surprisal_of_right_and_wrong_samples():
  target = toys.target()
  for drafter in (None, toys.block_drafter(target)):
    right = lossless.surprisal(target, PROMPTS, sample(1.0, drafter), 1.0)
    assert abs(right.z) < 3 and right.p_value > 0.01
  for temperature, sign in ((0.8, 1), (1.3, -1)):  # Too probable, too improbable.
    wrong = lossless.surprisal(target, PROMPTS, sample(temperature), 1.0)
    assert sign * wrong.z > 5 and wrong.p_value < 1e-5


def test_rare_surprises_are_no_proof():
  """Of what is expected 0.8 times five are unlikely, thirty impossible; a z-score calls both a proof."""
  few, many = (lossless.Surprisal(-5.0 * (n - 0.8), 0.8 * 25, 0) for n in (5, 30))
  assert few.z < -4 and 0.01 < few.p_value < 0.1 and many.p_value < 1e-9
  both = few + many
  assert (both.total, both.variance) == (few.total + many.total, 40.0) and (both + lossless.Surprisal(0.0, 1.0, 1)).p_value == 0


def test_impossible_tokens_are_a_fault():
  target = toys.target()
  greedy = sample(0.0)
  sure = lossless.surprisal(target, PROMPTS, greedy, 0.0)
  assert abs(sure.z) < 1e-6 and sure.p_value == 1 and not sure.impossible
  changed = [dataclasses.replace(greedy[0], tokens=[(greedy[0].tokens[0] + 1) % 61, *greedy[0].tokens[1:]]), *greedy[1:]]
  found = lossless.surprisal(target, PROMPTS, changed, 0.0)
  assert found.z == float("-inf") and found.p_value == 0 and found.impossible
  assert lossless.identical(changed, greedy) == 31
