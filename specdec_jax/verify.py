"""Which drafts stand, and the one token after them: speculative sampling (arXiv 2211.17192, 2302.01318).

Nothing here knows of models, drafters or schedules: probabilities, drafts and keys in, a verdict out.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.sampling import Role, draw
from specdec_jax.typing import Float, Int, Key

RULES = ("token",)


@flax.struct.dataclass
class SparseDistribution:
  """A distribution with at most C nonzero entries: ids, probs [B,L,C]. Masses of equal ids add."""

  ids: Int["B L C"]
  probs: Float["B L C"]

  def at(self, tokens: Int["B L"]) -> Float["B L"]:
    """The probability of one token a row."""
    return jnp.sum(jnp.where(self.ids == tokens[..., None], self.probs, 0.0), -1)

  def row(self, index: Int["B"], vocab: int) -> Float["B V"]:
    """Row `index` of every request, dense."""
    rows = jnp.arange(self.ids.shape[0])
    out = jnp.zeros((self.ids.shape[0], vocab), jnp.float32)
    return out.at[rows[:, None], self.ids[rows, index]].add(self.probs[rows, index])


@flax.struct.dataclass
class Verdict:
  """accepted [B]: drafts that stand; next_token [B]: the recovered or bonus token that follows them."""

  accepted: Int["B"]
  next_token: Int["B"]


def accept(
    p: Float["B L V"], q: Float["B L V"] | SparseDistribution, drafts: Int["B L"], lengths: Int["B"], keys: Key["B L"],
    rule: str = "token",
) -> Verdict:
  """The drafts that stand and the token after them, distributed exactly as the target's own samples.

  p [B,L+1,V]: row k judges draft k, row L follows all of them; q: what each draft was really drawn from; lengths [B]:
  how many of the drafts were verified; keys [B,L+1]: one an output position, roles are folded in here. A draft outside
  the vocabulary (a placeholder, -1) ends the block. Raises ValueError for shapes that do not fit or an unknown rule.
  """
  if rule not in RULES:
    raise ValueError(f"unknown acceptance rule {rule!r}; exact rules: {', '.join(RULES)}")
  batch, width = drafts.shape
  if p.ndim != 3 or p.shape[:2] != (batch, width + 1) or keys.shape != (batch, width + 1) or lengths.shape != (batch,):
    raise ValueError(
        f"drafts [B,L] = {drafts.shape} need p [B,L+1,V] (got {p.shape}), keys [B,L+1] ({keys.shape}) and lengths [B] ({lengths.shape})")
  if (q.ids if isinstance(q, SparseDistribution) else q).shape[:2] != drafts.shape:
    raise ValueError(f"drafts [B,L] = {drafts.shape} need q of as many rows, not {jax.tree.map(jnp.shape, q)}")
  if not isinstance(q, SparseDistribution) and q.shape[-1] != p.shape[-1]:  # Padded to different vocabularies.
    q = jnp.pad(q, ((0, 0), (0, 0), (0, max(p.shape[-1] - q.shape[-1], 0))))[..., : p.shape[-1]]
  lengths = usable_lengths(drafts, lengths, p.shape[-1])
  if width:
    roles = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, Role.ACCEPT)))(keys[:, :width])
    accepted = accepted_prefix(p, q, drafts, lengths, jax.vmap(jax.vmap(jax.random.uniform))(roles))
  else:
    accepted = jnp.zeros((batch,), jnp.int32)
  key = jnp.take_along_axis(keys, accepted[:, None], 1)[:, 0]
  role = jnp.where(accepted < lengths, Role.RECOVER, Role.BONUS)
  return Verdict(accepted, draw(key, next_distribution(p, q, accepted, lengths), role))


def usable_lengths(drafts: Int["B L"], lengths: Int["B"], vocab: int) -> Int["B"]:
  """`lengths`, cut before the first draft that is no token."""
  real = (drafts >= 0) & (drafts < vocab) & (jnp.arange(drafts.shape[1]) < lengths[:, None])
  return jnp.cumprod(real, 1, dtype=jnp.int32).sum(1)


def _at(p: Float["B L V"], tokens: Int["B L"]) -> Float["B L"]:
  return jnp.take_along_axis(p, jnp.clip(tokens, 0)[..., None], -1)[..., 0]


def acceptance(p, q, drafts: Int["B L"]) -> Float["B L"]:
  """min(1, p_k/q_k), the probability that draft k stands given that all before it do (Leviathan et al., Alg. 1).

  A draft that q could not give stands if p gives it at all; one that p does not give, or whose q is no number,
  never stands.
  """
  target = _at(p[:, :-1], drafts)
  proposed = q.at(drafts) if isinstance(q, SparseDistribution) else _at(q, drafts)
  return jnp.where(proposed > target, target / jnp.where(proposed > 0, proposed, 1.0), (target > 0) & (proposed >= 0))


def accepted_prefix(p, q, drafts: Int["B L"], lengths: Int["B"], uniforms: Float["B L"]) -> Int["B"]:
  """How many leading drafts stand, given one uniform number in [0, 1) for each."""
  keep = (uniforms < acceptance(p, q, drafts)) & (jnp.arange(drafts.shape[1]) < lengths[:, None])
  return jnp.cumprod(keep, 1, dtype=jnp.int32).sum(1)


def next_distribution(p, q, accepted: Int["B"], lengths: Int["B"]) -> Float["B V"]:
  """norm(max(p − q, 0)) at the first rejected draft; p itself behind the last verified one, or where no mass is left."""
  pick = lambda x: jnp.take_along_axis(x, accepted[:, None, None], 1)[:, 0]
  row = pick(p)
  if not _width(q):
    return row
  at = jnp.minimum(accepted, _width(q) - 1)
  proposed = q.row(at, row.shape[-1]) if isinstance(q, SparseDistribution) else jnp.take_along_axis(q, at[:, None, None], 1)[:, 0]
  residual = jnp.maximum(row - proposed, 0.0)
  mass = residual.sum(-1, keepdims=True)
  use = (accepted < lengths)[:, None] & (mass > 1e-8)
  return jnp.where(use, residual / jnp.where(use, mass, 1.0), row)


def _width(q) -> int:
  return (q.ids if isinstance(q, SparseDistribution) else q).shape[1]
