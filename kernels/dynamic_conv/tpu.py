"""TPU kernels of `dynamic_conv`.

The rows of all blocks lie one after another, so that a tile of rows holds whole blocks. Two bfloat16 rows share the 32-bit rows of a
register: a shift and a mask take them apart, which makes the even rows the predecessors of the odd ones for nothing, and one gather
along the lanes spreads the coefficients of both to their groups of channels. Sums over groups are a product with a matrix of ones and
zeros, exact since what it multiplies is cut into bfloat16 pieces.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
# of x in one step of the grid; steps, while there are chunks: what one computes hides what another moves
TILE_BYTES, LEAST_STEPS = 2**20, 8
CHUNK_ROWS = 32
MOST_CHUNK_BYTES = 2**23  # of all taps in float32
VMEM_BYTES = 48 * 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
  """Static sizes. rows: of x; tile: of a step; chunk: computed at once, whole blocks or all rows; offset: where the coefficients begin
  in a row of `dynamic`; packed: rows of x in a 32-bit row; native: False where a CPU interprets."""

  rows: int
  width: int
  slots: int
  taps: int
  group: int
  offset: int
  tile: int
  chunk: int
  packed: int
  native: bool

  def slot(self):
    """The slot of each row of a chunk, split as by `unpack`."""
    row = jax.lax.broadcasted_iota(jnp.int32, (self.chunk // self.packed, LANES), 0)
    return [jax.lax.rem(self.packed * row + p, jnp.int32(self.slots)) for p in range(self.packed)]


def chunk_rows(rows: int, slots: int, packed: int) -> int:
  """Rows of whole blocks and whole registers, or all rows where they are fewer."""
  unit = math.lcm(slots, SUBLANES * packed)
  return min(unit * max(1, CHUNK_ROWS // unit), pl.cdiv(rows, SUBLANES * packed) * SUBLANES * packed)


def unsupported(x, slots: int, taps: int, group: int) -> str | None:
  """Why these kernels cannot do this, or None."""
  if group > LANES or group & (group - 1):
    return f"groups of {group} channels: the TPU kernel takes powers of two up to {LANES}"
  rows, width = x.size // x.shape[-1], pl.cdiv(x.shape[-1], LANES) * LANES
  chunk = chunk_rows(rows, slots, 4 // x.dtype.itemsize)
  if 4 * chunk * taps * width > MOST_CHUNK_BYTES:
    return (f"{taps} taps over {chunk} rows (whole blocks of {slots} slots in whole registers) of {width} channels "
            "are too much for a TPU's VMEM")
  return None


def make_plan(x, slots: int, taps: int, group: int, offset: int, native: bool) -> Plan:
  rows, width = x.shape
  packed = 4 // x.dtype.itemsize
  chunk = chunk_rows(rows, slots, packed)
  most = max(1, min(TILE_BYTES // (chunk * width * x.dtype.itemsize), rows // (chunk * LEAST_STEPS)))
  whole = [n for n in range(most, most // 2, -1) if rows % (n * chunk) == 0]  # Without a last tile that is only partly there.
  return Plan(rows, width, slots, taps, group, offset, chunk * (whole or [most])[0], chunk, packed, native)


def halves(bits):
  """The float32 values of the lower and the upper bfloat16 of each word."""
  return [pltpu.bitcast(b, jnp.float32) for b in (bits << 16, bits & jnp.uint32(0xFFFF0000))]


def words(plan: Plan, x):
  """Rows as the register has them: 32 bits wide, two of bfloat16 in each."""
  if plan.packed == 1:
    return x
  if not plan.native:  # XLA folds a constant bfloat16 into wrong words.
    x = jax.lax.optimization_barrier(x)
  return pltpu.bitcast(x, jnp.uint32)


def unpack(plan: Plan, x):
  """Rows [n,…] → `packed` float32 arrays [n/packed,…]: rows p, p + packed, …"""
  return [x] if plan.packed == 1 else halves(words(plan, x))


def pack(plan: Plan, parts, dtype):
  """The inverse of `unpack`, rounded to nearest even."""
  if plan.packed == 1:
    return parts[0]
  if plan.native:
    return pltpu.bitcast(pltpu.pack_elementwise(parts, packed_dtype=dtype), dtype)
  words = [jax.lax.bitcast_convert_type(p.astype(dtype), jnp.uint16).astype(jnp.uint32) for p in parts]
  return pltpu.bitcast(words[0] | words[1] << 16, dtype)


def shifted(plan: Plan, parts, slot, by: int):
  """Row r − by of the same block, 0 where there is none; rows split as by `unpack`."""
  if by == 0:
    return parts
  packed = plan.packed
  aligned = SUBLANES * packed % plan.slots == 0  # No block lies in two registers: each turns by itself.

  def turn(x, sublanes):
    if aligned:
      x = x.reshape(-1, SUBLANES, LANES)
    size = x.shape[-2]
    y = x if sublanes % size == 0 else pltpu.roll(x, sublanes % size, x.ndim - 2)
    return y.reshape(-1, LANES)

  def cut(p, y):
    least, most = (p, plan.slots - packed + p) if plan.slots % packed == 0 else (0, plan.slots - 1)
    if by <= least if by > 0 else most < plan.slots + by:
      return y
    return jnp.where(slot[p] >= by if by > 0 else slot[p] < plan.slots + by, y, 0.0)

  return [cut(p, turn(parts[(p - by) % packed], -((p - by) // packed))) for p in range(packed)]


def spread(plan: Plan, ref, rows, tap: int, lane: int):
  """Coefficients of a tap for the 128 channels from `lane` on, split as by `unpack`: each group's to all its channels."""
  first = plan.offset + (tap * plan.width + lane) // plan.group
  bits = words(plan, ref[rows, pl.ds(first // LANES * LANES, LANES)])
  index = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 1) // plan.group + first % LANES
  bits = jnp.take_along_axis(bits, index, axis=1, mode="promise_in_bounds")
  return [bits] if plan.packed == 1 else halves(bits)


def each_chunk(plan: Plan, f):
  """Runs f(rows) for the chunks of a tile."""
  def step(i, _):
    f(pl.ds(pl.multiple_of(i * plan.chunk, plan.chunk), plan.chunk), i * plan.chunk)

  jax.lax.fori_loop(0, plan.tile // plan.chunk, step, None)


def forward_kernel(plan: Plan, x_ref, base_ref, dynamic_ref, *refs):
  *residual_ref, out_ref = refs
  slot = plan.slot()

  def chunk(rows, _):
    for lane in range(0, plan.width, LANES):
      at = (rows, pl.ds(lane, LANES))
      x = unpack(plan, x_ref[at])
      out = unpack(plan, residual_ref[0][at]) if residual_ref else None
      for o in range(plan.taps):
        base = base_ref[pl.ds(o, 1), pl.ds(lane, LANES)].astype(jnp.float32)
        terms = [(base + k) * y for k, y in zip(spread(plan, dynamic_ref, rows, o, lane), shifted(plan, x, slot, o))]
        out = [a + b for a, b in zip(out, terms)] if out else terms
      out_ref[at] = pack(plan, out, out_ref.dtype)

  each_chunk(plan, chunk)


def sums_of_groups(plan: Plan, products, ones):
  """[n,taps·D] as float32 arrays [n,128] of neighbouring channels → [n,128·k]: the sum of each group, groups side by side.

  128 groups at a time meet the same matrix of ones (at most [128·group,128]), all of them in one product."""
  rows, tiles = products[0].shape[0], ones.shape[0] // LANES
  products = products + [jnp.zeros_like(products[0])] * (-len(products) % tiles)
  stacked = jnp.concatenate([jnp.concatenate(products[i : i + tiles], 1) for i in range(0, len(products), tiles)], 0)
  total, pieces = None, 2 if plan.packed > 1 else 3  # What a bfloat16 or a float32 result can tell apart.
  for _ in range(pieces):
    piece = stacked.astype(jnp.bfloat16)
    part = jnp.dot(piece, ones, preferred_element_type=jnp.float32)
    total = part if total is None else total + part
    stacked = stacked - piece.astype(jnp.float32)
  return jnp.concatenate([total[i : i + rows] for i in range(0, total.shape[0], rows)], 1)


def backward_kernel(plan: Plan, x_ref, base_ref, dynamic_ref, grad_ref, dx_ref, dbase_ref, ddynamic_ref, ones_ref, sums_ref):
  step, slot = pl.program_id(0), plan.slot()

  @pl.when(step == 0)
  def _():
    shape = ones_ref.shape
    group = jax.lax.broadcasted_iota(jnp.int32, shape, 0) // plan.group
    ones_ref[...] = jnp.where(group == jax.lax.broadcasted_iota(jnp.int32, shape, 1), 1.0, 0.0).astype(ones_ref.dtype)
    sums_ref[...] = jnp.zeros_like(sums_ref)

  def chunk(rows, start):
    products = [[] for _ in range(plan.taps)]
    for lane in range(0, plan.width, LANES):
      at = (rows, pl.ds(lane, LANES))
      x, grad = (unpack(plan, ref[at]) for ref in (x_ref, grad_ref))
      dx = None
      for o in range(plan.taps):
        base = base_ref[pl.ds(o, 1), pl.ds(lane, LANES)].astype(jnp.float32)
        back = shifted(plan, [(base + k) * g for k, g in zip(spread(plan, dynamic_ref, rows, o, lane), grad)], slot, -o)
        dx = [a + b for a, b in zip(dx, back)] if dx else back
        product = [g * y for g, y in zip(grad, shifted(plan, x, slot, o))]
        products[o].append(jnp.concatenate(product, 0))
        if plan.rows % plan.tile:  # What stands behind the last row is not to be summed.
          row = jax.lax.broadcasted_iota(jnp.int32, product[0].shape, 0) * plan.packed + step * plan.tile + start
          product = [jnp.where(row + p < plan.rows, y, 0.0) for p, y in enumerate(product)]
        into = (pl.ds(o * SUBLANES, SUBLANES), pl.ds(lane, LANES))
        sums_ref[into] += sum(product).reshape(-1, SUBLANES, LANES).sum(0)
      dx_ref[at] = pack(plan, dx, dx_ref.dtype)
    sums = sums_of_groups(plan, sum(products, []), ones_ref[...])
    lanes = pl.cdiv(ddynamic_ref.shape[1], LANES) * LANES
    half = plan.chunk // plan.packed
    ddynamic_ref[rows] = pack(plan, [sums[p * half : (p + 1) * half, :lanes] for p in range(plan.packed)], ddynamic_ref.dtype)

  each_chunk(plan, chunk)

  @pl.when(step == pl.num_programs(0) - 1)
  def _():
    for o in range(plan.taps):
      dbase_ref[pl.ds(o, 1)] = sums_ref[pl.ds(o * SUBLANES, SUBLANES)].sum(0, keepdims=True)


def specs(x, base, dynamic, slots: int, group: int, part: int, interpret: bool):
  """(plan; blocks of x and its like, of base, of dynamic)."""
  taps = base.shape[1]
  one = taps * x.shape[1] // group
  alone = one % LANES == 0  # Else a row of all parts is read.
  plan = make_plan(x, slots, taps, group, 0 if alone else part * one, not interpret)
  row = lambda lanes, column=0: pl.BlockSpec((plan.tile, lanes), lambda i: (i, column))
  dynamic = row(one, part) if alone else row(pl.cdiv(dynamic.shape[1], LANES) * LANES)
  return plan, row(plan.width), pl.BlockSpec((None, taps, plan.width), lambda i: (part, 0, 0)), dynamic


def forward(x, base, dynamic, residual, *, slots: int, group: int, part: int, interpret=False):
  """x [rows,D], base [parts,taps,D], dynamic [rows,parts·taps·D/group], residual like x or None → like x."""
  plan, row, base_spec, dynamic_spec = specs(x, base, dynamic, slots, group, part, interpret)
  more = [] if residual is None else [residual]
  return pl.pallas_call(
      functools.partial(forward_kernel, plan), grid=(pl.cdiv(plan.rows, plan.tile),),
      in_specs=[row, base_spec, dynamic_spec] + [row] * len(more), out_specs=row, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
      interpret=interpret)(x, base, dynamic, *more)


def backward(x, base, dynamic, grad, *, slots: int, group: int, part: int, interpret=False):
  """(dx, dbase [taps,D] float32, ddynamic [rows,taps·D/group]); arguments as in `forward`, grad like x."""
  plan, row, base_spec, dynamic_spec = specs(x, base, dynamic, slots, group, part, interpret)
  taps, one = plan.taps, plan.taps * plan.width // group
  return pl.pallas_call(
      functools.partial(backward_kernel, plan), grid=(pl.cdiv(plan.rows, plan.tile),),
      in_specs=[row, base_spec, dynamic_spec, row],
      out_specs=[row, pl.BlockSpec((taps, plan.width), lambda i: (0, 0)),
                 pl.BlockSpec((plan.tile, pl.cdiv(one, LANES) * LANES), lambda i: (i, 0))],
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((taps, plan.width), jnp.float32),
                 jax.ShapeDtypeStruct((plan.rows, one), dynamic.dtype)],
      scratch_shapes=[pltpu.VMEM((LANES * min(group, taps * plan.width // LANES), LANES), jnp.bfloat16),
                      pltpu.VMEM((taps * SUBLANES, plan.width), jnp.float32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
      interpret=interpret)(x, base, dynamic, grad)
