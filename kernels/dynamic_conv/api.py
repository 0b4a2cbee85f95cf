"""`dynamic_conv` on whatever runs."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.kernels import base as kernels
from specdec_jax.kernels.dynamic_conv import gpu, ref, tpu
from specdec_jax.typing import Float

PLATFORMS = {"tpu": tpu, "gpu": gpu}
MOST_TAPS = 4


def dynamic_conv(
    *, x: Float["... T D"], base: Float["taps D"], dynamic: Float["... T taps D/group"], slots: int, part: int | None = None,
    residual: Float["... T D"] | None = None, implementation: str | None = None,
) -> Float["... T D"]:
  """Depthwise convolution over the slots of blocks: out_t = Σ_o (base_o + dynamic_{t,o} of the channel's group) ⊙ x_{t−o}.

  T is a multiple of `slots`, a block's tokens; x before its block is 0. 1 to 4 taps; channels d·group … belong to one group. Computed in
  float32, returned in x's type. With `part`, base [parts,taps,D] and dynamic [...,T,parts,taps,D/group] hold several sets of
  coefficients of which that one is used, without a copy of it. `residual` is added to the result: one pass over memory (read x and
  residual, write the sum) where a convolution and a sum after it are two, 40 % less traffic. implementation: see `kernels.base.choose`.
  Raises ValueError where shapes do not agree.
  """
  groups = _check(x, base, dynamic, slots, part, residual)
  width, taps = x.shape[-1], base.shape[-2]
  group = width // groups
  chosen = kernels.choose("dynamic_conv", implementation, lambda platform: _unsupported(platform, x, dynamic, residual, slots, taps, group))
  if chosen == "reference":
    return ref.dynamic_conv(x=x, base=base, dynamic=dynamic, slots=slots, part=part, residual=residual)
  platform, _, interpret = chosen.partition("_")
  if part is None:
    base, dynamic = base[None], dynamic[..., None, :, :]
  pad = -width % tpu.LANES if platform == "tpu" else 0
  wide = lambda y, more: y if y is None or not pad else jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, more)])
  x_, residual_, base, dynamic = wide(x, pad), wide(residual, pad), wide(base, pad), wide(dynamic, pad // group)
  blocks = lambda y: None if y is None else y.reshape(tokens // slots, slots, -1)
  tokens, static = x.size // width, (platform, slots, group, part or 0, bool(interpret))
  return _convolve(static, blocks(x_), base, blocks(dynamic), blocks(residual_))[..., :width].reshape(x.shape)


def _check(x, base, dynamic, slots, part, residual) -> int:
  """The number of groups, or ValueError."""
  def need(true, text):
    if not true:
      raise ValueError(f"dynamic_conv: {text}")

  need(x.ndim >= 2, f"x is {x.shape}: it needs the axes [..., T, D]")
  tokens, width = x.shape[-2:]
  need(slots >= 1 and tokens % slots == 0, f"x is {x.shape}: {tokens} tokens are no multiple of the {slots} slots of a block")
  parts = base.shape[:-2]
  need(base.ndim == (2 if part is None else 3), f"base is {base.shape}: it needs the axes [taps, D], with a part [parts, taps, D]")
  need(part is None or 0 <= part < parts[0], f"part is {part}: base {base.shape} has no such part")
  need(base.shape[-1] == width, f"base is {base.shape} where x has {width} channels")
  need(1 <= base.shape[-2] <= MOST_TAPS, f"base is {base.shape}: 1 to {MOST_TAPS} taps")
  axes = (*x.shape[:-1], *parts, base.shape[-2])
  need(dynamic.shape[:-1] == axes, f"dynamic is {dynamic.shape}: its axes before the last, the groups, have to be {axes}")
  groups = dynamic.shape[-1]
  need(groups and width % groups == 0, f"dynamic is {dynamic.shape}: {width} channels do not split into {groups} groups")
  need(residual is None or residual.shape == x.shape, f"residual is {None if residual is None else residual.shape}, x {x.shape}")
  return groups


def _unsupported(platform: str, x, dynamic, residual, slots: int, taps: int, group: int) -> str | None:
  """Why the kernel of a platform cannot do this, or None."""
  types = {str(y.dtype) for y in (x, dynamic, residual) if y is not None}
  if types not in ({"float32"}, {"bfloat16"}):
    return f"x, dynamic and residual are of {', '.join(sorted(types))}: the kernels take all float32 or all bfloat16"
  if not x.size:
    return "there are no tokens"
  return PLATFORMS[platform].unsupported(x, slots, taps, group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(static, x, base, dynamic, residual):
  """x, residual [blocks,slots,D], base [parts,taps,D], dynamic [blocks,slots,parts·taps·D/group]; static: platform, slots, group, part,
  interpret. On a mesh blocks are split, as rows of a batch are; channels are not: what stands before and behind it has all of them."""
  platform, slots, group, part, interpret = static

  def run(x, base, dynamic, residual):
    rows = _rows(x), base, _rows(dynamic), _rows(residual)
    return PLATFORMS[platform].forward(*rows, slots=slots, group=group, part=part, interpret=interpret).reshape(x.shape)

  return kernels.spread(run, [(x, "B"), (base, ""), (dynamic, "B"), (residual, "B")], "B")


def _rows(x):
  """[blocks,slots,…] to [rows,…]."""
  return None if x is None else x.reshape(-1, x.shape[-1])


def _forward(static, x, base, dynamic, residual):
  return _convolve(static, x, base, dynamic, residual), (x, base, dynamic, residual is not None)


def _backward(static, saved, grad):
  platform, slots, group, part, interpret = static
  x, base, dynamic, added = saved

  def run(x, base, dynamic, grad):
    rows = _rows(x), base, _rows(dynamic), _rows(grad)
    dx, dbase, ddynamic = PLATFORMS[platform].backward(*rows, slots=slots, group=group, part=part, interpret=interpret)
    return dx.reshape(x.shape), dbase[None], ddynamic.reshape(*x.shape[:2], -1)

  dx, dbase, ddynamic = kernels.spread(run, [(x, "B"), (base, ""), (dynamic, "B"), (grad, "B")], "B")
  parts, each = base.shape[0], ddynamic.shape[-1]
  dbase = jnp.zeros(base.shape, jnp.float32).at[part].set(dbase.sum(0)).astype(base.dtype)  # The sum is over devices.
  return dx, dbase, jnp.pad(ddynamic, [(0, 0), (0, 0), (part * each, (parts - 1 - part) * each)]), grad if added else None


_convolve.defvjp(_forward, _backward)
