"""Attention over spans for TPUs: one grid step for each key tile that a span sees, and none for the others."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specdec_jax.kernels.ragged_verify.spans import EVERY, Spans
from specdec_jax.typing import Float, Int

ROWS = 128  # Queries of a kv head in a span, at most.
STEP_BYTES = 2**20  # Keys that a grid step reads: enough to hide the cost of a step.
LOWEST = -1e30


def attend(
    q: Float["n K N H"], keys: Float["Y B K H S"], values: Float["Y B K S H"], spans: Spans, layer: Int[""], window: Int[""] | None,
    own: tuple[Float["n K H L"], Float["n K L H"]] | None = None, *, groups: int, causal: bool, length: int, scale: float, interpret=False,
) -> Float["n K N H"]:
  """Attended queries; columns from `length` on are never read. own: keys and values that all queries of a span see besides."""
  n, heads, rows, size = q.shape
  step_heads = max(h for h in range(1, heads + 1) if heads % h == 0 and (h == 1 or h * size * 128 * keys.dtype.itemsize <= STEP_BYTES))
  tile = min(_tile(step_heads * size * keys.dtype.itemsize), keys.shape[-1])
  first, stop = spans.columns(causal, window, length)
  first = jnp.minimum(first // tile, (length - 1) // tile)
  # A span without queries takes no step, unless others of its kind see their own keys: its output is then written as well.
  steps = jnp.maximum(-(-stop // tile) - first, jnp.where(spans.count > 0, 1, int(own is not None)))
  begin = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
  span = jnp.sum(begin[1:] <= jnp.arange(n * -(-length // tile))[:, None], 1, dtype=jnp.int32)  # Of each step.
  low = jnp.zeros_like(spans.base) if spans.low is None else spans.low
  reach = jnp.full((1,), EVERY if window is None else window, jnp.int32)
  scalars = (jnp.minimum(span, n - 1), begin, first, spans.row, spans.base, low, spans.count, jnp.reshape(layer, (1,)), reach)

  of_span = lambda h, s, span, *_: (span[s], h, 0, 0)
  column = lambda s, span, begin, first: first[span[s]] + s - begin[span[s]]
  query = pl.BlockSpec((1, step_heads, rows, size), of_span)
  key = pl.BlockSpec((1, 1, step_heads, size, tile),
                     lambda h, s, span, begin, first, row, base, low, count, layer, reach:
                     (layer[0], row[span[s]], h, 0, column(s, span, begin, first)))
  value = pl.BlockSpec((1, 1, step_heads, tile, size),
                       lambda h, s, span, begin, first, row, base, low, count, layer, reach:
                       (layer[0], row[span[s]], h, column(s, span, begin, first), 0))
  extra = () if own is None else tuple(pl.BlockSpec((1, step_heads, *x.shape[2:]), of_span) for x in own)
  kernel = functools.partial(
      _kernel, groups=groups, causal=causal, scale=scale, tile=tile, length=length, ragged=keys.shape[-1] % tile != 0, windowed=window is not None,
      bounded=spans.low is not None)
  scratch = lambda lanes: pltpu.VMEM((step_heads, rows, lanes), jnp.float32)
  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=(heads // step_heads, begin[-1]), in_specs=[query, key, value, *extra], out_specs=query,
          scratch_shapes=[scratch(128), scratch(128), scratch(size)]),
      out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      interpret=interpret)(*(x.astype(jnp.int32) for x in scalars), q, keys, values, *(own or ()))


def _tile(bytes_a_column: int) -> int:
  return max(128, min(512, 2 ** int(math.log2(STEP_BYTES / bytes_a_column))))


def _kernel(span, begin, first, row, base, low, count, layer, reach, q_ref, k_ref, v_ref, *refs, groups, causal, scale, tile, length, ragged, windowed, bounded):
  del row, layer
  *own, o_ref, m_ref, l_ref, acc_ref = refs
  heads, rows, size = acc_ref.shape
  s = pl.program_id(1)
  i = span[s]
  dot = functools.partial(
      jnp.dot, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None)

  @pl.when(s == begin[i])
  def _():
    for h in range(heads):
      if not own:
        m_ref[h], l_ref[h], acc_ref[h] = jnp.full((rows, 128), LOWEST), jnp.zeros((rows, 128)), jnp.zeros((rows, size))
        continue
      scores = dot(q_ref[0, h], own[0][0, h]) * scale
      m = jnp.max(scores, 1, keepdims=True)
      p = jnp.where(count[i] > 0, jnp.exp(scores - m), 0.0)
      m_ref[h] = jnp.broadcast_to(m, (rows, 128))
      l_ref[h] = jnp.broadcast_to(jnp.sum(p, 1, keepdims=True), (rows, 128))
      acc_ref[h] = dot(p.astype(v_ref.dtype), own[1][0, h])

  start = (first[i] + s - begin[i]) * tile
  column = start + jax.lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
  position = base[i] + jax.lax.broadcasted_iota(jnp.int32, (rows, tile), 0) // groups
  seen = column < jnp.where(count[i] > 0, jnp.minimum(position + 1 if causal else base[i], length), 0)
  if windowed:
    seen &= column > position - reach[0]
  if bounded:
    seen &= column >= low[i]
  for h in range(heads):
    k, v = k_ref[0, 0, h].astype(q_ref.dtype), v_ref[0, 0, h].astype(q_ref.dtype)
    if ragged:  # The last tile hangs over the end of the buffer.
      v = jnp.where(start + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < length, v, jnp.zeros_like(v))
    scores = jnp.where(seen, dot(q_ref[0, h], k) * scale, -jnp.inf)
    m = jnp.maximum(m_ref[h], jnp.max(scores, 1, keepdims=True))
    p = jnp.exp(scores - m[:, :1])
    alpha = jnp.exp(m_ref[h] - m)
    m_ref[h] = m
    l_ref[h] = alpha * l_ref[h] + jnp.sum(p, 1, keepdims=True)
    acc_ref[h] = alpha[:, :1] * acc_ref[h] + dot(p.astype(v.dtype), v)

  @pl.when(s + 1 == begin[i + 1])
  def _():
    for h in range(heads):
      o_ref[0, h] = (acc_ref[h] / jnp.maximum(l_ref[h][:, :1], jnp.finfo(jnp.float32).tiny)).astype(o_ref.dtype)
