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
  span, begin = schedule(steps, n * -(-length // tile))
  low = jnp.zeros_like(spans.base) if spans.low is None else spans.low
  reach = jnp.full((1,), EVERY if window is None else window, jnp.int32)
  scalars = (span, begin, first, spans.row, spans.base, low, spans.count, jnp.reshape(layer, (1,)), reach)

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
      _kernel, groups=groups, causal=causal, scale=scale, tile=tile, length=length, ragged=keys.shape[-1] % tile != 0,
      windowed=window is not None, bounded=spans.low is not None)
  scratch = lambda lanes: pltpu.VMEM((step_heads, rows, lanes), jnp.float32)
  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=(heads // step_heads, begin[-1]), in_specs=[query, key, value, *extra], out_specs=query,
          scratch_shapes=[scratch(128), scratch(128), scratch(size)]),
      out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      interpret=interpret)(*(x.astype(jnp.int32) for x in scalars), q, keys, values, *(own or ()))


def schedule(steps: Int["n"], most: int) -> tuple[Int["n"], Int["n"]]:
  """A grid that takes steps[i] steps for each i, at most `most` in all: the i of each step; the first step of each i, and the end."""
  begin = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
  return jnp.minimum(jnp.sum(begin[1:] <= jnp.arange(most)[:, None], 1, dtype=jnp.int32), len(steps) - 1), begin


def _tile(bytes_a_column: int) -> int:
  return max(128, min(512, 2 ** int(math.log2(STEP_BYTES / bytes_a_column))))


def _kernel(
    span, begin, first, row, base, low, count, layer, reach, q_ref, k_ref, v_ref, *refs, groups, causal, scale, tile, length,
    ragged, windowed, bounded,
):
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
      acc_ref[h] = dot(p.astype(q_ref.dtype), own[1][0, h])

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


def write(
    buffer: Float["Y B K H S"], new: Float["B K H T"], start: Int["B"], layer: Int[""], *, axis: int, interpret=False,
) -> Float["Y B K H S"]:
  """The buffer with `new` at positions start … of each slot, in place; what falls beyond its end is dropped. axis: that of the
  positions in the buffer, 4 for keys, 3 for values. XLA's scatter would want another order of axes in memory than `attend`, and
  the buffer would be copied whole from one to the other, every layer."""
  unit = 128 if axis == 4 else 32 // buffer.dtype.itemsize  # Positions that are read and written back at once.
  count = new.shape[axis - 1]
  chunks = -(-count // unit)
  new = jnp.pad(new.astype(buffer.dtype), [(0, chunks * unit - count if a == axis - 1 else 0) for a in range(4)])
  block = [unit if a == axis else buffer.shape[a] for a in (2, 3, 4)]
  last = -(-buffer.shape[axis] // unit) - 1

  def tile(b, j, start):
    return jnp.minimum(jnp.minimum(start[b] // unit + j, (start[b] + count - 1) // unit), last)

  place = lambda at: (0, 0, at) if axis == 4 else (0, at, 0)
  held = pl.BlockSpec((1, 1, *block), lambda b, j, start, layer: (layer[0], b, *place(tile(b, j, start))))
  chunk = lambda back: pl.BlockSpec((1, *block), lambda b, j, *_: (b, *place(jnp.clip(j - back, 0, chunks - 1))))
  fresh = [chunk(0)] if chunks == 1 else [chunk(0), chunk(1)]
  return pl.pallas_call(
      functools.partial(_write_kernel, tile=tile, unit=unit, count=count, axis=axis - 3),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2, grid=(buffer.shape[1], (unit + count - 2) // unit + 1), in_specs=[held, *fresh], out_specs=held),
      out_shape=jax.ShapeDtypeStruct(buffer.shape, buffer.dtype), input_output_aliases={2: 0},
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      interpret=interpret)(start.astype(jnp.int32), jnp.reshape(layer, (1,)).astype(jnp.int32), buffer, *[new] * len(fresh))


def _write_kernel(start, layer, held, *refs, tile, unit, count, axis):
  del layer
  *fresh, out = refs
  b, j = pl.program_id(0), pl.program_id(1)
  at = tile(b, j, start)

  @pl.when((j == 0) | (at == start[b] // unit + j))  # Otherwise the tile of the step before is still here.
  def _():
    lane = jax.lax.broadcasted_iota(jnp.int32, held.shape[3:], axis)
    token = at * unit + lane - start[b]
    shift = jax.lax.rem(start[b], unit)
    for h in range(held.shape[2]):
      rolled = [pltpu.roll(x[0, h].astype(jnp.float32), shift, axis) for x in fresh]  # Rotation is for 32 bits.
      new = rolled[0] if len(rolled) == 1 else jnp.where(lane >= shift, *rolled)
      out[0, 0, h] = jnp.where((token >= 0) & (token < count), new.astype(out.dtype), held[0, 0, h])
