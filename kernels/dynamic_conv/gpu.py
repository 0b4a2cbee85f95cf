"""Triton kernels of `dynamic_conv` for GPUs.

A program walks through the slots of a few blocks, for some groups of channels, and keeps in registers the tokens that later taps
need: every array is read once. Tiles are [blocks, groups, channels of a group], so that a group's coefficient is broadcast along the
last axis and a sum over the group is one over it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ELEMENTS = 8  # of a tile, a thread
FORWARD_WARPS, BACKWARD_WARPS = 4, 1  # at most; sums over groups pass between the threads of a warp without waiting for others
MOST_UNROLLED = 16  # slots; more of them run as a loop
MOST_CHANNELS = 4096  # of a group
LEAST_PROGRAMS = 1024  # while a program of the backward pass takes more blocks


@dataclasses.dataclass(frozen=True)
class Plan:
  """Static sizes. tile [blocks, groups, channels] of a step; steps: of a program, one after another; unrolled: the walk through the
  slots, so that many loads are under way (interpreted it is a loop, which compiles sooner)."""

  blocks: int
  slots: int
  groups: int
  group: int
  taps: int
  part: int
  tile: tuple[int, int, int]
  steps: int
  unrolled: bool

  @property
  def warps(self):
    return max(1, self.tile[0] * self.tile[1] * self.tile[2] // (32 * ELEMENTS))

  @property
  def grid(self):
    return pl.cdiv(self.blocks, self.tile[0] * self.steps), pl.cdiv(self.groups, self.tile[1])


def unsupported(x, slots: int, taps: int, group: int) -> str | None:
  """Why these kernels cannot do this, or None."""
  del slots, taps
  if group > MOST_CHANNELS:
    return f"groups of {group} channels: the GPU kernel takes up to {MOST_CHANNELS}"
  return f"x has {x.size} elements: the GPU kernel counts to 2**31" if x.size >= 2**31 else None


def make_plan(blocks: int, slots: int, groups: int, group: int, taps: int, part: int, sums: bool, interpret: bool) -> Plan:
  size, channels, warps = 32 * ELEMENTS, pl.next_power_of_2(group), BACKWARD_WARPS if sums else FORWARD_WARPS
  across = min(pl.next_power_of_2(groups), max(1, size // channels))
  down = min(pl.next_power_of_2(blocks), max(1, warps * size // (across * channels)))
  plan = Plan(blocks, slots, groups, group, taps, part, (down, across, channels), 1, not interpret and slots <= MOST_UNROLLED)
  programs = plan.grid[0] * plan.grid[1]
  return dataclasses.replace(plan, steps=max(1, min(8, programs // LEAST_PROGRAMS))) if sums else plan


class Tile:
  """Loads and stores of one tile: x and its like [blocks,slots,groups,group], coefficients [blocks,slots,parts,taps,groups]."""

  def __init__(self, plan: Plan, step):
    self.plan = plan
    down, across, channels = plan.tile
    self.block = (pl.program_id(0) * plan.steps + step) * down + jnp.arange(down)
    self.group = pl.program_id(1) * across + jnp.arange(across)
    self.channel = jnp.arange(channels)
    self.pair = (self.block < plan.blocks)[:, None] & (self.group < plan.groups)[None]
    self.whole = self.pair[:, :, None] & (self.channel < plan.group)[None, None]

  def row(self, ref, slot):
    return ref.at[self.block[:, None, None], slot, self.group[None, :, None], self.channel[None, None]]

  def coefficients(self, ref, slot, part, tap):
    return ref.at[self.block[:, None], slot, part, tap, self.group[None]]

  def base(self, ref, tap):
    """[groups, channels] of a tap."""
    mask = (self.group < self.plan.groups)[:, None] & (self.channel < self.plan.group)[None]
    return plgpu.load(ref.at[self.plan.part, tap, self.group[:, None], self.channel[None]], mask=mask, other=0).astype(jnp.float32)

  def load(self, ref, slot):
    return plgpu.load(self.row(ref, slot), mask=self.whole, other=0).astype(jnp.float32)

  def kernel(self, base, ref, slot):
    """base + dynamic of all taps at a slot."""
    loaded = [plgpu.load(self.coefficients(ref, slot, self.plan.part, o), mask=self.pair, other=0) for o in range(self.plan.taps)]
    return [b[None] + k.astype(jnp.float32)[:, :, None] for b, k in zip(base, loaded)]

  def store(self, ref, slot, x, mask=True):
    plgpu.store(self.row(ref, slot), x.astype(ref.dtype), mask=self.whole & mask)


def each_slot(plan: Plan, step, carry):
  """carry = step(slot, carry) for every slot."""
  if not plan.unrolled:
    return jax.lax.fori_loop(0, plan.slots, step, carry)
  for t in range(plan.slots):
    carry = step(t, carry)
  return carry


def forward_kernel(plan: Plan, x_ref, base_ref, dynamic_ref, *refs):
  *residual_ref, out_ref = refs
  tile = Tile(plan, 0)
  base = [tile.base(base_ref, o) for o in range(plan.taps)]

  def step(t, before):
    x = [tile.load(x_ref, t), *before]
    terms = [k * y for k, y in zip(tile.kernel(base, dynamic_ref, t), x)]
    tile.store(out_ref, t, sum(terms, tile.load(residual_ref[0], t) if residual_ref else 0.0))
    return x[: plan.taps - 1]

  each_slot(plan, step, [jnp.zeros(plan.tile)] * (plan.taps - 1))


def backward_kernel(plan: Plan, x_ref, base_ref, dynamic_ref, grad_ref, dx_ref, dbase_ref, ddynamic_ref):
  """A token's gradient waits (`later`) for the taps by which the tokens after it see it."""
  late = plan.taps - 1

  def blocks(i, sums):
    tile = Tile(plan, i)
    base = [tile.base(base_ref, o) for o in range(plan.taps)]

    def step(t, carry):
      before, later, sums = carry
      x, grad = [tile.load(x_ref, t), *before], tile.load(grad_ref, t)
      later = [k * grad + y for k, y in zip(tile.kernel(base, dynamic_ref, t), [0.0, *later])]
      products = [grad * y for y in x]
      for o, y in enumerate(products):
        plgpu.store(tile.coefficients(ddynamic_ref, t, 0, o), y.sum(-1).astype(ddynamic_ref.dtype), mask=tile.pair)
      if not isinstance(t, int) or t >= late:
        tile.store(dx_ref, t - late, later[late], t >= late)
      return x[:late], later[:late], [s + y for s, y in zip(sums, products)]

    nothing = [jnp.zeros(plan.tile)] * late
    _, later, sums = each_slot(plan, step, (nothing, nothing, sums))
    for o, y in enumerate(later):
      if plan.slots > o:
        tile.store(dx_ref, plan.slots - 1 - o, y)
    return sums

  sums = [jnp.zeros(plan.tile)] * plan.taps
  sums = jax.lax.fori_loop(0, plan.steps, blocks, sums) if plan.steps > 1 else blocks(0, sums)
  tile = Tile(plan, 0)
  mask = (tile.group < plan.groups)[:, None] & (tile.channel < plan.group)[None]
  for o, y in enumerate(sums):
    plgpu.store(dbase_ref.at[pl.program_id(0), o, tile.group[:, None], tile.channel[None]], y.sum(0), mask=mask)


def views(x, base, dynamic, slots: int, group: int):
  """(x, base, dynamic) with blocks, slots, groups and taps as axes of their own."""
  (rows, width), (parts, taps, _) = x.shape, base.shape
  groups = width // group
  return (x.reshape(rows // slots, slots, groups, group), base.reshape(parts, taps, groups, group),
          dynamic.reshape(rows // slots, slots, parts, taps, groups))


def forward(x, base, dynamic, residual, *, slots: int, group: int, part: int, interpret=False):
  """x [rows,D], base [parts,taps,D], dynamic [rows,parts·taps·D/group], residual like x or None → like x."""
  blocks, base, dynamic = views(x, base, dynamic, slots, group)
  more = [] if residual is None else [residual.reshape(blocks.shape)]
  plan = make_plan(*blocks.shape, base.shape[1], part, False, interpret)
  out = pl.pallas_call(
      functools.partial(forward_kernel, plan), grid=plan.grid, out_shape=jax.ShapeDtypeStruct(blocks.shape, x.dtype),
      compiler_params=plgpu.CompilerParams(num_warps=plan.warps), interpret=interpret)(blocks, base, dynamic, *more)
  return out.reshape(x.shape)


def backward(x, base, dynamic, grad, *, slots: int, group: int, part: int, interpret=False):
  """(dx, dbase [taps,D] float32, ddynamic [rows,taps·D/group]); arguments as in `forward`, grad like x."""
  blocks, base, dynamic = views(x, base, dynamic, slots, group)
  taps, groups = base.shape[1:3]
  plan = make_plan(*blocks.shape, taps, part, True, interpret)
  dx, dbase, ddynamic = pl.pallas_call(
      functools.partial(backward_kernel, plan), grid=plan.grid,
      out_shape=[jax.ShapeDtypeStruct(blocks.shape, x.dtype), jax.ShapeDtypeStruct((plan.grid[0], taps, groups, group), jnp.float32),
                 jax.ShapeDtypeStruct((*blocks.shape[:2], 1, taps, groups), dynamic.dtype)],
      compiler_params=plgpu.CompilerParams(num_warps=plan.warps), interpret=interpret)(blocks, base, dynamic, grad.reshape(blocks.shape))
  return dx.reshape(x.shape), dbase.sum(0).reshape(taps, -1), ddynamic.reshape(x.shape[0], -1)
