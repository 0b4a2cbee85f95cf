"""What the path walk is: through the candidates of a block, each scored after the one that was taken before it (DFlash 2).

The kernels share everything but the walk itself (`folded`, `outcome`): they differ from `path_walk` in nothing but `walk`.
"""

import jax
import jax.numpy as jnp

from specdec_jax.sampling import GREEDY_BELOW, sound
from specdec_jax.typing import Float, Int


def rows(table: Float["V R"], ids: Int["B L"]) -> Float["B L R"]:
  """Rows of a codebook; an id outside the vocabulary takes the nearest row."""
  return jnp.take(table, ids, axis=0, mode="clip")


def folded(unary: Float["B L C"], temperature: Float["B"] | None, noise: Float["B L C"] | None) -> tuple[Float["B L C"], Float["B"] | None]:
  """(bias, scale): the choice among scores S = unary + pair is the argmax of bias + pair / scale, where scale None is 1.

  Sampled, that is S / temperature + noise less a constant of the slot, near 0 at the best candidate so that the noise keeps its bits;
  for a greedy row it is S, bit for bit, so that ties stay ties."""
  if temperature is None:
    return unary, None
  cold = temperature < GREEDY_BELOW
  scale, cold = jnp.where(cold, 1.0, temperature), cold[:, None, None]
  shift = jnp.where(jnp.isfinite(unary), unary, -jnp.inf).max(-1, keepdims=True)
  shift = jnp.where(cold | ~jnp.isfinite(shift), 0.0, shift)
  return (unary - shift) / scale[:, None, None] + jnp.where(cold, 0.0, noise), scale


def walk(bias, scale, anchor, ids, gate, predecessor, successor) -> tuple[Int["B L"], Float["B L C"]]:
  """(index of the candidate taken, pair scores of the taken rows); what cannot be compared, NaN and +inf, is not taken."""
  def slot(previous, inputs):
    bias, gate, ids = inputs
    pair = jnp.einsum("br,bcr->bc", rows(predecessor, previous) * gate, rows(successor, ids), preferred_element_type=jnp.float32)
    x = bias + (pair if scale is None else pair / scale[:, None])
    index = jnp.argmax(jnp.where(x < jnp.inf, x, -jnp.inf), -1).astype(jnp.int32)
    return jnp.take_along_axis(ids, index[:, None], 1)[:, 0], (index, pair)

  _, taken = jax.lax.scan(slot, anchor, tuple(x.swapaxes(0, 1) for x in (bias, gate, ids)))
  return tuple(x.swapaxes(0, 1) for x in taken)


def outcome(index, pair, unary, temperature, scale) -> tuple[Int["B L"], Float["B L C"], Float["B L C"]]:
  """(index, scores, q) of a finished walk; -1 where a row of scores is no distribution."""
  scores = unary + pair
  best = scores.max(-1, keepdims=True)
  q = jnp.ones_like(best)
  if scale is not None:
    taken = index[..., None] == jnp.arange(unary.shape[-1])
    q = jnp.where((temperature < GREEDY_BELOW)[:, None, None], taken, jax.nn.softmax(scores / scale[:, None, None], -1))
  q = jnp.where(jnp.isfinite(best), q, jnp.where(best == -jnp.inf, 0.0, jnp.nan))
  return jnp.where(sound(q), index, -1), scores, q


def path_walk(*, anchor, ids, unary, gate, predecessor, successor, temperature=None, noise=None):
  """See `api.path_walk`."""
  bias, scale = folded(unary, temperature, noise)
  index, pair = walk(bias, scale, anchor, ids, gate, predecessor, successor)
  return outcome(index, pair, unary, temperature, scale)
