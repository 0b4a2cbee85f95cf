"""The block rule by enumeration: every path of drafts, every outcome, path-dependent p and q, lengths that a schedule picks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verify
from specdec_jax.verify import SparseDistribution

VOCAB = 3


def model(seed: int, sharpness: float = 1.0):
  """A next-token distribution for every prefix."""

  @functools.cache
  def at(prefix: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.full(VOCAB, sharpness))

  return at


def tables(p, q, depth: int, sparse: bool):
  """All paths [N,L] with the rows that verify them: p [N,L+1,V] and q, dense or sparse with the first id listed twice."""
  paths = np.array(list(itertools.product(range(VOCAB), repeat=depth)))
  rows = lambda f, count: np.array([[f(tuple(x[:k])) for k in range(count)] for x in paths], np.float32)
  dense = rows(q, depth)
  if not sparse:
    return paths, jnp.asarray(rows(p, depth + 1)), jnp.asarray(dense), dense
  ids = np.broadcast_to([0, *range(VOCAB)], (*dense.shape[:2], VOCAB + 1))
  probs = np.concatenate([dense[..., :1] / 2, dense[..., :1] / 2, dense[..., 1:]], -1)
  return paths, jnp.asarray(rows(p, depth + 1)), SparseDistribution(jnp.asarray(ids), jnp.asarray(probs)), dense


@functools.partial(jax.jit, static_argnames="rule")
def outcomes(p, q, drafts, lengths, rule):
  """([N,L+1] probability that n drafts stand, [N,L+1,V] the token after them)."""
  depth = drafts.shape[1]
  counts = jnp.arange(1, depth + 1)
  if rule == "block":
    stand, scales = verify.block_acceptance(p, q, drafts, lengths)
    stand = jnp.where(counts <= lengths[:, None], stand, 0.0)
    none_above = jnp.cumprod((1 - stand)[:, ::-1], 1)[:, ::-1]
    beyond = jnp.concatenate([none_above[:, 1:], jnp.ones((len(p), 1))], 1)
    chance = jnp.concatenate([none_above[:, :1], stand * beyond], 1)
  else:
    keep = jnp.where(counts <= lengths[:, None], verify.acceptance(p, q, drafts), 0.0)
    reach = jnp.concatenate([jnp.ones((len(p), 1)), jnp.cumprod(keep, 1)], 1)
    chance, scales = reach * (1 - jnp.pad(keep, ((0, 0), (0, 1)))), jnp.ones((len(p), depth + 1))
  after = [verify.next_distribution(p, q, jnp.full(len(p), n), lengths, scales[:, n]) for n in range(depth + 1)]
  return chance, jnp.stack(after, 1)


def emitted(p, q, depth: int, rule: str, sparse: bool = False, length=None):
  """(joint distribution of depth+1 tokens, of which the round emits the first ones and the target the rest; expected
  accepted drafts). length(prefix): whether the draft after `prefix` is verified, given that those before are."""
  paths, rows, proposals, dense = tables(p, q, depth, sparse)
  lengths = np.array([next((k for k in range(depth) if length and not length(tuple(x[:k]))), depth) for x in paths])
  chance, after = map(np.asarray, outcomes(rows, proposals, jnp.asarray(paths, jnp.int32), jnp.asarray(lengths, jnp.int32), rule))
  joint, accepted = np.zeros((VOCAB,) * (depth + 1)), 0.0
  for x, path_chance, path_after, path_q in zip(paths, chance, after, dense):
    weight = np.prod(path_q[np.arange(depth), x])
    accepted += weight * (path_chance * np.arange(depth + 1)).sum()
    for n in range(depth + 1):
      for token in range(VOCAB):
        prefix = (*x[:n], token)
        joint[prefix] += weight * path_chance[n] * path_after[n, token] * rest(p, prefix, depth + 1)
  return joint, accepted


def rest(p, prefix, size: int) -> np.ndarray:
  """The target's joint distribution of what follows `prefix` up to `size` tokens."""
  if len(prefix) == size:
    return np.ones(())
  return np.stack([p(prefix)[v] * rest(p, (*prefix, v), size) for v in range(VOCAB)])


@pytest.mark.parametrize("rule", verify.RULES)
@pytest.mark.parametrize("depth, sparse", [(3, False), (3, True), (4, False)])
def test_exact_by_enumeration(rule, depth, sparse):
  for seed in range(3):
    p, q = model(seed), model(seed + 100, 0.5)
    joint, _ = emitted(p, q, depth, rule, sparse)
    np.testing.assert_allclose(joint, rest(p, (), depth + 1), atol=1e-6)


@pytest.mark.parametrize("rule", verify.RULES)
def test_exact_with_lengths_that_do_not_peek(rule):
  """A length that follows from the drafts before it is exact; one that looks at the draft it cuts is not."""
  p, q = model(1), model(101, 0.5)
  honest = lambda prefix: sum(prefix) % 3 != 1
  joint, _ = emitted(p, q, 3, rule, length=honest)
  np.testing.assert_allclose(joint, rest(p, (), 4), atol=1e-6)
  paths, rows, proposals, dense = tables(p, q, 1, False)
  peeking = jnp.asarray([0 if x == 1 else 1 for (x,) in paths], jnp.int32)  # Drops the draft when it is token 1.
  chance, after = outcomes(rows, proposals, jnp.asarray(paths, jnp.int32), peeking, rule)
  first = np.einsum("n,nc,ncv->v", dense[:, 0][np.arange(3), paths[:, 0]], *map(np.asarray, (chance[:, :1], after[:, :1])))
  first += dense[:, 0][np.arange(3), paths[:, 0]] * np.asarray(chance[:, 1])
  assert np.abs(first - p(())).max() > 0.01


def test_never_shorter_than_the_token_rule():
  gains = []
  for seed in range(8):
    p, q = model(seed), model(seed + 100, 0.7)
    (_, block), (_, token) = (emitted(p, q, 3, rule) for rule in ("block", "token"))
    assert block >= token - 1e-6
    gains.append(block - token)
  assert max(gains) > 0.05


def test_accept_follows_its_probabilities():
  """The compiled rule draws what `block_acceptance` says: frequencies of the accepted counts over many keys."""
  n, depth = 20_000, 3
  p, q = model(2), model(102, 0.5)
  paths, rows, proposals, _ = tables(p, q, depth, False)
  at = 11
  many = lambda x: jnp.broadcast_to(x[at], (n, *x.shape[1:]))
  drafts, lengths = many(jnp.asarray(paths, jnp.int32)), jnp.full(n, depth)
  verdict = jax.jit(verify.accept, static_argnames="rule")(
      many(rows), many(proposals), drafts, lengths, jax.random.split(jax.random.key(0), (n, depth + 1)), rule="block")
  chance, after = (np.asarray(x[0]) for x in outcomes(many(rows)[:1], many(proposals)[:1], drafts[:1], lengths[:1], "block"))
  seen = np.zeros((depth + 1, VOCAB))
  np.add.at(seen, (np.asarray(verdict.accepted), np.asarray(verdict.next_token)), 1 / n)
  expected = chance[:, None] * after
  assert np.all(np.abs(seen - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)


def test_equal_distributions_stand_whole():
  """p = q: nothing is ever rejected, and no 0/0 becomes a number."""
  p = model(5)
  paths, rows, proposals, _ = tables(p, p, 3, False)
  stand, scales = verify.block_acceptance(rows, proposals, jnp.asarray(paths, jnp.int32), jnp.full(len(paths), 3))
  np.testing.assert_allclose(stand, 1.0, atol=1e-5)
  np.testing.assert_allclose(scales, 1.0, atol=1e-5)
