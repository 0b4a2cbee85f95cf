"""The slot cache: keys and values of every layer, the states of recurrent ones, one length per slot.

Rows of keys and values at or beyond a slot's length are garbage that no query sees and that the next write covers; so committing
or rolling back drafts is setting a length, and a verify call may write more rows than are kept. Windows need no ring: a sliding
layer keeps every row and masks. A recurrent state has no rows to leave out: a call leaves it as it was, beside it what its
tokens would add, and `commit` adds the tokens that stand.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.models.delta import State as DeltaState
from specdec_jax.models.delta import Update
from specdec_jax.models.rows import Rows
from specdec_jax.typing import Float, Int


@flax.struct.dataclass
class Cache:
  """keys [B,K,H,S], values [B,K,S,H]: a tuple of arrays, one a layer, or stacked with a leading axis Y; lengths [B]:
  committed rows of each slot. Keys lie with positions last: the score product then reads them as they are.

  states: of recurrent layers, whose keys and values are None as the others' states are; empty where no layer is recurrent.
  fed: what the tokens of the last call add to the states, until they are committed.
  """

  keys: tuple[Float["B K H S"] | None, ...] | Float["Y B K H S"]
  values: tuple[Float["B K S H"] | None, ...] | Float["Y B K S H"]
  lengths: Int["B"]
  states: tuple[DeltaState | None, ...] = ()
  fed: tuple[Update | None, ...] = ()

  @property
  def capacity(self) -> int:
    """Rows that a slot holds, S."""
    return jax.tree.leaves(self.keys)[0].shape[-1]

  def first(self, rows: int | None) -> "Cache":
    """The first `rows` of each slot, to read; all where None."""
    if rows is None:
      return self
    return self.replace(keys=jax.tree.map(lambda k: k[..., :rows], self.keys), values=jax.tree.map(lambda v: v[..., :rows, :], self.values))

  def commit(self, rows: Int["B"]) -> "Cache":
    """With the first `rows` tokens of the last call; the others never were."""
    states = tuple(s and s.after(f, rows) for s, f in zip(self.states, self.fed, strict=True))
    return self.replace(lengths=self.lengths + rows, states=states, fed=())


def init_cache(
    sizes: Sequence[tuple[int, int] | None], batch: int, length: int, dtype, stacked: bool, states: tuple[DeltaState | None, ...] = (),
) -> Cache:
  """An empty cache of `length` rows a slot; sizes: (kv heads, head size) of each layer, None for a recurrent one."""

  def make(shape):
    if stacked:
      return jnp.zeros((len(sizes), *shape(*sizes[0])), dtype)
    return tuple(None if s is None else jnp.zeros(shape(*s), dtype) for s in sizes)

  return Cache(
      make(lambda k, h: (batch, k, h, length)), make(lambda k, h: (batch, k, length, h)), jnp.zeros((batch,), jnp.int32), states)


def as_keys(rows: Float["B T K H"]) -> Float["B K H T"]:
  """Computed key rows in the cache's order of axes."""
  return rows.transpose(0, 2, 3, 1)


def as_values(rows: Float["B T K H"]) -> Float["B K T H"]:
  """Computed value rows in the cache's order of axes."""
  return rows.swapaxes(1, 2)


def write_layer(
    keys: Float["B K H S"], values: Float["B K S H"], k: Float["B T K H"], v: Float["B T K H"], start: Int["B"], rows: Rows | None = None,
):
  """One layer's buffers with rows k, v at positions start … start+T-1 of each slot; rows beyond the end are dropped. With `rows`, k and v
  are flat, [1,n,K,H], and only what is a token is written."""
  k, v, slots, at = _placed(k, v, start, keys.shape[-1], rows)
  return (keys.at[slots, :, :, at].set(k.astype(keys.dtype), mode="drop", unique_indices=True),
          values.at[slots, :, at].set(v.astype(values.dtype), mode="drop", unique_indices=True))


def write_stacked(keys, values, layer: Int[""], k: Float["B T K H"], v: Float["B T K H"], start: Int["B"], rows: Rows | None = None):
  """The same for layer `layer` of stacked buffers, in place at (layer, slot, position)."""
  k, v, slots, at = _placed(k, v, start, keys.shape[-1], rows)
  return (keys.at[layer, slots, :, :, at].set(k.astype(keys.dtype), mode="drop", unique_indices=True),
          values.at[layer, slots, :, at].set(v.astype(values.dtype), mode="drop", unique_indices=True))


def _placed(k, v, start, capacity: int, rows: Rows | None):
  """The rows with their slot and position indices, as a scatter of two rows or more: of one row XLA makes a slice update,
  which its CPU backend fuses into every reader of the buffer, each time copying the buffer.

  Values that are no numbers are stored as 0: a rejected draft's row is masked later, but 0 · NaN would still be NaN."""
  v = jnp.where(jnp.isfinite(v), v, 0)
  index = jnp.arange(k.shape[1])
  if rows is None:
    slots, at = jnp.arange(k.shape[0])[:, None], start[:, None] + index
  else:
    slots, at = rows.slot[None], jnp.where(index < rows.count, start[rows.slot] + rows.offset, capacity + index)[None]
  if at.size == 1:
    k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
    at = jnp.pad(at, ((0, 0), (0, 1)), constant_values=capacity)  # Dropped.
  return k, v, slots, at
