"""The walk as one kernel: scores of all pairs of neighbouring candidates, then the path through them, in fast memory.

The rows that a slot may need are known before the walk: its predecessors are the candidates of the slot before. All pairs by matrix
products cost little, and leave the sequential part, one step a slot, two reductions over C numbers; row by row that part would hold a
fetch and R multiplications a slot.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from specdec_jax.kernels.path_walk.ref import rows
from specdec_jax.typing import Float, Int

LANES = 128
REQUESTS = 8  # Of a TPU block: as many as a register has sublanes.
PAIRS = 2048  # Whose scores a GPU program holds at a time: 8 slots of 16 candidates.
FETCHED = 8192  # Bytes of a table that a GPU program fetches at a time.
CANDIDATES = 16  # TPU: what C is padded to a multiple of; GPU: the least that a matrix product takes.


def padded(bias: Float["B L C"], ids: Int["B L C"], anchor: Int["B"], size: int):
  """bias, ids and each slot's predecessors, [B,L,size]: candidates that are never taken added; the anchor is slot 0's predecessor."""
  more = ((0, 0), (0, 0), (0, size - ids.shape[-1]))
  ids = jnp.pad(ids, more)
  before = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, size))
  return jnp.pad(bias, more, constant_values=-jnp.inf), ids, jnp.concatenate([before, ids[:, :-1]], 1)


def product(left, right):
  """left · rightᵀ with float32 sums, exact for float32."""
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def tpu(bias, scale, anchor, ids, gate, predecessor, successor, interpret=False) -> tuple[Int["B L"], Float["B L C"]]:
  """`ref.walk` on a TPU. XLA gathers the rows; the slots of a request lie side by side on the lanes."""
  batch, length, count = ids.shape
  size = pl.cdiv(count, CANDIDATES) * CANDIDATES
  bias, ids, before = padded(bias, ids, anchor, size)
  requests = min(batch, REQUESTS)
  flat = lambda x: x.reshape(batch, length * size, *x.shape[3:])
  block = lambda *shape: pl.BlockSpec((requests, *shape), lambda b: (b, *(0,) * len(shape)))
  rank, width = gate.shape[-1], length * size
  scale = jnp.ones((batch, 1)) if scale is None else scale[:, None]
  index, pair = pl.pallas_call(
      tpu_kernel, grid=(pl.cdiv(batch, requests),),
      in_specs=[block(width), block(1), block(length, rank), block(width, rank), block(width, rank)],
      out_specs=[block(length), block(width)],
      out_shape=[jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch, width), jnp.float32)],
      scratch_shapes=[pltpu.VMEM((requests, min(length, max(LANES // size, 1)) * size, LANES * pl.cdiv(size, LANES)), jnp.float32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)), interpret=interpret, name="path_walk",
  )(flat(bias), scale, gate, rows(predecessor, flat(before)), rows(successor, flat(ids)))
  return index, pair.reshape(batch, length, size)[..., :count]


def tpu_kernel(bias_ref, scale_ref, gate_ref, left_ref, right_ref, index_ref, pair_ref, scores_ref):
  requests, length, rank = gate_ref.shape
  size = bias_ref.shape[1] // length
  at_once = max(LANES // size, 1)
  previous, indices = jnp.zeros((requests, 1), jnp.float32), []
  for first in range(0, length, at_once):
    slots = min(at_once, length - first)
    here, width = pl.ds(first * size, slots * size), slots * size
    for i in range(requests):
      dtype = jnp.promote_types(left_ref.dtype, gate_ref.dtype)
      gates = jnp.broadcast_to(gate_ref[i, first : first + slots].astype(jnp.float32)[:, None], (slots, size, rank)).reshape(width, rank)
      left = (left_ref[i, here].astype(jnp.float32) * gates).astype(dtype)
      scores_ref[i, :width, :width] = product(left, right_ref[i, here].astype(dtype))
    lane = lax.broadcasted_iota(jnp.int32, (requests, width), 1)
    bias, pair = bias_ref[:, here], jnp.zeros((requests, width), jnp.float32)
    for t in range(slots):
      row = lax.broadcasted_iota(jnp.int32, (requests, size, width), 1).astype(jnp.float32)
      taken = jnp.sum(jnp.where(row == previous[:, :, None], scores_ref[:, t * size : (t + 1) * size, :width], 0.0), 1)
      mine = (lane >= t * size) & (lane < (t + 1) * size)
      pair = jnp.where(mine, taken, pair)
      x = bias + taken / scale_ref[...]
      x = jnp.where(mine & (x < jnp.inf), x, -jnp.inf)
      best = mine & (x == x.max(1, keepdims=True))
      previous = jnp.min(jnp.where(best, (lane - t * size).astype(jnp.float32), jnp.inf), 1, keepdims=True)
      indices.append(previous)
    pair_ref[:, here] = pair
  index_ref[...] = jnp.concatenate(indices, 1).astype(jnp.int32)


def gpu(bias, scale, anchor, ids, gate, predecessor, successor, interpret=False) -> tuple[Int["B L"], Float["B L C"]]:
  """`ref.walk` on a GPU: one program a request, which fetches its rows itself."""
  batch, length, count = ids.shape
  size = max(pl.next_power_of_2(count), CANDIDATES)
  bias, ids, before = padded(bias, ids, anchor, size)
  block = lambda *shape: pl.BlockSpec((None, *shape), lambda b: (b, *(0,) * len(shape)))
  whole = lambda x: pl.BlockSpec(x.shape, lambda b: (0,) * x.ndim)
  scale = jnp.ones((batch,)) if scale is None else scale
  index, pair = pl.pallas_call(
      gpu_kernel, grid=(batch,),
      in_specs=[block(length, size), block(), block(length, gate.shape[-1]), block(length, size), block(length, size),
                whole(predecessor), whole(successor)],
      out_specs=[block(length), block(length, size)],
      out_shape=[jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch, length, size), jnp.float32)],
      compiler_params=plgpu.CompilerParams(num_warps=4), interpret=interpret, name="path_walk",
  )(bias, scale, gate, before, ids, predecessor, successor)
  return index, pair[..., :count]


def gpu_kernel(bias_ref, scale_ref, gate_ref, before_ref, ids_ref, predecessor_ref, successor_ref, index_ref, pair_ref):
  length, size = ids_ref.shape
  vocab, rank = predecessor_ref.shape
  dtype = jnp.promote_types(predecessor_ref.dtype, gate_ref.dtype)
  wide = min(pl.next_power_of_2(rank), FETCHED // (size * dtype.itemsize))
  at_once = max(PAIRS // size**2, 1)
  column, row = lax.iota(jnp.int32, wide), lax.broadcasted_iota(jnp.int32, (size, size), 0)
  scale = scale_ref[...]

  def scores(t):
    """All pair scores of slot t."""
    before, after, total = before_ref[t], ids_ref[t], jnp.zeros((size, size), jnp.float32)
    for first in range(0, rank, wide):
      at = first + column
      inside = {} if first + wide <= rank else {"mask": at < rank, "other": 0.0}
      whole = {k: jnp.broadcast_to(v, (size, wide)) for k, v in inside.items()}

      def fetch(table, ids, at=at, whole=whole):
        ids = jnp.broadcast_to(jnp.clip(ids, 0, vocab - 1)[:, None], (size, wide))
        return plgpu.load(table.at[ids, jnp.broadcast_to(at, (size, wide))], **whole)

      gates = plgpu.load(gate_ref.at[t, at], **inside).astype(jnp.float32)
      left = fetch(predecessor_ref, before).astype(jnp.float32) * gates[None]
      total += product(left.astype(dtype), fetch(successor_ref, after).astype(dtype))
    return total

  def steps(first, slots, previous):
    pairs = [scores(first + t) for t in range(slots)]
    for t in range(slots):
      taken = jnp.sum(jnp.where(row == previous, pairs[t], 0.0), 0)
      x = bias_ref[first + t] + taken / scale
      previous = jnp.argmax(jnp.where(x < jnp.inf, x, -jnp.inf), 0).astype(jnp.int32)
      pair_ref[first + t] = taken
      index_ref[first + t] = previous
    return previous

  rounds, rest = divmod(length, at_once)
  previous = lax.fori_loop(0, rounds, lambda i, previous: steps(i * at_once, at_once, previous), jnp.int32(0)) if rounds else jnp.int32(0)
  if rest:
    steps(rounds * at_once, rest, previous)
