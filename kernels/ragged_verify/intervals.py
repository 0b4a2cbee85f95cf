"""Attention of blocks with its gradient, by kernels for TPUs and GPUs: what blocks are trained with.

Rows are all queries of a kv head, block by block; columns are the context and behind it the slots of all blocks, and a row sees one
interval of each. A chunk of rows meets the tiles of columns that any of its rows may see. There are three kernels: forward and the
gradient of queries hold a chunk and go through its tiles, the gradient of keys and values holds a tile and goes through its chunks, so
nothing is added up from two programs. Scores lie as [tile, chunk]: what belongs to a row then lies along the lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from specdec_jax.kernels.ragged_verify.tpu import schedule
from specdec_jax.typing import Float, Int

LOWEST = -1e30


def attend(
    q: Float["B K n H"], keys: Float["B K S H"], values: Float["B K S H"], bounds: tuple[Int["B n"], ...], *, scale: float,
    implementation: str,
) -> Float["B K n H"]:
  """Attended queries; bounds: a, b, c, d of each row, which sees the columns a … b − 1 and c … d − 1 of its batch row, all in 0 … S.
  One that sees nothing gets zeros."""
  chunk, tile = _sizes(implementation, q, keys)
  padded = lambda x, axis, to: jnp.pad(x, [(0, -x.shape[a] % to if a == axis else 0) for a in range(x.ndim)])
  row = lambda x: jnp.broadcast_to(padded(x, 1, chunk)[:, None, None], (*q.shape[:2], 1, q.shape[2] + -q.shape[2] % chunk))
  columns = (padded(x, 2, tile) for x in (keys, values))
  return _attend((implementation, chunk, tile, scale), padded(q, 2, chunk), *columns, [row(x) for x in bounds])[:, :, : q.shape[2]]


def _sizes(implementation: str, q, keys) -> tuple[int, int]:
  """Rows of a chunk and columns of a tile."""
  if implementation.startswith("tpu"):
    return tuple(min(most, pl.cdiv(x.shape[2], 128) * 128) for x, most in ((q, 512), (keys, 256)))
  most = min(64 if q.dtype == jnp.bfloat16 else 32, 8192 // q.shape[-1])  # More does not stay in registers.
  return tuple(min(most, max(16, pl.next_power_of_2(x.shape[2]))) for x, most in ((q, most), (keys, most // 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, bounds):
  """q [B,K,rows,H]; k, v [B,K,S,H]; bounds: four of [B,K,1,rows] → like q. static: implementation, chunk, tile, scale."""
  return _attend_forward(static, q, k, v, bounds)[0]


def _attend_forward(static, q, k, v, bounds):
  _, chunk, _, scale = static
  start = ((1, chunk), LOWEST), ((1, chunk), 0), ((q.shape[3], chunk), 0)
  results = q, jax.ShapeDtypeStruct(bounds[0].shape, jnp.float32)
  out, lse = _sweep(static, functools.partial(_forward_step, scale), _forward_end, (q, *bounds), (k, v), True, start, results)
  return out, (q, k, v, bounds, out, lse)


def _attend_backward(static, saved, grad):
  q, k, v, bounds, out, lse = saved
  _, chunk, tile, scale = static
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), 3)[:, :, None]
  rows, size = (q, *bounds, grad, lse, delta), q.shape[3]
  [dq] = _sweep(static, functools.partial(_queries_step, scale), lambda x: (x.T,), rows, (k, v), True, (((size, chunk), 0),), (q,))
  dk, dv = _sweep(static, functools.partial(_columns_step, scale), lambda *x: x, rows, (k, v), False, (((tile, size), 0),) * 2, (k, v))
  return dq, dk, dv, None


_attend.defvjp(_attend_forward, _attend_backward)


def _product(a, b, axis_a: int, axis_b: int):
  """The matrix product over an axis of each, float32, exact for float32."""
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _scores(scale, column, q, k, a, b, c, d):
  """[tile, chunk], −∞ where a row does not see a column; column: the tile's first."""
  scores = _product(k, q, 1, 1) * scale
  column += jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
  return jnp.where((column >= a) & (column < b) | (column >= c) & (column < d), scores, -jnp.inf)


def _forward_step(scale, column, rows, columns, carry):
  (q, *bounds), (k, v), (m, total, acc) = rows, columns, carry
  scores = _scores(scale, column, q, k, *bounds)
  top = jnp.maximum(m, jnp.max(scores, 0, keepdims=True))
  p, alpha = jnp.exp(scores - top), jnp.exp(m - top)
  return top, alpha * total + jnp.sum(p, 0, keepdims=True), alpha * acc + _product(v, p.astype(v.dtype), 0, 0)


def _forward_end(m, total, acc):
  total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
  return (acc / total).T, m + jnp.log(total)


def _weights(scale, column, rows, columns):
  """The weights of the softmax again, and the gradient of the scores: [tile, chunk] each, in the type of products."""
  (q, *bounds, grad, lse, delta), (k, v) = rows, columns
  p = jnp.exp(_scores(scale, column, q, k, *bounds) - lse)
  return p.astype(q.dtype), (p * (_product(v, grad, 1, 1) - delta) * scale).astype(q.dtype)


def _queries_step(scale, column, rows, columns, carry):
  _, ds = _weights(scale, column, rows, columns)
  return (carry[0] + _product(columns[0], ds, 0, 0),)


def _columns_step(scale, column, rows, columns, carry):
  p, ds = _weights(scale, column, rows, columns)
  return carry[0] + _product(ds, rows[0], 1, 0), carry[1] + _product(p, rows[-3], 1, 0)


def _sweep(static, step, end, rows, columns, hold_rows: bool, start, results):
  """end(carry) of every chunk of `rows`, or of every tile of `columns`, after carry = step(first column of the tile, chunk, tile, carry)
  with each of the other kind that it meets. start: shapes and values of the float32 carry; results: arrays like what `end` gives."""
  implementation, chunk, tile, _ = static
  sees = _meetings([x[:, 0, 0].reshape(len(x), -1, chunk) for x in rows[1:5]], columns[0].shape[2] // tile, tile)
  sees = sees if hold_rows else sees.swapaxes(1, 2)
  # Of each held block: how many it meets, and first of all these.
  met = jnp.sum(sees, 2, dtype=jnp.int32).reshape(-1), jnp.argsort(~sees, 2).astype(jnp.int32).reshape(-1)

  def step_of(held_at, streamed_at, held, streamed, carry):
    return step(streamed_at * tile, held, streamed, carry) if hold_rows else step(held_at * tile, streamed, held, carry)

  # Beside each array the axis along which it is cut, and the size of a piece.
  rows, columns = [(x, 3 if x.shape[2] == 1 else 2, chunk) for x in rows], [(x, 2, tile) for x in columns]
  held, streamed = (rows, columns) if hold_rows else (columns, rows)
  results = [(x, 3 if x.shape[2] == 1 else 2, held[0][2]) for x in results]
  run = _sweep_tpu if implementation.startswith("tpu") else _sweep_gpu
  return run(step_of, end, held, streamed, results, met, sees.shape[1:], start, implementation.endswith("_interpret"))


def _meetings(bounds, tiles: int, tile: int):
  """Whether a row of a chunk may see a column of a tile, [B,chunks,tiles]; bounds: four of [B,chunks,chunk]."""
  at = tile * jnp.arange(tiles)

  def one(first, stop):
    some = stop > first
    least, most = jnp.min(jnp.where(some, first, tile * tiles), 2), jnp.max(jnp.where(some, stop, 0), 2)
    return (at + tile > least[..., None]) & (at < most[..., None])

  return one(*bounds[:2]) | one(*bounds[2:])


def _shape(x, axis: int, size: int) -> tuple:
  return (None, None, *(size if a == axis else x.shape[a] for a in (2, 3)))


def _sweep_tpu(step, end, held, streamed, results, met, blocks, start, interpret):
  """One grid step for each pair that meets, and one where a held block meets none."""
  count, order = met
  (batch, heads), (here, there) = held[0][0].shape[:2], blocks
  run, begin = schedule(jnp.maximum(count, 1), batch * here * there)
  index_of = lambda s, run, begin, order: order[run[s] * there + s - begin[run[s]]]

  def spec(x, axis, size, still):
    def index(h, s, run, begin, order):
      at = run[s] % here if still else index_of(s, run, begin, order)
      return run[s] // here, h, *((at, 0) if axis == 2 else (0, at))

    return pl.BlockSpec(_shape(x, axis, size), index)

  def kernel(run, begin, order, *refs):
    refs = iter(refs)
    held_refs, streamed_refs, out_refs, carry = ([next(refs) for _ in x] for x in (held, streamed, results, start))
    s = pl.program_id(1)
    i = run[s]

    @pl.when(s == begin[i])
    def _():
      for ref, (shape, value) in zip(carry, start):
        ref[...] = jnp.full(shape, value, jnp.float32)

    values = [[ref[...] for ref in some] for some in (held_refs, streamed_refs, carry)]
    for ref, x in zip(carry, step(i % here, index_of(s, run, begin, order), *values)):
      ref[...] = x

    @pl.when(s + 1 == begin[i + 1])
    def _():
      for ref, x in zip(out_refs, end(*(ref[...] for ref in carry))):
        ref[...] = x.astype(ref.dtype)

  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=3, grid=(heads, begin[-1]), in_specs=[*(spec(*x, True) for x in held), *(spec(*x, False) for x in streamed)],
          out_specs=[spec(*x, True) for x in results], scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape, _ in start]),
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _, _ in results],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      interpret=interpret)(run, begin, order, *(x for x, _, _ in (*held, *streamed)))


def _sweep_gpu(step, end, held, streamed, results, met, blocks, start, interpret):
  """A program for each held block."""
  (batch, heads), (here, there) = held[0][0].shape[:2], blocks
  spec = lambda x, axis, size: pl.BlockSpec(_shape(x, axis, size), lambda b, h, i: (b, h, *((i, 0) if axis == 2 else (0, i))))

  def kernel(count, order, *refs):
    b, h, i = (pl.program_id(a) for a in range(3))
    refs = iter(refs)
    held_refs, streamed_refs, out_refs = ([next(refs) for _ in x] for x in (held, streamed, results))
    values = [ref[...] for ref in held_refs]

    def one(t, carry):
      j = order[(b * here + i) * there + t]
      at = lambda axis, size: tuple(pl.ds(j * size, size) if a == axis else slice(None) for a in (2, 3))
      return step(i, j, values, [plgpu.load(ref.at[b, h, *at(axis, size)]) for ref, (_, axis, size) in zip(streamed_refs, streamed)], carry)

    carry = jax.lax.fori_loop(0, count[b * here + i], one, tuple(jnp.full(shape, value, jnp.float32) for shape, value in start))
    for ref, x in zip(out_refs, end(*carry)):
      ref[...] = x.astype(ref.dtype)

  return pl.pallas_call(
      kernel, grid=(batch, heads, here), in_specs=[*[pl.BlockSpec()] * 2, *(spec(*x) for x in held), *[pl.BlockSpec()] * len(streamed)],
      out_specs=[spec(*x) for x in results], out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _, _ in results],
      compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2), interpret=interpret)(*met, *(x for x, _, _ in (*held, *streamed)))
