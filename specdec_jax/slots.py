"""The device's half of the engine: settings by slot, and the compiled functions over slots that `specdec_jax.engine` launches.

Draft, verify and commit of a round are compiled one by one; only verify depends on the bucket, the number of rows that it computes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode
from specdec_jax.decode import STOP, DecodeState, Draft, Limits, Method, RoundOutput, Verified
from specdec_jax.models.cache import Cache
from specdec_jax.sampling import Sampling
from specdec_jax.sharding import constrain_state
from specdec_jax.typing import Bool, Float, Int

NEEDS = ("greedy", "plain", "filtered", "full")  # What a batch of settings asks of the compiled code; each covers those before it.
STOP_IDS = 8  # Stop tokens a request may have.
DEFERRED = 8  # Rounds without drafts whose rows are given to the drafter together.
DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}


@flax.struct.dataclass
class Settings:
  """Sampling and limits by slot; bias and prompt [B,V] only where a request needs the full code. seeds (uint32): the request's, and
  its number under a schedule, where equal noise would tell of each other (see schedule.py)."""

  temperature: Float["B"]
  top_k: Int["B"]
  top_p: Float["B"]
  min_p: Float["B"]
  repetition: Float["B"]
  frequency: Float["B"]
  presence: Float["B"]
  seeds: Int["B 2"]
  caps: Int["B"]
  stops: Int["B n"]
  bias: Float["B V"] | None = None
  prompt: Bool["B V"] | None = None

  def sampling(self, vocab: int, need: str) -> Sampling:
    level = NEEDS.index(need)
    having = lambda least, x: x if level >= NEEDS.index(least) else None
    first = jax.vmap(jax.random.key)(self.seeds[:, 0])
    keys = jnp.where(self.seeds[:, 1] == 0, first, jax.vmap(jax.random.fold_in)(first, self.seeds[:, 1]))
    return Sampling(
        temperature=having("plain", self.temperature), top_k=having("filtered", self.top_k), top_p=having("filtered", self.top_p),
        keys=keys, vocab=vocab, min_p=having("filtered", self.min_p), bias=having("full", self.bias),
        repetition=having("full", self.repetition), frequency=having("full", self.frequency), presence=having("full", self.presence),
        prompt=having("full", self.prompt))

  @property
  def limits(self) -> Limits:
    return Limits(self.caps, self.stops)


def stack(rows: Sequence[dict[str, Any] | None], need: str, vocab: int) -> Settings:
  """Settings of slots from one row of each field for each; those of an empty slot, None, do not matter."""
  dtype = lambda v: np.int32 if isinstance(v, int) else np.float32
  column = lambda k, v: np.array([v if r is None else r[k] for r in rows], dtype(v))
  full = need == "full"
  table = lambda k, dtype: np.stack([np.zeros(vocab, dtype) if r is None or r[k] is None else r[k] for r in rows]) if full else None
  return Settings(
      **{k: column(k, v) for k, v in DEFAULTS.items()}, caps=column("caps", 1),
      seeds=np.stack([np.zeros(2, np.uint32) if r is None else r["seeds"] for r in rows]),
      stops=np.stack([np.full(STOP_IDS, -1, np.int32) if r is None else r["stops"] for r in rows]),
      bias=table("bias", np.float32), prompt=table("prompt", bool))


COLUMNS = ("start", "count", "drafted", "accepted", "ran", "finish")


@flax.struct.dataclass
class Packed:
  """A round's output as the host fetches it, two arrays instead of eight: integers [B,6+L], COLUMNS and then the tokens; logprobs, or None.
  """

  integers: Int["B N"]
  logprobs: Float["B L"] | None

  @classmethod
  def of(cls, output: RoundOutput) -> "Packed":
    columns = jnp.stack([getattr(output, name).astype(jnp.int32) for name in COLUMNS], 1)
    return cls(jnp.concatenate([columns, output.tokens.astype(jnp.int32)], 1), output.logprobs)

  def unpacked(self) -> RoundOutput:
    """Of arrays that were fetched."""
    columns = dict(zip(COLUMNS, self.integers.T))
    return RoundOutput(**columns | {"ran": columns["ran"] != 0}, tokens=self.integers[:, len(COLUMNS) :], logprobs=self.logprobs)


def _living(state: DecodeState, alive: Bool["B"]) -> DecodeState:
  """With what the host has ended since."""
  return state.replace(finish=jnp.where(alive, state.finish, STOP))


def _first(method: Method, need: str, vocab: int, params, state: DecodeState, last, settings: Settings) -> tuple[DecodeState, Packed]:
  state, output = decode.first_token(method, params, state, last, settings.sampling(vocab, need), settings.limits)
  return state, Packed.of(output)


def _draft(
    method: Method, need: str, vocab: int, reach: int, drafter_params, state: DecodeState, settings: Settings, alive, most, budget, places,
) -> Draft:
  """places [n]: the slots that are drafted for, all of them where None; the others get a draft of length 0."""
  state = state.replace(cache=Cache((), (), state.cache.lengths), pending=None)
  if places is not None:
    size = len(alive)
    state, settings, alive, most = jax.tree.map(lambda x: jnp.take(x, places, 0), (state, settings, alive, most))
  limits = settings.limits.replace(drafts=most)
  made = decode.draft(method, drafter_params, _living(state, alive), settings.sampling(vocab, need), limits, budget, reach)
  if places is not None:
    made = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[places].set(x, unique_indices=True), made)
  return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), made)  # One type however it was drafted: verify is compiled once.


def _verify(method: Method, bucket: int, reach: int, params, cache: Cache, state: DecodeState, made: Draft, alive) -> Verified:
  return decode.verify_draft(method, params, _living(state.replace(cache=cache), alive), made, bucket, reach)


def _commit(
    method: Method, need: str, vocab: int, drafter_params, state: DecodeState, cache: Cache, verified: Verified, made: Draft,
    settings: Settings, alive, fed,
) -> tuple[DecodeState, Packed]:
  state, verified = _living(state.replace(cache=cache), alive), verified.replace(cache=cache.replace(fed=fed))
  state, output = decode.commit(method, drafter_params, state, made, verified, settings.sampling(vocab, need), settings.limits)
  return state, Packed.of(output)


def _each_slot(stacked: bool, f: Callable, *states: DecodeState) -> DecodeState:
  """f(axis of the slots, leaf of each state) over all leaves."""
  keys, values = jax.tree.map(functools.partial(f, int(stacked)), *((s.cache.keys, s.cache.values) for s in states))
  rest = jax.tree.map(functools.partial(f, 0), *(s.replace(cache=s.cache.replace(keys=(), values=())) for s in states))
  return constrain_state(rest.replace(cache=rest.cache.replace(keys=keys, values=values)))


def _insert(stacked: bool, state: DecodeState, row: DecodeState, slot: Int[""]) -> DecodeState:
  return _each_slot(stacked, lambda axis, all, one: jax.lax.dynamic_update_slice_in_dim(all, one.astype(all.dtype), slot, axis), state, row)


def _reorder(stacked: bool, state: DecodeState, order: Int["B"]) -> DecodeState:
  return _each_slot(stacked, lambda axis, x: jnp.take(x, order, axis, mode="clip"), state)


def _empty(method: Method, length: int, dtype: str, emitted: Int["B"], counts: Int["B V"], finish: Int["B"]) -> DecodeState:
  state = decode.init_state(method, emitted.shape[0], length, dtype, DEFERRED)
  return constrain_state(state.replace(emitted=emitted, counts=counts, finish=finish))


PROGRAMS = {
    "empty": jax.jit(_empty, static_argnums=(0, 1, 2)),
    "read": jax.jit(decode.read, static_argnums=(0, 6), donate_argnums=3),
    "first": jax.jit(_first, static_argnums=(0, 1, 2), donate_argnums=4),
    "insert": jax.jit(_insert, static_argnums=0, donate_argnums=1),
    "reorder": jax.jit(_reorder, static_argnums=0),
    "catch_up": jax.jit(decode.catch_up, static_argnums=0, donate_argnums=2),
    "draft": jax.jit(_draft, static_argnums=(0, 1, 2, 3)),
    "verify": jax.jit(_verify, static_argnums=(0, 1, 2), donate_argnums=4),
    "commit": jax.jit(_commit, static_argnums=(0, 1, 2), donate_argnums=(4, 5)),
}
