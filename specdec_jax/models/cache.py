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
  """keys, values: a tuple of [B,K,S,H], one a layer, or stacked [Y,B,K,S,H]; lengths [B]: committed rows of each slot."""

  keys: tuple[Float["B K S H"], ...] | Float["Y B K S H"]
  values: tuple[Float["B K S H"], ...] | Float["Y B K S H"]
  lengths: Int["B"]

  @property
  def capacity(self) -> int:
    """Rows that a slot holds, S."""
    return self.keys[0].shape[-2]


def init_cache(layers: int, batch: int, kv_heads: int, length: int, head_dim: int, dtype, stacked: bool) -> Cache:
  """An empty cache of `length` rows a slot."""
  shape = (batch, kv_heads, length, head_dim)
  make = lambda: jnp.zeros((layers, *shape), dtype) if stacked else tuple(jnp.zeros(shape, dtype) for _ in range(layers))
  return Cache(make(), make(), jnp.zeros((batch,), jnp.int32))


def write_rows(buffer: Float["B K S H"], rows: Float["B T K H"], start: Int["B"]) -> Float["B K S H"]:
  """`buffer` with `rows` at positions start … start+T-1 of each slot; the caller sees to it that they fit."""
  rows = rows.swapaxes(1, 2).astype(buffer.dtype)
  if buffer.shape[0] == 1:  # A plain in-place update; the batched form becomes a scatter.
    return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start[0], 0))
  return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (0, s, 0)))(buffer, rows, start)


def write_stacked(buffer: Float["Y B K S H"], layer: Int[""], rows: Float["B T K H"], start: Int["B"]) -> Float["Y B K S H"]:
  """The same for layer `layer` of a stacked buffer, in place at (layer, slot, position)."""
  if buffer.shape[1] == 1:
    return jax.lax.dynamic_update_slice(buffer, rows.swapaxes(1, 2)[None].astype(buffer.dtype), (layer, 0, 0, start[0], 0))
  slots, at = jnp.arange(rows.shape[0])[:, None], start[:, None] + jnp.arange(rows.shape[1])
  return buffer.at[layer, slots, :, at].set(rows.astype(buffer.dtype), mode="drop")
