"""How many drafts of each request are verified. Pure functions; whether draft k is verified may depend on drafts before
it and on older rounds, never on draft k itself or later ones (DSpark §5.2)."""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax.typing import Float, Int

Schedule = Callable[[Float["B L"]], Int["B"]]  # conditional confidence, probabilities → lengths


def by_threshold(confidence: Float["B L"], threshold: float) -> Int["B"]:
  """The longest prefix whose survival, the product of its confidences, stays at or above `threshold`."""
  return (jnp.cumprod(confidence, -1) >= threshold).sum(-1).astype(jnp.int32)
