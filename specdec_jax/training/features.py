"""A drafter's training inputs from a frozen target, computed inside the training step: nothing V-wide is kept."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specdec_jax.models.decoder import Decoder, packed_view
from specdec_jax.typing import Float, Int


def target_features(
    decoder: Decoder, params, tokens: Int["B S"], segments: Int["B S"], taps: Sequence[int],
) -> tuple[Float["B S M D"], Float["B S D"], Int["B S"]]:
  """Taps, final-normed hidden states and positions of packed rows; no gradient reaches the target."""
  hidden, tapped, _ = decoder.apply({"params": params}, tokens, segments=segments, taps=tuple(taps))
  return jax.lax.stop_gradient(tapped), jax.lax.stop_gradient(hidden), packed_view(tokens, segments)[0]


def target_rows(hidden: Float["B S D"], index: Int["B A L"]) -> Float["B A L D"]:
  """The target's final-normed hidden states at chosen rows."""
  flat = index.reshape(index.shape[0], -1)
  return jnp.take_along_axis(hidden, flat[..., None], 1).reshape(*index.shape, -1)

