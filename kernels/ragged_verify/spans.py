"""The form in which the kernels see both attentions: queries in spans, each of which sees one interval of a cache row."""

import flax.struct
import jax.numpy as jnp

from specdec_jax.typing import Float, Int

EVERY = jnp.iinfo(jnp.int32).max  # A window that ends nothing.


@flax.struct.dataclass
class Spans:
  """n runs of queries at successive positions. row [n]: the cache row that each reads; base [n]: the position of its first query;
  count [n]: how many of its queries exist; low [n]: the first column that it may see, 0 where None.

  The query at position p sees the columns low … p of its row if `causal`, low … base − 1 if not, and of these the last
  `window` before its next position."""

  row: Int["n"]
  base: Int["n"]
  count: Int["n"]
  low: Int["n"] | None = None

  def columns(self, causal: bool, window: Int[""] | None, length: int) -> tuple[Int["n"], Int["n"]]:
    """The first column that any query of a span sees, and the one behind the last; equal where there is none."""
    stop = jnp.where(self.count > 0, jnp.clip(self.base + self.count if causal else self.base, 0, length), 0)
    first = jnp.zeros_like(stop) if self.low is None else self.low
    if window is not None:
      first = jnp.maximum(first, self.base - window + 1)
    return jnp.clip(first, 0, stop), stop


def split(q: Float["B T K G H"], width: int) -> Float["n K N H"]:
  """Queries of B rows, padded to whole spans of `width` tokens, a kv head's together."""
  batch, tokens, heads, groups, size = q.shape
  spans = -(-tokens // width)
  q = jnp.pad(q, ((0, 0), (0, spans * width - tokens), (0, 0), (0, 0), (0, 0))).reshape(batch * spans, width, heads, groups, size)
  return q.swapaxes(1, 2).reshape(batch * spans, heads, width * groups, size)


def join(out: Float["n K N H"], batch: int, tokens: int, groups: int) -> Float["B T K G H"]:
  """What `split` took apart."""
  spans, heads, rows, size = out.shape
  out = out.reshape(spans, heads, rows // groups, groups, size).swapaxes(1, 2)
  return out.reshape(batch, -1, heads, groups, size)[:, :tokens]
