"""Logits to distributions, and keyed draws: the same code for plain decoding, drafting, verifying and bonus tokens.

Order: ids beyond the vocabulary are removed, then temperature, then top-k, then top-p. Temperature 0 is the one-hot
distribution of the argmax (lowest id on ties), so that greedy decoding is the same algorithm as sampling.
"""

import enum
import secrets
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.typing import Float, Int, Key

GREEDY_BELOW = 1e-5  # Temperatures below this are 0.


class Role(enum.IntEnum):
  """What a random number is for. Two draws of one output position never share a key."""

  DRAFT = 0
  ACCEPT = 1
  RECOVER = 2
  BONUS = 3
  TARGET = 4


@flax.struct.dataclass
class Sampling:
  """Sampling settings of a batch; a field that no row needs is None, and its work is not compiled.

  temperature [B] (None: every row is greedy), top_k [B] (0: off), top_p [B] (1: off), keys [B]: one a request.
  vocab: real vocabulary size; logits may be padded beyond it.
  """

  temperature: Float["B"] | None
  top_k: Int["B"] | None
  top_p: Float["B"] | None
  keys: Key["B"]
  vocab: int = flax.struct.field(pytree_node=False)

  @property
  def greedy(self) -> bool:
    """Whether every row is known at compile time to be greedy."""
    return self.temperature is None

  def position_keys(self, first: Int["B"], count: int) -> Key["B L"]:
    """One key for each of the output positions first … first+count-1 of every request."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    return fold(self.keys, first[:, None] + jnp.arange(count))


def make_sampling(
    batch: int, vocab: int, temperature: float | Sequence[float] = 0.0, top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0, seed: int | None | Sequence[int | None] = 0,
) -> Sampling:
  """Settings for `batch` requests from numbers or one number a request. Raises ValueError for what is out of range.

  An integer seed is every request's seed (a request's text does not depend on its slot); None draws a fresh one each.
  """
  def spread(name, value, dtype, low, high):
    out = np.broadcast_to(np.asarray(value, dtype), (batch,)) if np.size(value) in (1, batch) else None
    if out is None:
      raise ValueError(f"{name} has {np.size(value)} values for {batch} requests")
    if not np.all((out >= low) & (out <= high)):
      raise ValueError(f"{name} must be from {low} to {high}, not {value}")
    return out

  t = spread("temperature", temperature, np.float32, 0.0, 1e4)
  k = spread("top_k", top_k, np.int32, 0, 2**31 - 1)
  p = spread("top_p", top_p, np.float32, 1e-6, 1.0)
  seeds = [seed] * batch if seed is None or isinstance(seed, (int, np.integer)) else list(seed)
  if len(seeds) != batch:
    raise ValueError(f"seed has {len(seeds)} values for {batch} requests")
  seeds = np.asarray([secrets.randbits(32) if s is None else int(s) % 2**32 for s in seeds], np.uint32)
  sampled = t >= GREEDY_BELOW
  return Sampling(
      temperature=jnp.asarray(t) if sampled.any() else None,
      top_k=jnp.asarray(k) if (k[sampled] > 0).any() else None,
      top_p=jnp.asarray(p) if (p[sampled] < 1).any() else None,
      keys=jax.vmap(jax.random.key)(jnp.asarray(seeds)), vocab=vocab)


def greedy_tokens(logits: Float["B T V"], vocab: int) -> Int["B T"]:
  """argmax over the real vocabulary, lowest id on ties."""
  return jnp.argmax(real_logits(logits, vocab), -1).astype(jnp.int32)


def distribution(logits: Float["B T V"], sampling: Sampling) -> Float["B T V"]:
  """The distribution that a token is drawn from, float32; any axes may stand between B and V."""
  logits = real_logits(logits.astype(jnp.float32), sampling.vocab)
  greedy = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
  if sampling.greedy:
    return greedy
  rows = lambda x: x.reshape(-1, *(1,) * (logits.ndim - 1))
  temperature = rows(sampling.temperature)
  cold = temperature < GREEDY_BELOW
  logits = logits / jnp.where(cold, 1.0, temperature)
  if sampling.top_k is not None or sampling.top_p is not None:
    ordered = jnp.sort(logits, -1, descending=True)
    if sampling.top_k is not None:
      k = rows(sampling.top_k)
      last = jnp.where(k > 0, jnp.minimum(k, sampling.vocab), sampling.vocab) - 1
      least = jnp.take_along_axis(ordered, jnp.broadcast_to(last, (*ordered.shape[:-1], 1)), -1)
      logits, ordered = (jnp.where(x < least, -jnp.inf, x) for x in (logits, ordered))
    if sampling.top_p is not None:
      probabilities = jax.nn.softmax(ordered, -1)
      before = jnp.cumsum(probabilities, -1) - probabilities
      share = rows(sampling.top_p)  # A running sum in float32 may pass 1 early: a row without top-p keeps everything.
      kept = (before < share) | (share >= 1) | (jnp.arange(ordered.shape[-1]) == 0)
      least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
      logits = jnp.where(logits < least, -jnp.inf, logits)
  return jnp.where(cold, greedy, jax.nn.softmax(logits, -1))


def real_logits(logits: Float["B V"], vocab: int) -> Float["B V"]:
  """Logits with those of ids beyond the real vocabulary at −inf."""
  if logits.shape[-1] == vocab:
    return logits
  return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def draw(keys: Key["B"], p: Float["B V"], role: Role | Int["B"]) -> Int["B"]:
  """One token from each row of p (any positive scale), by the Gumbel maximum, with the key of `role`."""
  roles = jnp.broadcast_to(jnp.asarray(role, jnp.int32), keys.shape)
  keys = jax.vmap(jax.random.fold_in)(keys, roles)
  return jax.vmap(jax.random.categorical)(keys, jnp.log(p)).astype(jnp.int32)
