"""Logits to distributions, and keyed draws: the same code for plain decoding, drafting, verifying and bonus tokens.

Order: ids beyond the vocabulary are removed; logit bias is added, −inf for banned and not allowed ids; repetition,
frequency and presence penalties; temperature; min-p; top-k; top-p. Temperature 0 is the one-hot distribution of the argmax
(lowest id on ties), so that greedy decoding is the same algorithm as sampling.

Whatever looks at earlier tokens reads `Sampling.counts`, which is true for one prefix: each row that judges or makes a
draft gets the counts with the block's own earlier drafts in (`after`, `along`). A row that is no distribution (NaN or
infinite logits) is NaN throughout, and no token, -1, is drawn from it.
"""

import enum
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.typing import Bool, Float, Int, Key

GREEDY_BELOW = 1e-5  # Temperatures below this are 0.
MOST_BIAS = 1e4


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

  temperature [B] (None: every row is greedy), top_k [B] (0: off), top_p [B] (1: off), min_p [B] (0: off), bias [B,V],
  repetition [B] (1: off), frequency, presence [B] (0: off), keys [B]: one a request. prompt [B,V]: ids that stand in the
  prompt; counts [B,V], or [B,T,V] behind `along`, for rows of their own: how often each id was emitted so far; both only with a penalty.
  vocab: real vocabulary size; logits may be padded beyond it.
  """

  temperature: Float["B"] | None
  top_k: Int["B"] | None
  top_p: Float["B"] | None
  keys: Key["B"]
  vocab: int = flax.struct.field(pytree_node=False)
  min_p: Float["B"] | None = None
  bias: Float["B V"] | None = None
  repetition: Float["B"] | None = None
  frequency: Float["B"] | None = None
  presence: Float["B"] | None = None
  prompt: Bool["B V"] | None = None
  counts: Int["B V"] | None = None

  @property
  def greedy(self) -> bool:
    """Whether every row is known at compile time to be greedy."""
    return self.temperature is None

  @property
  def plain(self) -> bool:
    """Whether nothing but the temperature acts on the logits of any row."""
    return all(x is None for x in (self.top_k, self.top_p, self.min_p, self.bias, self.repetition, self.frequency, self.presence))

  def position_keys(self, first: Int["B"], count: int) -> Key["B L"]:
    """One key for each of the output positions first … first+count-1 of every request."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    return fold(self.keys, first[:, None] + jnp.arange(count))

  def round_keys(self, start: Int["B"], count: int) -> Key["B L"]:
    """Keys of a round whose first output position is `start`, one a slot, that no other round shares.

    Under keys by position a draft that was not kept is drawn and judged again with the same noise. That is exact only where
    nothing that was kept depended on that noise: under the token rule, whose rejection looks at nothing behind it, without a
    schedule, through which it could reach a neighbour's length and from there the next round."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    return fold(jax.vmap(jax.random.fold_in)(self.keys, start), jnp.broadcast_to(len(Role) + jnp.arange(count), (start.shape[0], count)))

  def after(self, tokens: Int["B L"], count: Int["B"] | int) -> "Sampling":
    """With the first `count` of `tokens` counted too; ids outside the vocabulary are none."""
    if self.counts is None:
      return self
    real = (jnp.arange(tokens.shape[1]) < jnp.reshape(count, (-1, 1))) & (tokens >= 0)
    add = jax.vmap(lambda row, ids, one: row.at[ids].add(one, mode="drop"))
    return self.replace(counts=add(self.counts, tokens, real.astype(self.counts.dtype)))

  def along(self, drafts: Int["B L"]) -> "Sampling":
    """For the L+1 rows of a block: row k has the drafts before it counted."""
    if self.counts is None:
      return self
    each = jnp.cumsum(jax.nn.one_hot(drafts, self.counts.shape[-1], dtype=self.counts.dtype), 1)
    return self.replace(counts=self.counts[:, None] + jnp.pad(each, ((0, 0), (1, 0), (0, 0))))


def make_sampling(batch: int, vocab: int, *settings, **more_settings) -> Sampling:
  """`host_sampling` on the device, with keys from its seeds."""
  host = host_sampling(batch, vocab, *settings, **more_settings)
  return jax.tree.map(jnp.asarray, host).replace(keys=jax.vmap(jax.random.key)(host.keys))


def host_sampling(
    batch: int, vocab: int, temperature: float | Sequence[float] = 0.0, top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0, seed: int | None | Sequence[int | None] = 0, min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0, frequency_penalty: float | Sequence[float] = 0.0,
    presence_penalty: float | Sequence[float] = 0.0, logit_bias: Any = None, banned: Any = None, allowed: Any = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Sampling:
  """Settings for `batch` requests from numbers or one number a request, as numpy arrays, with seeds (uint32 [B]) for keys. Raises
  ValueError for what is out of range.

  An integer seed is every request's seed (a request's text does not depend on its slot); None draws a fresh one each.
  min_p: ids below this share of the best one's probability are cut. repetition_penalty: positive logits of ids in the prompt
  or the text are divided by it, negative ones multiplied (arXiv 1909.05858); frequency_penalty is taken from a logit for
  every time that its id was emitted, presence_penalty once. logit_bias: {id: bias}; banned, allowed: lists of ids; one for
  all requests, or a list with one, or None, a request. prompts: token ids, which the repetition penalty needs.
  """
  def spread(name, value, dtype, low, high):
    given = np.asarray(value)
    if given.dtype.kind not in ("iu" if dtype == np.int32 else "iuf") or given.ndim > 1:
      raise ValueError(f"{name} must be {'an integer' if dtype == np.int32 else 'a number'}, or a list of them, not {value!r}")
    if given.size not in (1, batch):
      raise ValueError(f"{name} has {given.size} values for {batch} requests")
    if not np.all((given >= low) & (given <= high)):
      raise ValueError(f"{name} must be from {low} to {high}, not {value}")
    return np.broadcast_to(given.astype(dtype), (batch,))

  t = spread("temperature", temperature, np.float32, 0.0, 1e4)
  k = spread("top_k", top_k, np.int32, 0, 2**31 - 1)
  p = spread("top_p", top_p, np.float32, 1e-6, 1.0)
  least = spread("min_p", min_p, np.float32, 0.0, 1.0)
  repetition = spread("repetition_penalty", repetition_penalty, np.float32, 1e-3, 1e3)
  frequency = spread("frequency_penalty", frequency_penalty, np.float32, -1e3, 1e3)
  presence = spread("presence_penalty", presence_penalty, np.float32, -1e3, 1e3)
  seeds = [seed] * batch if seed is None or np.ndim(seed) == 0 else list(seed)
  if len(seeds) != batch:
    raise ValueError(f"seed has {len(seeds)} values for {batch} requests")
  if not all(s is None or np.asarray(s).dtype.kind in "iu" for s in seeds):
    raise ValueError(f"seed must be an integer or None, or a list of them, not {seed!r}")
  seeds = np.asarray([secrets.randbits(32) if s is None else int(s) % 2**32 for s in seeds], np.uint32)
  sampled, given = t >= GREEDY_BELOW, lambda x, wanted: x if wanted.any() else None
  repeats, penalised = repetition != 1, (repetition != 1) | (frequency != 0) | (presence != 0)
  if repeats.any() and prompts is None:
    raise ValueError("repetition_penalty needs the prompts, as token ids")
  return Sampling(
      temperature=given(t, sampled), top_k=given(k, k[sampled] > 0), top_p=given(p, p[sampled] < 1),
      min_p=given(least, least[sampled] > 0), bias=_bias_table(batch, vocab, logit_bias, banned, allowed),
      repetition=given(repetition, repeats), frequency=given(frequency, frequency != 0), presence=given(presence, presence != 0),
      prompt=_mark(prompts, vocab) if repeats.any() else None,
      counts=np.zeros((batch, vocab), np.int32) if penalised.any() else None, keys=seeds, vocab=vocab)


def _mark(ids: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
  out = np.zeros((len(ids), vocab), bool)
  for row, some in zip(out, ids):
    row[[i for i in some if 0 <= i < vocab]] = True
  return out


def _bias_table(batch: int, vocab: int, logit_bias, banned, allowed) -> np.ndarray | None:
  """What is added to the logits, or None where nothing is."""
  def a_request(name, value, of, one):
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, Mapping):
      values = [value] * batch
    elif isinstance(value, str) or not isinstance(value, Sequence):
      raise ValueError(f"{name} must be {of}, or a list with one, or None, a request, not {value!r}")
    else:
      values = [value] * batch if not len(value) or one(value) else list(value)
    if len(values) != batch:
      raise ValueError(f"{name} has {len(values)} entries for {batch} requests")
    wrong = [v for v in values if v is not None and isinstance(v, Mapping) != (name == "logit_bias") or isinstance(v, (str, int, float))]
    if wrong:
      raise ValueError(f"{name} must be {of}, or a list with one, or None, a request, not {wrong[0]!r}")
    return values

  def usable(name, row, found):
    if not all(isinstance(i, (int, np.integer)) for i in found):
      raise ValueError(f"{name} of request {row} holds what is no token id: {list(found)[:5]}")
    ids = [int(i) for i in found]
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
      raise ValueError(f"{name} of request {row} holds ids outside the vocabulary of {vocab}: {wrong[:5]}")
    return ids

  numbers = lambda x: all(isinstance(i, (int, float, np.number)) for i in x)
  biases, bans, allows = (a_request(*x) for x in (
      ("logit_bias", logit_bias, "{id: bias}", lambda x: False), ("banned", banned, "a list of ids", numbers),
      ("allowed", allowed, "a list of ids", numbers)))
  if all(x is None or (not len(x) and which is not allows) for which in (biases, bans, allows) for x in which):
    return None
  out = np.zeros((batch, vocab), np.float32)
  for i in range(batch):
    for token, bias in zip(usable("logit_bias", i, biases[i] or {}), (biases[i] or {}).values()):
      if not isinstance(bias, (int, float, np.number)) or not (bias == -np.inf or abs(bias) <= MOST_BIAS):
        raise ValueError(
            f"logit_bias of request {i} is {bias} for id {token}: it must be from -{MOST_BIAS:g} to {MOST_BIAS:g}, or -inf for never")
      out[i, token] = bias
    out[i, usable("banned", i, bans[i] if bans[i] is not None else ())] = -np.inf
    if allows[i] is not None:
      out[i, ~_mark([usable("allowed", i, allows[i])], vocab)[0]] = -np.inf
    if np.all(out[i] == -np.inf):
      raise ValueError(f"request {i} may emit no token: every id is banned or not allowed")
  return out


def adjusted(logits: Float["B T V"], sampling: Sampling, ids: Int["B T C"] | None = None) -> Float["B T V"]:
  """float32 logits with vocabulary, bias and penalties applied; any axes may stand between B and V.

  ids: the logits are those of these candidates, [B,…,C]; counts are then [B,V].
  """
  logits = logits.astype(jnp.float32)
  if ids is None:
    logits = real_logits(logits, sampling.vocab)

  def at(table):
    if table.ndim < logits.ndim:
      table = table.reshape(table.shape[0], *(1,) * (logits.ndim - table.ndim), table.shape[-1])
    if ids is None:
      width = logits.shape[-1] - table.shape[-1]
      return jnp.pad(table, ((0, 0),) * (table.ndim - 1) + ((0, max(width, 0)),))[..., : logits.shape[-1]]
    return jnp.take_along_axis(jnp.broadcast_to(table, (*ids.shape[:-1], table.shape[-1])), ids, -1, mode="clip")

  if sampling.bias is not None:
    logits += at(sampling.bias)
  if sampling.counts is not None:
    counts = at(sampling.counts)
    if sampling.repetition is not None:
      r = _rows(sampling.repetition, logits)
      logits = jnp.where((counts > 0) | at(sampling.prompt), jnp.where(logits > 0, logits / r, logits * r), logits)
    if sampling.frequency is not None:
      logits -= _rows(sampling.frequency, logits) * counts
    if sampling.presence is not None:
      logits -= _rows(sampling.presence, logits) * (counts > 0)
  return logits


def distribution(logits: Float["B T V"], sampling: Sampling, ids: Int["B T C"] | None = None) -> Float["B T V"]:
  """The distribution that a token is drawn from, float32; axes and `ids` as in `adjusted`. NaN where there is none."""
  logits = adjusted(logits, sampling, ids)
  best = best_value(logits)[..., None]
  greedy = jnp.where(jnp.isfinite(best), jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32), jnp.nan)
  if sampling.greedy:
    return greedy
  temperature = _rows(sampling.temperature, logits)
  cold = temperature < GREEDY_BELOW
  logits = logits / jnp.where(cold, 1.0, temperature)
  if sampling.min_p is not None:
    logits = jnp.where(logits < logits.max(-1, keepdims=True) + jnp.log(_rows(sampling.min_p, logits)), -jnp.inf, logits)
  if sampling.top_k is not None or sampling.top_p is not None:
    ordered = jnp.sort(logits, -1, descending=True)
    if sampling.top_k is not None:
      k = _rows(sampling.top_k, logits)
      last = jnp.where(k > 0, jnp.minimum(k, logits.shape[-1]), logits.shape[-1]) - 1
      least = jnp.take_along_axis(ordered, jnp.broadcast_to(last, (*ordered.shape[:-1], 1)), -1)
      logits, ordered = (jnp.where(x < least, -jnp.inf, x) for x in (logits, ordered))
    if sampling.top_p is not None:
      probabilities = jax.nn.softmax(ordered, -1)
      before = jnp.cumsum(probabilities, -1) - probabilities
      share = _rows(sampling.top_p, logits)  # A running sum in float32 may pass 1 early: a row without top-p keeps everything.
      kept = (before < share) | (share >= 1) | (jnp.arange(ordered.shape[-1]) == 0)
      least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
      logits = jnp.where(logits < least, -jnp.inf, logits)
  return jnp.where(cold, greedy, jax.nn.softmax(logits, -1))


def _rows(x: Float["B"], like: Float["B T V"]) -> Float["B T V"]:
  """One number a request, to meet an array whose first axis is B."""
  return x.reshape(-1, *(1,) * (like.ndim - 1))


def real_logits(logits: Float["B V"], vocab: int) -> Float["B V"]:
  """Logits with those of ids beyond the real vocabulary at −inf."""
  if logits.shape[-1] == vocab:
    return logits
  return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def malformed(p: Float["B V"]) -> Bool["B"]:
  """Whether a row holds NaN, anything infinite, or anything negative."""
  return ~(jnp.isfinite(p.sum(-1)) & (p.min(-1) >= 0))


def sound(p: Float["B V"]) -> Bool["B"]:
  """Whether each row is a distribution, of any positive scale: not malformed, and not all 0."""
  return ~malformed(p) & (p.sum(-1) > 0)


def role_keys(keys: Key["B T"], role: Role | Int["B T"]) -> Key["B T"]:
  """The keys of draws in a role."""
  fold = jax.random.fold_in
  for _ in keys.shape:
    fold = jax.vmap(fold)
  return fold(keys, jnp.broadcast_to(jnp.asarray(role, jnp.int32), keys.shape))


def gumbel(keys: Key["B"], count: int, role: Role | Int["B"]) -> Float["B V"]:
  """The noise that `draw` adds to the logarithms of `count` probabilities."""
  noise = lambda key: jax.random.gumbel(key, (count,), jnp.float32)  # In fewer bits it has ties, which go to the lower ids.
  return jax.vmap(noise)(role_keys(keys, role))


def draw(keys: Key["B"], p: Float["B V"], role: Role | Int["B"]) -> Int["B"]:
  """One token from each row of p (any positive scale), by the Gumbel maximum, with the key of `role`; -1 from a row that is
  not `sound`."""
  p = p.astype(jnp.float32)
  best = jnp.argmax(gumbel(keys, p.shape[-1], role) + jnp.log(p), -1)
  return jnp.where(sound(p), best.astype(jnp.int32), -1)


def best_value(logits: Float["B T V"]) -> Float["B T"]:
  """The maximum; NaN where any entry is, which a wide maximum that XLA fuses on CPUs can lose."""
  return jnp.where(jnp.isnan(logits).any(-1), jnp.nan, logits.max(-1))


def best_tokens(adjust: Float["B T V"]) -> Int["B T"]:
  """argmax of adjusted logits, lowest id on ties; -1 where they are malformed or every id is ruled out."""
  return jnp.where(jnp.isfinite(best_value(adjust)), jnp.argmax(adjust, -1).astype(jnp.int32), -1)


def next_token(logits: Float["B V"], sampling: Sampling, key: Key["B"], role: Role, ids: Int["B C"] | None = None):
  """(token [B], the distribution [B,V] that it was drawn from); with `ids`, an index among the candidates and [B,C].

  Where every id is ruled out (a reduced vocabulary under a mask) the token is -1 and the distribution 0. In a batch that is
  greedy throughout the distribution is that of the one token, [B,1].
  """
  adjust = adjusted(logits, sampling, ids)
  none = (adjust == -jnp.inf).all(-1)
  if sampling.greedy:
    best = best_value(adjust)
    chance = jnp.where(none, 0.0, jnp.where(jnp.isfinite(best), 1.0, jnp.nan))
    return best_tokens(adjust), chance[:, None]
  p = jnp.where(none[:, None], 0.0, distribution(logits, sampling, ids))
  return draw(key, p, role), p
