"""Rounds by enumeration: every path of drafts, every outcome, probabilities added up and compared with the target's.

A small vocabulary, a next-token distribution for every prefix, and the project's own functions for what is drawn.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import verify
from specdec_jax.verify import SparseDistribution

VOCAB = 3
Model = Callable[[tuple[int, ...]], np.ndarray]  # prefix → distribution [V]


def random_model(seed: int, sharpness: float = 1.0, support: int = VOCAB, vocab: int = VOCAB) -> Model:
  """A distribution for every prefix, over `support` ids that depend on the prefix."""

  @functools.cache
  def at(prefix):
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    out = np.zeros(vocab)
    out[rng.permutation(vocab)[:support]] = rng.dirichlet(np.full(support, sharpness))
    return out

  return at


@dataclasses.dataclass(frozen=True)
class Tables:
  """All paths [N,L] of drafts with what verifies them: p [N,L+1,V]; q, what they are drawn from [N,L,V]; claimed, what
  verification is told of q, dense or sparse; lengths [N]."""

  paths: np.ndarray
  p: jax.Array
  q: np.ndarray
  claimed: jax.Array | SparseDistribution
  lengths: np.ndarray


def tables(p: Model, q: Model, depth: int, sparse: bool = False, length=None, claimed: Model | None = None) -> Tables:
  """length(prefix): whether the draft after `prefix` is verified, given that those before are.
  sparse: the claimed q lists its ids in another order, the first of them twice."""
  vocab = len(p(()))
  paths = np.array(list(itertools.product(range(vocab), repeat=depth)), np.int32)
  rows = lambda f, count: np.array([[f(tuple(map(int, x[:k]))) for k in range(count)] for x in paths], np.float32)
  told, drawn = rows(claimed or q, depth), rows(q, depth)
  lengths = np.array([next((k for k in range(depth) if length and not length(tuple(map(int, x[:k])))), depth) for x in paths], np.int32)
  if sparse:
    order = np.argsort(-told, -1)
    probs = np.take_along_axis(told, order, -1)
    twice = np.concatenate([probs[..., :1] / 2, probs[..., :1] / 2, probs[..., 1:]], -1)
    told = SparseDistribution(jnp.asarray(np.concatenate([order[..., :1], order], -1), jnp.int32), jnp.asarray(twice))
  return Tables(paths, jnp.asarray(rows(p, depth + 1)), drawn, told if sparse else jnp.asarray(told), lengths)


@functools.partial(jax.jit, static_argnames="rule")
def outcomes(p, q, drafts, lengths, rule):
  """([N,L+1] probability that n drafts stand, [N,L+1,V] the distribution of the token after them), by the project's rules."""
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


def emitted(p: Model, t: Tables, chance, after, follows=None) -> np.ndarray:
  """The joint distribution of L+1 tokens, of which the round emits the first ones and the target the rest.

  chance, after: as of `outcomes`; follows(path, prefix, n, size): what comes behind a round that emitted `prefix`, n of it
  drafts; by default the target."""
  depth, vocab = t.paths.shape[1], t.p.shape[-1]
  follows = follows or (lambda path, prefix, n, size: rest(p, prefix, size))
  joint = np.zeros((vocab,) * (depth + 1))
  for x, path_chance, path_after, path_q in zip(t.paths, np.asarray(chance, np.float64), np.asarray(after, np.float64), t.q):
    weight = np.prod(path_q[np.arange(depth), x], dtype=np.float64)
    for n, token in itertools.product(range(depth + 1), range(vocab)):
      mass = weight * path_chance[n] * path_after[n, token]
      if mass:
        prefix = (*map(int, x[:n]), token)
        joint[prefix] += mass * follows(x, prefix, n, depth + 1)
  return joint


def rest(p: Model, prefix: tuple[int, ...], size: int) -> np.ndarray:
  """The target's joint distribution of what follows `prefix` up to `size` tokens."""
  if len(prefix) >= size:
    return np.ones(())
  return np.stack([p(prefix)[v] * rest(p, (*prefix, v), size) for v in range(len(p(())))])


def error(joint: np.ndarray, p: Model) -> float:
  """How far a joint distribution is from the target's."""
  return float(np.abs(joint - rest(p, (), joint.ndim)).max())


def round_error(p: Model, t: Tables, rule: str) -> float:
  return error(emitted(p, t, *outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths), rule)), p)


def accepted(t: Tables, rule: str) -> float:
  """Expected accepted drafts of a round."""
  chance, _ = outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths), rule)
  weights = np.prod(np.take_along_axis(t.q, t.paths[..., None], -1)[..., 0], 1, dtype=np.float64)
  return float((weights[:, None] * np.asarray(chance) * np.arange(chance.shape[1])).sum())
