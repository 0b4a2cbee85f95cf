"""Tokens of several slots, flattened: dense layers compute the rows that exist, attention sees them slot by slot."""

import flax.struct
import jax.numpy as jnp

from specdec_jax.typing import Int


@flax.struct.dataclass
class Rows:
  """n rows of a [B,T] layout: row i is token `offset` [n] of slot `slot` [n]; `place` [B,T]: the row of each token. The first `count`
  rows are tokens, the others repeat some."""

  slot: Int["n"]
  offset: Int["n"]
  place: Int["B T"]
  count: Int[""]

  def flat(self, x):
    """[B,T,…] to [1,n,…]."""
    return x[self.slot, self.offset][None]

  def pad(self, x):
    """[1,n,…] to [B,T,…]; what stands for no row is some other one's."""
    return x[0][self.place]


def flatten(counts: Int["B"], width: int, bucket: int) -> Rows:
  """The first `counts` [B] tokens of each slot of [B,width], slot by slot, in `bucket` rows, which must hold all of them; rows
  behind them repeat one of the last slot's."""
  ends = jnp.cumsum(counts)
  index = jnp.arange(bucket)
  slot = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(counts) - 1)
  starts = ends - counts
  offset = jnp.clip(index - starts[slot], 0, width - 1)
  return Rows(slot, offset, jnp.minimum(starts[:, None] + jnp.arange(width), bucket - 1), ends[-1])
