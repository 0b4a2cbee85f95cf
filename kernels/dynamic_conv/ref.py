"""The meaning of `dynamic_conv`."""

import jax.numpy as jnp

from specdec_jax.typing import Float


def dynamic_conv(*, x: Float["... T D"], base: Float["taps D"], dynamic: Float["... T taps D/group"], slots: int, part: int | None = None,
                 residual: Float["... T D"] | None = None) -> Float["... T D"]:
  """out_t = Σ_o (base_o + dynamic_{t,o} of the channel's group) ⊙ x_{t−o}, x before its block of `slots` tokens being 0; in float32."""
  if part is not None:
    base, dynamic = base[part], dynamic[..., part, :, :]
  (taps, width), groups = base.shape, dynamic.shape[-1]
  blocks = x.astype(jnp.float32).reshape(*x.shape[:-2], -1, slots, groups, width // groups)
  dynamic = dynamic.astype(jnp.float32).reshape(*blocks.shape[:-2], taps, groups, 1)
  base = base.astype(jnp.float32).reshape(taps, groups, -1)
  before = lambda o: jnp.pad(blocks, [(0, 0)] * (blocks.ndim - 3) + [(o, 0), (0, 0), (0, 0)])[..., :slots, :, :]
  out = sum((base[o] + dynamic[..., o, :, :]) * before(o) for o in range(taps)).reshape(x.shape)
  return (out if residual is None else residual.astype(jnp.float32) + out).astype(x.dtype)
