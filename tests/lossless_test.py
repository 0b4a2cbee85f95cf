"""The checks on real outputs find what they are for."""

import dataclasses

import specdec_jax
from specdec_jax import lossless
from tests import toys

PROMPTS = [[i, i + 1, 3] for i in range(32)]


def sample(temperature, drafter=None):
  seeds = list(range(32))
  return specdec_jax.generate(toys.target(), drafter, PROMPTS, 24, temperature=temperature, seed=seeds, ignore_eos=True)


def test_surprisal_of_right_and_wrong_samples():
  target = toys.target()
  for drafter in (None, toys.block_drafter(target)):
    assert abs(lossless.surprisal_z(target, PROMPTS, sample(1.0, drafter), 1.0)) < 4
  assert lossless.surprisal_z(target, PROMPTS, sample(0.8), 1.0) > 6  # Too probable.
  assert lossless.surprisal_z(target, PROMPTS, sample(1.3), 1.0) < -6  # Too improbable.


def test_impossible_tokens_are_a_fault():
  target = toys.target()
  greedy = sample(0.0)
  assert abs(lossless.surprisal_z(target, PROMPTS, greedy, 0.0)) < 1e-6
  changed = [dataclasses.replace(greedy[0], tokens=[(greedy[0].tokens[0] + 1) % 61, *greedy[0].tokens[1:]]), *greedy[1:]]
  assert lossless.surprisal_z(target, PROMPTS, changed, 0.0) == float("-inf")
  assert lossless.identical(changed, greedy) == 31
