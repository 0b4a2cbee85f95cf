"""Which drafts stand, and the one token after them: speculative sampling draft by draft (rule "token", arXiv 2211.17192,
2302.01318), or over the block as a whole (rule "block", arXiv 2403.10444), which keeps as many drafts or more on average.

Nothing here knows of models, drafters or schedules: probabilities, drafts and keys in, a verdict out.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.sampling import Role, draw, malformed, sound
from specdec_jax.typing import Bool, Float, Int, Key

RULES = ("token", "block")


@flax.struct.dataclass
class SparseDistribution:
  """A distribution with at most C nonzero entries: ids, probs [B,L,C]. Masses of equal ids add."""

  ids: Int["B L C"]
  probs: Float["B L C"]

  def at(self, tokens: Int["B L"]) -> Float["B L"]:
    """The probability of one token a row."""
    return jnp.sum(jnp.where(self.ids == tokens[..., None], self.probs, 0.0), -1)

  def overlap(self, p: Float["B L V"]) -> Float["B L"]:
    """Σ_v min(p, q) of every row, for any nonnegative p."""
    same = self.ids[..., :, None] == self.ids[..., None, :]
    mass = jnp.sum(jnp.where(same, self.probs[..., None, :], 0.0), -1)  # Of an id, every time that it occurs.
    return jnp.sum(jnp.minimum(_gather(p, self.ids), mass) / same.sum(-1), -1)

  def row(self, index: Int["B"], vocab: int) -> Float["B V"]:
    """Row `index` of every request, dense."""
    rows = jnp.arange(self.ids.shape[0])
    out = jnp.zeros((self.ids.shape[0], vocab), jnp.float32)
    ids = self.ids[rows, index]
    return out.at[rows[:, None], jnp.where(ids < 0, vocab, ids)].add(self.probs[rows, index], mode="drop")


@flax.struct.dataclass
class Verdict:
  """accepted [B]: drafts that stand; next_token [B]: the recovered or bonus token that follows them, -1 where the target
  gave no distribution for it."""

  accepted: Int["B"]
  next_token: Int["B"]


def accept(
    p: Float["B L V"], q: Float["B L V"] | SparseDistribution, drafts: Int["B L"], lengths: Int["B"], keys: Key["B L"],
    rule: str = "token",
) -> Verdict:
  """The drafts that stand and the token after them, distributed exactly as the target's own samples.

  p [B,L+1,V]: row k judges draft k, row L follows all of them; q: what each draft was really drawn from; lengths [B]:
  how many of the drafts were verified; keys [B,L+1]: one an output position, roles are folded in here (under "block" keys that
  no other round shares: `Sampling.round_keys`). The block ends before a draft that is none (a placeholder, -1), before a q that
  is no distribution, and at a p that is none.
  Raises ValueError for shapes that do not fit or an unknown rule.
  """
  if rule not in RULES:
    raise ValueError(f"unknown acceptance rule {rule!r}; exact rules: {', '.join(RULES)}")
  p, drafts, lengths = jnp.asarray(p, jnp.float32), jnp.asarray(drafts), jnp.asarray(lengths)
  q = jax.tree.map(jnp.asarray, q)
  for name, x, kind in (("drafts", drafts, jnp.integer), ("lengths", lengths, jnp.integer), ("keys", keys, jax.dtypes.prng_key)):
    if not jnp.issubdtype(x.dtype, kind):
      raise ValueError(f"{name} must be of type {kind.__name__}, not {x.dtype}")
  if drafts.ndim != 2:
    raise ValueError(f"drafts must be [B,L], not {drafts.shape}")
  batch, width = drafts.shape
  if p.ndim != 3 or p.shape[:2] != (batch, width + 1) or keys.shape != (batch, width + 1) or lengths.shape != (batch,):
    raise ValueError(
        f"drafts [B,L] = {drafts.shape} need p [B,L+1,V] (got {p.shape}), keys [B,L+1] ({keys.shape}) and lengths [B] ({lengths.shape})")
  if (q.ids if isinstance(q, SparseDistribution) else q).shape[:2] != drafts.shape:
    raise ValueError(f"drafts [B,L] = {drafts.shape} need q of as many rows, not {jax.tree.map(jnp.shape, q)}")
  vocab = p.shape[-1]
  if isinstance(q, SparseDistribution):
    if q.ids.ndim != 3 or q.ids.shape != q.probs.shape:
      raise ValueError(f"a sparse q needs ids and probs of one shape [B,L,C], not {q.ids.shape} and {q.probs.shape}")
    q = SparseDistribution(q.ids, q.probs.astype(jnp.float32))
  elif q.ndim != 3:
    raise ValueError(f"q must be [B,L,V] or sparse, not {q.shape}")
  else:  # Padded to different vocabularies: what only q has is drafted and always rejected.
    wider = lambda x, size: jnp.pad(x, ((0, 0), (0, 0), (0, max(size - x.shape[-1], 0))))
    p, q = wider(p, q.shape[-1]), wider(q.astype(jnp.float32), vocab)
  if width:
    drawn = (drafts < vocab) | ((q.at(drafts) if isinstance(q, SparseDistribution) else _at(q, drafts)) > 0)
    lengths = usable_lengths(drafts, lengths, drawn & sound(p[:, :-1]) & sound_rows(q))
    roles = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, Role.ACCEPT)))(keys[:, :width])
    uniforms = jax.vmap(jax.vmap(jax.random.uniform))(roles)
    if rule == "block":
      accepted, scale = accepted_block(p, q, drafts, lengths, uniforms)
    else:
      accepted, scale = accepted_prefix(p, q, drafts, lengths, uniforms), 1.0
  else:
    accepted, scale, lengths = jnp.zeros((batch,), jnp.int32), 1.0, jnp.zeros_like(lengths)
  key = jnp.take_along_axis(keys, accepted[:, None], 1)[:, 0]
  role = jnp.where(accepted < lengths, Role.RECOVER, Role.BONUS)
  return Verdict(accepted, draw(key, next_distribution(p, q, accepted, lengths, scale), role))


def match(best: Int["B L"], drafts: Int["B L"], lengths: Int["B"]) -> Verdict:
  """`accept` where p is one-hot throughout, at the tokens best [B,L+1] (-1: none): drafts stand while they are those. No noise."""
  keep = (drafts == best[:, :-1]) & (drafts >= 0) & (jnp.arange(drafts.shape[1]) < lengths[:, None])
  accepted = jnp.cumprod(keep, 1, dtype=jnp.int32).sum(1)
  return Verdict(accepted, jnp.take_along_axis(best, accepted[:, None], 1)[:, 0])


def usable_lengths(drafts: Int["B L"], lengths: Int["B"], usable: Bool["B L"]) -> Int["B"]:
  """`lengths`, cut before the first draft that is a placeholder (-1) or not `usable`, which must not depend on what it is."""
  real = (drafts >= 0) & (jnp.arange(drafts.shape[1]) < lengths[:, None]) & usable
  return jnp.cumprod(real, 1, dtype=jnp.int32).sum(1)


def sound_rows(q: Float["B L V"] | SparseDistribution) -> Bool["B L"]:
  """Which rows of q are distributions."""
  return sound(q.probs if isinstance(q, SparseDistribution) else q)


def malformed_rows(q: Float["B L V"] | SparseDistribution) -> Bool["B L"]:
  """Which rows of q hold what is no probability; a row of zeros, where nothing could be drafted, does not."""
  return malformed(q.probs if isinstance(q, SparseDistribution) else q)


def _gather(p: Float["B L V"], ids: Int["B L C"]) -> Float["B L C"]:
  """Entries of p, 0 for ids that it does not have."""
  return jnp.take_along_axis(p, jnp.where(ids < 0, p.shape[-1], ids), -1, mode="fill", fill_value=0)


def _at(p: Float["B L V"], tokens: Int["B L"]) -> Float["B L"]:
  return _gather(p, tokens[..., None])[..., 0]


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


def accepted_block(p, q, drafts: Int["B L"], lengths: Int["B"], uniforms: Float["B L"]) -> tuple[Int["B"], Float["B"]]:
  """How many leading drafts stand by the block rule, and the `next_distribution` scale: the largest count whose own uniform
  number is below its probability."""
  stand, scales = block_acceptance(p, q, drafts, lengths)
  counts = jnp.arange(1, drafts.shape[1] + 1)
  accepted = jnp.max(jnp.where((uniforms < stand) & (counts <= lengths[:, None]), counts, 0), 1)
  return accepted, jnp.take_along_axis(scales, accepted[:, None], 1)[:, 0]


def block_acceptance(p, q, drafts: Int["B L"], lengths: Int["B"]) -> tuple[Float["B L"], Float["B L"]]:
  """(h [B,L], P [B,L+1]) of the block rule (arXiv 2403.10444, Alg. 2): h_i, the probability that i drafts stand given that no
  more do, and P_i = min(1, P_{i−1} · p_i/q_i), P_0 = 1, what of the target's mass the first i drafts carry.

  With s_i = Σ_v max(P_i · p_{i+1} − q_{i+1}, 0): h_i = s_i/(s_i + 1 − P_i) before the last verified draft, and P_i at it.
  """
  def step(carried, now):
    target, proposed = now
    ratio = jnp.where(proposed > 0, carried * target / jnp.where(proposed > 0, proposed, 1.0), (target > 0) & (proposed == 0))
    carried = jnp.minimum(ratio, 1.0)
    return carried, carried

  proposed = q.at(drafts) if isinstance(q, SparseDistribution) else _at(q, drafts)
  first = jnp.ones(lengths.shape)
  _, scales = jax.lax.scan(step, first, (_at(p[:, :-1], drafts).T, proposed.T))
  scales = scales.T  # P_1 … P_L
  scaled = scales[:, :-1, None] * p[:, 1:-1]
  later = jax.tree.map(lambda x: x[:, 1:], q)
  overlap = later.overlap(scaled) if isinstance(q, SparseDistribution) else jnp.minimum(scaled, later).sum(-1)
  spare = jnp.pad(jnp.maximum(scaled.sum(-1) - overlap, 0.0), ((0, 0), (0, 1)))
  inner = jnp.where(scales >= 1, 1.0, spare / jnp.maximum(spare + 1 - scales, 1e-30))
  last = jnp.arange(1, drafts.shape[1] + 1) == lengths[:, None]
  return jnp.where(last, scales, inner), jnp.concatenate([first[:, None], scales], 1)


def next_distribution(p, q, accepted: Int["B"], lengths: Int["B"], scale: Float["B"] | float = 1.0) -> Float["B V"]:
  """norm(max(scale · p − q, 0)) at the first rejected draft; p itself behind the last verified one, or where no mass is left."""
  pick = lambda x: jnp.take_along_axis(x, accepted[:, None, None], 1)[:, 0]
  row = pick(p)
  if not _width(q):
    return row
  at = jnp.minimum(accepted, _width(q) - 1)
  proposed = q.row(at, row.shape[-1]) if isinstance(q, SparseDistribution) else jnp.take_along_axis(q, at[:, None, None], 1)[:, 0]
  residual = jnp.maximum(jnp.broadcast_to(scale, lengths.shape)[:, None] * row - proposed, 0.0)
  mass = residual.sum(-1, keepdims=True)
  use = (accepted < lengths)[:, None] & (mass > 1e-8)
  return jnp.where(use, residual / jnp.where(use, mass, 1.0), row)


def _width(q) -> int:
  return (q.ids if isinstance(q, SparseDistribution) else q).shape[1]
