"""The optimizer of every training run here."""

import optax


def adamw(
    learning_rate: float, steps: int, warmup_share: float = 0.04, final_share: float = 0.0, clip: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW with a clipped global norm, linear warm-up over int(warmup_share · steps) steps and a cosine to final_share."""
  warmup = int(warmup_share * steps)
  schedule = optax.schedules.join_schedules(
      [optax.schedules.linear_schedule(0.0, learning_rate, warmup),
       optax.schedules.cosine_decay_schedule(learning_rate, max(steps - warmup, 1), final_share)], [warmup])
  return optax.chain(
      optax.clip_by_global_norm(clip),
      optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=1e-8, weight_decay=weight_decay))
