"""The checks on real outputs find what they are for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
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


def test_a_tie_at_the_filters_edge_is_no_fault():
  """Which of two tokens a filter keeps may turn on the last bit: the first one beyond the edge is possible, the next is not."""
  target = toys.target()
  logits = target.forward(np.array([PROMPTS[0]])).logits
  p = np.sort(np.asarray(jax.nn.softmax(logits[0, -1].astype(jnp.float32))))[::-1]
  ids = np.argsort(-np.asarray(logits[0, -1]))
  share = float(p[:9].sum() - 1e-6)  # The ninth reaches it, by less than what a logit may be off by.
  read = lambda i, **settings: float(lossless.teacher_force(target, PROMPTS[0], [int(ids[i])], 1.0, **settings).log_p[0])
  assert np.isfinite(read(9, top_p=share)) and read(10, top_p=share) == -np.inf
  assert np.isfinite(read(8, top_p=share)) and read(9, top_p=share - 0.01) == -np.inf
  assert np.isfinite(read(8, top_k=9)) and read(9, top_k=9) == -np.inf
  assert read(40, min_p=float(p[40] / p[0]) + 1e-6) > -np.inf and read(40, min_p=float(p[40] / p[0]) + 0.01) == -np.inf
