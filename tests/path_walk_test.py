"""The path walk inside a drafter, at its edges, and the search for candidates; values against the reference are in kernels_test.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax.drafters.heads import top_candidates, top_of_chunks
from specdec_jax.kernels import path_walk
from specdec_jax.kernels.path_walk.shapes import make
from specdec_jax.sampling import Role, gumbel, make_sampling, next_token
from tests import toys


def arguments(batch=3, temperature=None, **changes):
  return {**make(jax.random.key(3), batch, 4, 5, 8, 23, "float32", temperature), **changes}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.slow
def test_a_drafter_drafts_the_same_with_the_kernel(temperature):
  """The same text, of the same rounds, whatever walks."""
  target = toys.target()
  drafter = toys.block_drafter(target, head="selector", rank=6, candidates=4, own_embedding=False, confidence=True)

  def rounds(kernels):
    model = dataclasses.replace(drafter.model, kernels=kernels)
    done = specdec_jax.generate(
        target, dataclasses.replace(drafter, model=model), [[3, 1, 4], [2] * 6], 12, temperature, seed=[1, 2], ignore_eos=True)
    return [(c.tokens, c.rounds) for c in done]

  assert rounds("reference") == rounds("tpu_interpret")


def test_draws_are_those_of_next_token():
  """Slot after slot through `next_token` with the same keys: the walk's own tokens and distributions, greedy rows among sampled ones."""
  a, count = arguments(6, [1.0, 0.0, 0.5, 2.0, 1e-6, 0.1]), 5
  sampling = make_sampling(6, 23, a["temperature"].tolist(), seed=list(range(6)))
  keys = sampling.position_keys(jnp.zeros(6, jnp.int32), 4)
  a["noise"] = jax.vmap(lambda k: gumbel(k, count, Role.DRAFT))(keys)
  index, scores, q = jax.jit(path_walk)(**a)
  previous = a["anchor"]
  for t in range(4):
    left = a["predecessor"][previous] * a["gate"][:, t]
    expected = a["unary"][:, t] + jnp.einsum("br,bcr->bc", left, a["successor"][a["ids"][:, t]])
    np.testing.assert_allclose(scores[:, t], expected, atol=1e-5)
    one, p = next_token(scores[:, t], sampling, keys[:, t], Role.DRAFT, a["ids"][:, t])
    np.testing.assert_array_equal(index[:, t], one)
    np.testing.assert_allclose(q[:, t], p, atol=1e-6)
    previous = jnp.take_along_axis(a["ids"][:, t], one[:, None], 1)[:, 0]


@pytest.mark.parametrize("implementation", ["reference", "tpu_interpret", "gpu_interpret"])
def test_ties_and_malformed_rows(implementation):
  """Equal scores go to the lowest index; a row with NaN or +inf, or of −inf throughout, gives -1 and no distribution."""
  a = arguments(4)
  zero = {"gate": jnp.zeros_like(a["gate"])}
  unary = jnp.asarray([[0, 1, 1, 0, 1]] * 4, jnp.float32)
  unary = jnp.stack([unary, unary.at[1, 2].set(jnp.nan).at[2].set(-jnp.inf).at[3, 4].set(jnp.inf), unary, unary], 1)
  index, scores, q = path_walk(**{**a, **zero, "unary": unary}, implementation=implementation)
  np.testing.assert_array_equal(index, [[1, 1, 1, 1], [1, -1, 1, 1], [1, -1, 1, 1], [1, -1, 1, 1]])
  np.testing.assert_array_equal(scores, unary)
  np.testing.assert_array_equal(q[:, 1, 0], [1, np.nan, 0, np.nan])
  sampled = {"temperature": jnp.ones(4), "noise": jnp.zeros_like(unary)}
  index, _, q = path_walk(**{**a, **zero, **sampled, "unary": unary}, implementation=implementation)
  np.testing.assert_array_equal(index[:, 1], [1, -1, -1, -1])
  np.testing.assert_array_equal(np.isnan(q[:, 1]).all(-1), [False, True, False, True])
  np.testing.assert_array_equal(q[2, 1], np.zeros(5))
  np.testing.assert_allclose(q[0, 1], jax.nn.softmax(unary[0, 1]), atol=1e-6)


@pytest.mark.parametrize("changes, message", [
    ({"unary": jnp.zeros((3, 4, 6))}, r"unary must be \(3, 4, 5\), not \(3, 4, 6\)"),
    ({"gate": jnp.zeros((3, 4, 9))}, r"gate must be \(3, 4, 8\)"),
    ({"noise": jnp.zeros((3, 4, 5))}, "temperature and noise go together"),
    ({"anchor": jnp.zeros((3, 1), jnp.int32)}, r"anchor must be \(3,\)"),
    ({"ids": jnp.zeros((3, 4), jnp.int32)}, r"ids must be \[B,L,C\]")], ids=["unary", "gate", "noise", "anchor", "ids"])
def test_wrong_shapes_are_named(changes, message):
  with pytest.raises(ValueError, match="path_walk: " + message):
    path_walk(**arguments(**changes))


@pytest.mark.parametrize("vocab, count", [(2048, 16), (3001, 5), (300, 2)])
def test_candidates_of_chunks_are_the_best_ids(vocab, count):
  """Against `lax.top_k`: distinct logits, many ties, all equal, mostly −inf, all −inf, NaN somewhere and everywhere."""
  rng = np.random.default_rng(0)
  few = np.full(vocab, -np.inf)
  few[[7, vocab - 1]] = 1.0
  some = rng.normal(size=vocab)
  some[[3, vocab // 2]] = np.nan
  x = jnp.asarray(np.stack([
      rng.normal(size=vocab), rng.integers(0, 3, vocab), rng.integers(0, 40, vocab), np.zeros(vocab), few, np.full(vocab, -np.inf), some,
      np.full(vocab, np.nan)]), jnp.float32)[:, None]
  values, ids = jax.lax.top_k(x, count)
  found, logits = jax.jit(top_of_chunks, static_argnums=1)(x, count)
  np.testing.assert_array_equal(found, ids)
  np.testing.assert_array_equal(logits, values)


def test_candidates_of_a_large_vocabulary():
  x = jnp.asarray(np.random.default_rng(1).integers(0, 2000, (2, 1, 40_000)), jnp.float32)
  values, ids = jax.lax.top_k(x, 16)
  found, logits = jax.jit(top_candidates, static_argnums=1)(x, 16)
  np.testing.assert_array_equal(found, ids)
  np.testing.assert_array_equal(logits, values)
