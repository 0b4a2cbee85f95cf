"""Attention of rows that see one interval of columns each, with its gradient, by kernels for TPUs and GPUs: what blocks are trained with.

Rows are all queries of a kv head, block by block; a chunk of them meets the tiles of columns that any of its rows sees. There are three
kernels: forward and the gradient of queries hold a chunk and go through the tiles, the gradient of keys and values holds a tile and goes
through the chunks, so nothing is added up from two programs. Scores lie as [tile, chunk]: what belongs to a row then lies along the lanes.
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
ROWS, COLUMNS = 3, 2  # The axis along which arrays [B,K,…,rows] and [B,K,S,…] are cut.


def attend(
    q: Float["B K n H"], keys: Float["B K S H"], values: Float["B K S H"], first: Int["B n"], stop: Int["B n"], *, scale: float,
    implementation: str,
) -> tuple[Float["B K n H"], Float["B K n"]]:
  """Attended queries and the log-sum-exp of their scores, float32; row i sees the columns first[i] ≥ 0 … stop[i] − 1 ≤ S − 1 of its
  batch row. One that sees nothing gets zeros, and a log-sum-exp that is as good as −∞."""
  chunk, tile = _sizes(implementation, q, keys)
  more, beyond = -q.shape[2] % chunk, -keys.shape[2] % tile
  padded = lambda x, axis, count: jnp.pad(x, [(0, count if a == axis else 0) for a in range(x.ndim)])
  row = lambda x: jnp.broadcast_to(padded(x, 1, more)[:, None, None], (*q.shape[:2], 1, x.shape[1] + more))
  out, lse = _attend(
      (implementation, chunk, tile, scale), padded(q.swapaxes(2, 3), 3, more), padded(keys.astype(q.dtype), 2, beyond),
      padded(values.astype(q.dtype), 2, beyond), row(first), row(stop))
  return out[..., : q.shape[2]].swapaxes(2, 3), lse[:, :, 0, : q.shape[2]]


def _sizes(implementation: str, q, keys) -> tuple[int, int]:
  """Rows of a chunk and columns of a tile."""
  if implementation.startswith("tpu"):
    return tuple(min(512, pl.cdiv(n, 128) * 128) for n in (q.shape[2], keys.shape[2]))
  most = min(64 if q.dtype == jnp.bfloat16 else 32, 8192 // q.shape[-1])
  return tuple(min(most, max(16, pl.next_power_of_2(n))) for n in (q.shape[2], keys.shape[2]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, first, stop):
  """q [B,K,H,rows]; k, v [B,K,S,H]; first, stop [B,K,1,rows] → like q, [B,K,1,rows]. static: implementation, chunk, tile, scale."""
  _, chunk, _, scale = static
  size = q.shape[2]
  start = (((1, chunk), LOWEST), ((1, chunk), 0), ((size, chunk), 0))
  out = (q, jax.ShapeDtypeStruct(first.shape, jnp.float32))
  return _sweep(static, functools.partial(_forward_step, scale), _forward_end, (q, first, stop), (k, v), ROWS, start, out)


def _attend_forward(static, q, k, v, first, stop):
  out, lse = _attend(static, q, k, v, first, stop)
  return (out, lse), (q, k, v, first, stop, out, lse)


def _attend_backward(static, saved, gradients):
  (q, k, v, first, stop, out, lse), (grad, of_lse) = saved, gradients
  _, chunk, tile, scale = static
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), 2, keepdims=True) - of_lse
  rows, size, same = (q, first, stop, grad, lse, delta), q.shape[2], lambda *x: x
  [dq] = _sweep(static, functools.partial(_queries_step, scale), same, rows, (k, v), ROWS, (((size, chunk), 0),), (q,))
  dk, dv = _sweep(static, functools.partial(_columns_step, scale), same, rows, (k, v), COLUMNS, (((tile, size), 0),) * 2, (k, v))
  return dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _product(a, b, axis_a: int, axis_b: int):
  """The matrix product over an axis of each, float32, exact for float32."""
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _scores(scale, column, q, k, first, stop):
  """[tile, chunk], −∞ where a row does not see a column; column: the tile's first."""
  scores = _product(k, q, 1, 0) * scale
  column += jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
  return jnp.where((column >= first) & (column < stop), scores, -jnp.inf)


def _forward_step(scale, column, rows, columns, carry):
  (q, first, stop), (k, v), (m, total, acc) = rows, columns, carry
  scores = _scores(scale, column, q, k, first, stop)
  top = jnp.maximum(m, jnp.max(scores, 0, keepdims=True))
  p, alpha = jnp.exp(scores - top), jnp.exp(m - top)
  return top, alpha * total + jnp.sum(p, 0, keepdims=True), alpha * acc + _product(v, p.astype(v.dtype), 0, 0)


def _forward_end(m, total, acc):
  total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
  return acc / total, m + jnp.log(total)


def _weights(scale, column, rows, columns):
  """The weights of the softmax again, and the gradient of the scores: [tile, chunk] each, in the type of products."""
  (q, first, stop, grad, lse, delta), (k, v) = rows, columns
  p = jnp.exp(_scores(scale, column, q, k, first, stop) - lse)
  return p.astype(q.dtype), (p * (_product(v, grad, 1, 0) - delta) * scale).astype(q.dtype)


def _queries_step(scale, column, rows, columns, carry):
  _, ds = _weights(scale, column, rows, columns)
  return (carry[0] + _product(columns[0], ds, 0, 0),)


def _columns_step(scale, column, rows, columns, carry):
  p, ds = _weights(scale, column, rows, columns)
  return carry[0] + _product(ds, rows[0], 1, 1), carry[1] + _product(p, rows[3], 1, 1)


def _sweep(static, step, end, rows, columns, held: int, start, out):
  """end(carry) for every chunk of `rows`, or tile of `columns`, whichever is held, after carry = step(first column of the tile, chunk,
  tile, carry) with each of the other kind that it meets. start: shapes and values of the float32 carry; out: arrays like the results."""
  implementation, chunk, tile, _ = static
  blocks = rows[0].shape[ROWS] // chunk, columns[0].shape[COLUMNS] // tile
  run = _sweep_tpu if implementation.startswith("tpu") else _sweep_gpu
  sees = _meetings(rows[1][:, 0, 0], rows[2][:, 0, 0], tile, *blocks)
  if held == COLUMNS:
    sees = sees.swapaxes(1, 2)
  # The first that each meets, and the one behind the last: the same where it meets none.
  stop = jnp.where(jnp.any(sees, 2), sees.shape[2] - jnp.argmax(sees[..., ::-1], 2), 0).astype(jnp.int32)
  runs = jnp.argmax(sees, 2).astype(jnp.int32).reshape(-1), stop.reshape(-1), *sees.shape[1:]

  def step_of(held_at, streamed_at, held_values, streamed_values, carry):
    if held == ROWS:
      return step(streamed_at * tile, held_values, streamed_values, carry)
    return step(held_at * tile, streamed_values, held_values, carry)

  inputs = [(x, ROWS, chunk) for x in rows], [(x, COLUMNS, tile) for x in columns]
  results = [(x, held, chunk if held == ROWS else tile) for x in out]
  return run(step_of, end, *inputs[:: 1 if held == ROWS else -1], results, runs, start, implementation.endswith("_interpret"))


def _meetings(first, stop, tile: int, chunks: int, tiles: int):
  """Whether a row of a chunk sees a column of a tile [B,chunks,tiles], as far as the bounds of a chunk tell."""
  some = stop > first
  each = lambda x: x.reshape(len(first), chunks, -1)
  least, most = jnp.min(each(jnp.where(some, first, tile * tiles)), 2), jnp.max(each(jnp.where(some, stop, 0)), 2)
  at = tile * jnp.arange(tiles)
  return (at + tile > least[..., None]) & (at < most[..., None])


def _shape(x, axis: int, size: int) -> tuple:
  return (None, None, *(size if a == axis else x.shape[a] for a in (2, 3)))


def _place(axis: int, at) -> tuple:
  return (0, at) if axis == ROWS else (at, 0)


def _sweep_tpu(step, end, held, streamed, out, runs, start, interpret):
  """One grid step for each pair that meets, and one where a held block meets none."""
  first, stop, count, most = runs
  batch, heads = held[0][0].shape[:2]
  run, begin = schedule(jnp.maximum(stop - first, 1), batch * count * most)

  def spec(x, axis, size, still):
    def index(h, s, run, begin, first):
      i = run[s]
      return i // count, h, *_place(axis, i % count if still else first[i] + s - begin[i])

    return pl.BlockSpec(_shape(x, axis, size), index)

  def kernel(run, begin, first, *refs):
    refs = iter(refs)
    held_refs, streamed_refs, out_refs, carry = ([next(refs) for _ in x] for x in (held, streamed, out, start))
    s = pl.program_id(1)
    i = run[s]

    @pl.when(s == begin[i])
    def _():
      for ref, (shape, value) in zip(carry, start):
        ref[...] = jnp.full(shape, value, jnp.float32)

    values = [[ref[...] for ref in some] for some in (held_refs, streamed_refs, carry)]
    for ref, x in zip(carry, step(i % count, first[i] + s - begin[i], *values)):
      ref[...] = x

    @pl.when(s + 1 == begin[i + 1])
    def _():
      for ref, x in zip(out_refs, end(*(ref[...] for ref in carry))):
        ref[...] = x.astype(ref.dtype)

  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=3, grid=(heads, begin[-1]), in_specs=[*(spec(*x, True) for x in held), *(spec(*x, False) for x in streamed)],
          out_specs=[spec(*x, True) for x in out], scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape, _ in start]),
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _, _ in out],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      interpret=interpret)(run, begin, first, *(x for x, _, _ in (*held, *streamed)))


def _sweep_gpu(step, end, held, streamed, out, runs, start, interpret):
  """A program for each held block."""
  first, stop, count, _ = runs
  batch, heads = held[0][0].shape[:2]
  spec = lambda x, axis, size: pl.BlockSpec(_shape(x, axis, size), lambda b, h, i: (b, h, *_place(axis, i)))

  def kernel(first, stop, *refs):
    b, h, i = (pl.program_id(a) for a in range(3))
    refs = iter(refs)
    held_refs, streamed_refs, out_refs = ([next(refs) for _ in x] for x in (held, streamed, out))
    values = [ref[...] for ref in held_refs]

    def one(j, carry):
      at = lambda axis, size: tuple(pl.ds(j * size, size) if a == axis else slice(None) for a in (2, 3))
      return step(i, j, values, [plgpu.load(ref.at[b, h, *at(axis, size)]) for ref, (_, axis, size) in zip(streamed_refs, streamed)], carry)

    n = b * count + i
    carry = jax.lax.fori_loop(first[n], stop[n], one, tuple(jnp.full(shape, value, jnp.float32) for shape, value in start))
    for ref, x in zip(out_refs, end(*carry)):
      ref[...] = x.astype(ref.dtype)

  return pl.pallas_call(
      kernel, grid=(batch, heads, count),
      in_specs=[pl.BlockSpec(), pl.BlockSpec(), *(spec(*x) for x in held), *(pl.BlockSpec() for _ in streamed)], out_specs=[spec(*x) for x in out],
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _, _ in out], compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
      interpret=interpret)(first, stop, *(x for x, _, _ in (*held, *streamed)))
