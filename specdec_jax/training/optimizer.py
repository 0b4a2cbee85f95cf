"""The optimizer of every training run here."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def learning_rate(peak: float, steps: int, warmup_share: float = 0.04, final_share: float = 0.0) -> Callable:
  """The rate of update s, from 0: peak·(s+1)/W for the first W = int(warmup_share · steps), then a cosine from the peak to
  final_share · peak (RELEASED_FORMATS §3)."""
  warmup = int(warmup_share * steps)

  def at(step):
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * (step - warmup) / max(steps - warmup, 1)))
    return peak * jnp.where(step < warmup, (step + 1) / max(warmup, 1), final_share + (1 - final_share) * cosine)

  return at


def adamw(
    schedule: Callable, clip: float = 1.0, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW in float32 behind a global norm, clipped in the gradients' own dtype (as DeepSpec does). Give it float32
  parameters: they are the master weights, and a model that runs in bfloat16 casts them inside its loss."""

  def clipped(grads, _):
    whole = lambda x: jnp.linalg.norm(x.astype(jnp.float32)).astype(x.dtype)  # Summed in float32: bfloat16 sums would be off by a step.
    norm = whole(jnp.stack([whole(g) for g in jax.tree.leaves(grads)]))
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * scale.astype(g.dtype)).astype(jnp.float32), grads)

  return optax.chain(
      optax.stateless(clipped), optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=1e-8, weight_decay=weight_decay))
