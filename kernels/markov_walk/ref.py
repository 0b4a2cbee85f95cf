"""The meaning of markov_walk (DSpark §3.1): p_k(v) ∝ exp(U_k(v) + ⟨features(x_{<k}), W₂[v]⟩), one slot after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.sampling import GREEDY_BELOW
from specdec_jax.typing import Float, Int, Key


class Walk(NamedTuple):
  """drafts [B,L]; best, lse [B,L]: each slot's largest logit and the log-sum-exp of its logits. Where a temperature was given: scaled
  [B,L,V], logits over temperature, and norm [B,L], their log-sum-exp (log q = scaled − norm); else None. A row with NaN or +∞ has NaN
  for best, lse and norm; it and one whose ids are all at −∞ give the token -1."""

  drafts: Int["B L"]
  best: Float["B L"]
  lse: Float["B L"]
  scaled: Float["B L V"] | None
  norm: Float["B L"] | None


def step(
    kind: str, state: Float["B R"], embedded: Float["B R"], projected: Float["B R"] | None, weights,
) -> tuple[Float["B R"], Float["B R"]]:
  """One slot of the head in float32: (next state, features); `projected` and `weights` as in `markov_walk`."""
  embedded = embedded.astype(jnp.float32)
  if kind == "markov":
    return state, embedded
  row = embedded if kind == "gated" else jnp.concatenate([state, embedded], -1)
  z = projected + jnp.dot(row.astype(weights.dtype), weights, preferred_element_type=jnp.float32, precision=precision(weights))
  if kind == "gated":
    return state, embedded * jax.nn.sigmoid(z)
  keep, new, out = jnp.split(z, 3, -1)
  keep = jax.nn.sigmoid(keep)
  return keep * state + (1 - keep) * jnp.tanh(new), jnp.tanh(out)


def precision(x):
  """Float32 operands are multiplied as such, on TPUs too."""
  return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def product(features: Float["B R"], table: Float["V R"]) -> Float["B V"]:
  """features · tableᵀ, summed in float32."""
  return jax.lax.dot_general(features, table, (((1,), (1,)), ((), ())), precision=precision(table), preferred_element_type=jnp.float32)


def markov_walk(
    *, anchor: Int["B"], previous: Float["V R"], table: Float["V R"], base: Float["B L V"], projected: Float["B L R"] | None = None,
    weights: Float["R R"] | None = None, temperature: Float["B"] | None = None, keys: Key["B L"] | None = None, kind: str = "markov",
) -> Walk:
  """See `specdec_jax.kernels.markov_walk.api.markov_walk`."""
  def slot(carry, inputs):
    token, state = carry
    u, h, key = inputs
    state, features = step(kind, state, jnp.take(previous, token, axis=0, mode="clip"), h, weights)
    logits = u + product(features.astype(table.dtype), table)
    best, lse = extremes(logits)
    score, scaled, norm = logits, None, None
    if temperature is not None:
      cold = temperature < GREEDY_BELOW
      scaled = logits / jnp.where(cold, 1.0, temperature)[:, None]
      norm = extremes(scaled)[1]
      noise = jax.vmap(lambda k: jax.random.gumbel(k, scaled.shape[1:]))(key)
      score = jnp.where(cold[:, None], logits, scaled + noise)
    token = jnp.where(jnp.isfinite(best), jnp.argmax(score, -1).astype(jnp.int32), -1)
    return (token, state), Walk(token, best, lse, scaled, norm)

  first = (anchor, jnp.zeros((anchor.shape[0], previous.shape[1])))
  _, walk = jax.lax.scan(slot, first, jax.tree.map(lambda x: x.swapaxes(0, 1), (base, projected, keys)))
  return jax.tree.map(lambda x: x.swapaxes(0, 1), walk)


def extremes(logits: Float["B V"]) -> tuple[Float["B"], Float["B"]]:
  """The largest logit and the log-sum-exp of a row; both NaN where one is NaN or +∞, both −∞ where all are."""
  best = logits.max(-1)  # XLA's wide maximum on CPU loses NaN, its sum does not.
  total = jnp.exp(logits - jnp.where(best == -jnp.inf, 0.0, best)[:, None]).sum(-1)
  best = jnp.where(jnp.isnan(total), jnp.nan, best)
  return best, best + jnp.log(total)
