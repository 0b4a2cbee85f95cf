"""The slot cache: keys and values of every layer, one length per slot, rewound by setting a length.

Rows at or beyond a slot's length are garbage that no query sees and that the next write covers; so committing or
rolling back drafts costs nothing, and a verify call may write more rows than are kept.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.typing import Float, Int


@flax.struct.dataclass
class Cache:
  """keys [B,K,H,S], values [B,K,S,H]: a tuple of arrays, one a layer, or stacked with a leading axis Y; lengths [B]:
  committed rows of each slot. Keys lie with positions last: the score product then reads them as they are."""

  keys: tuple[Float["B K H S"], ...] | Float["Y B K H S"]
  values: tuple[Float["B K S H"], ...] | Float["Y B K S H"]
  lengths: Int["B"]

  @property
  def capacity(self) -> int:
    """Rows that a slot holds, S."""
    return self.keys[0].shape[-1]

  def first(self, rows: int | None) -> "Cache":
    """The first `rows` of each slot, to read; all where None."""
    if rows is None:
      return self
    return self.replace(keys=jax.tree.map(lambda k: k[..., :rows], self.keys), values=jax.tree.map(lambda v: v[..., :rows, :], self.values))


def init_cache(layers: int, batch: int, kv_heads: int, length: int, head_dim: int, dtype, stacked: bool) -> Cache:
  """An empty cache of `length` rows a slot."""

  def make(*shape):
    return jnp.zeros((layers, *shape), dtype) if stacked else tuple(jnp.zeros(shape, dtype) for _ in range(layers))

  return Cache(
      make(batch, kv_heads, head_dim, length), make(batch, kv_heads, length, head_dim), jnp.zeros((batch,), jnp.int32))


def as_keys(rows: Float["B T K H"]) -> Float["B K H T"]:
  """Computed key rows in the cache's order of axes."""
  return rows.transpose(0, 2, 3, 1)


def as_values(rows: Float["B T K H"]) -> Float["B K T H"]:
  """Computed value rows in the cache's order of axes."""
  return rows.swapaxes(1, 2)


def write_layer(keys: Float["B K H S"], values: Float["B K S H"], k: Float["B T K H"], v: Float["B T K H"], start: Int["B"]):
  """One layer's buffers with rows k, v at positions start … start+T-1 of each slot; rows beyond the end are dropped."""
  k, v, slots, at = _placed(k, v, start, keys.shape[-1])
  return (keys.at[slots, :, :, at].set(k.astype(keys.dtype), mode="drop", unique_indices=True),
          values.at[slots, :, at].set(v.astype(values.dtype), mode="drop", unique_indices=True))


def write_stacked(keys, values, layer: Int[""], k: Float["B T K H"], v: Float["B T K H"], start: Int["B"]):
  """The same for layer `layer` of stacked buffers, in place at (layer, slot, position)."""
  k, v, slots, at = _placed(k, v, start, keys.shape[-1])
  return (keys.at[layer, slots, :, :, at].set(k.astype(keys.dtype), mode="drop", unique_indices=True),
          values.at[layer, slots, :, at].set(v.astype(values.dtype), mode="drop", unique_indices=True))


def _placed(k, v, start, capacity: int):
  """The rows with their slot and position indices, as a scatter of two rows or more: of one row XLA makes a slice update,
  which its CPU backend fuses into every reader of the buffer, each time copying the buffer.

  Values that are no numbers are stored as 0: a rejected draft's row is masked later, but 0 · NaN would still be NaN."""
  v = jnp.where(jnp.isfinite(v), v, 0)
  at = start[:, None] + jnp.arange(k.shape[1])
  if at.size == 1:
    k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
    at = jnp.pad(at, ((0, 0), (0, 1)), constant_values=capacity)  # Dropped.
  return k, v, jnp.arange(k.shape[0])[:, None], at
