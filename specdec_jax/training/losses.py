"""Losses, in float32, as sums over counted terms divided last."""

import dataclasses
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from specdec_jax.drafters.base import DraftOutputs
from specdec_jax.drafters.serial import SerialBatch
from specdec_jax.models.decoder import Decoder
from specdec_jax.models.layers import project_vocab, soft_capped
from specdec_jax.sharding import AXES, BATCH
from specdec_jax.training.anchors import Labels
from specdec_jax.typing import Bool, Float, Int


def next_token_loss(decoder: Decoder, prompt_weight: float, params, batch, key, constants) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Cross-entropy in nats a token of packed rows; question tokens weigh `prompt_weight`, answer tokens 1.

  batch: tokens, segments, answer, all [B,T] (`specdec_jax.data.packing.Rows`).
  """
  del key, constants
  tokens, segments = batch["tokens"], batch["segments"]
  hidden, _, _ = decoder.apply({"params": params}, tokens, segments=segments)
  logits = decoder.apply({"params": params}, hidden[:, :-1], method="logits")
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
  answers = inside & batch["answer"][:, 1:]
  weights = jnp.where(answers, 1.0, prompt_weight * inside)
  total = jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
  return total, {
      "answer_loss": jnp.sum(losses * answers) / jnp.maximum(answers.sum(), 1), "sum": jnp.sum(losses * answers), "count": answers.sum()}


@dataclasses.dataclass(frozen=True)
class BlockLoss:
  """Weights of a drafter's loss: L = ce·CE + tv·TV + confidence·BCE + selector·CE over the candidates, slots weighted
  exp(−k/decay) (DSpark eq. 9–12; DFlash 2). decay: None for equal weights. TV is the whole L1 distance, not its half, as
  published."""

  ce: float = 0.1
  tv: float = 0.9
  confidence: float = 1.0
  selector: float = 1.0
  decay: float | None = 4.0


@flax.struct.dataclass
class VocabTerms:
  """What a loss needs of two V-wide distributions without keeping them. nll: −log q of the label; cross: −Σ p log q;
  l1: ‖q − p‖₁;   draft_lse, target_lse: log normalisers; ids: the draft's best tokens, best
  first (none were asked for: empty); target_best: the target's best."""

  nll: Float["N"]
  cross: Float["N"]
  l1: Float["N"]
  draft_lse: Float["N"]
  target_lse: Float["N"]
  ids: Int["N C"]
  target_best: Int["N"]


def vocab_terms(
    rows: Float["N D"], table: Float["V D"], target_rows: Float["N D"], target_table: Float["V D"], labels: Int["N"], best: int = 0,
    chunk: int = 4096, whole_lse: Float["N"] | None = None, cap: float | None = None, target_cap: float | None = None,
) -> VocabTerms:
  """The terms of q = softmax(`capped_logits` of rows) and p, that of target_rows, float32, over `chunk` vocabulary
  entries at a time, recomputed for the gradient: memory does not grow with the vocabulary. No gradient reaches p.

  whole_lse: where the tables hold a part of the vocabulary only, the target's log normaliser over all of it; `l1` is then
  the distance to the whole p, of which q covers a part, while `cross` keeps the part's own p. cap, target_cap: of q's logits and of
  p's, or None.

  On a mesh every device of the tensor axis keeps its part of the tables and computes over it; one number a row and term, and the
  best tokens, are exchanged."""
  mesh = jax.sharding.get_abstract_mesh()
  inputs = rows, table, jax.lax.stop_gradient(target_rows), jax.lax.stop_gradient(target_table), labels, whole_lse
  terms = functools.partial(_terms, best=best, chunk=chunk, cap=cap, target_cap=target_cap)
  if mesh.empty:
    return terms(*inputs, parts=1)
  run = functools.partial(terms, parts=mesh.shape["tensor"], mesh_axes=AXES)
  by_row, by_id = P(BATCH), P("tensor")
  return jax.shard_map(run, in_specs=(by_row, by_id, by_row, by_id, by_row, by_row), out_specs=by_row)(*inputs)


def _terms(
    rows, table, target_rows, target_table, labels, whole_lse, best: int, chunk: int, cap, target_cap, parts: int,
    mesh_axes: Sequence[str] = (),
) -> VocabTerms:
  """`vocab_terms` on one of `parts` devices that hold the vocabulary together, inside a `shard_map` over `mesh_axes`, if any."""
  size, chunk = table.shape[0], min(chunk, table.shape[0])
  count, width = -(-size // chunk), target_rows.shape[-1]
  part = jax.lax.axis_index("tensor") if mesh_axes else 0
  everywhere = lambda x: jax.lax.pcast(x, tuple(mesh_axes), to="varying") if mesh_axes else x
  total = lambda x: jax.lax.psum(x, "tensor") if mesh_axes else x
  most = lambda x: jax.lax.pmax(jax.lax.stop_gradient(x), "tensor") if mesh_axes else x
  pad = lambda t: jnp.pad(t, ((0, count * chunk - size), (0, 0))).reshape(count, chunk, -1)
  tables = pad(table), pad(target_table), jnp.arange(count * chunk).reshape(count, chunk)
  logits = lambda x, t, index, cap: jnp.where(index < size, capped_logits(project_vocab, x, t, width, cap), -jnp.inf)

  def over_chunks(step, carry):
    if count == 1:  # Nothing to save by recomputing.
      return step(carry, jax.tree.map(lambda x: x[0], tables))
    return jax.lax.scan(lambda c, part: (jax.checkpoint(step)(c, part), None), carry, tables)[0]

  def normalise(carry, part):
    draft, target, values, ids, top, top_id = carry
    mine, theirs, index = part
    u, t = logits(rows, mine, index, cap), logits(target_rows, theirs, index, target_cap)
    draft, target = (jnp.logaddexp(x, jax.nn.logsumexp(y, -1)) for x, y in ((draft, u), (target, t)))
    top_id = jnp.where(t.max(-1) > top, index[jnp.argmax(t, -1)], top_id)
    top = jnp.maximum(top, t.max(-1))
    if best:
      values = jnp.concatenate([values, jax.lax.stop_gradient(u)], -1)
      ids = jnp.concatenate([ids, jnp.broadcast_to(index, u.shape)], -1)
      values, order = _best(values, best)
      ids = jnp.take_along_axis(ids, order, -1)
    return draft, target, values, ids, top, top_id

  def together(lse):
    """The log normaliser over all parts."""
    if not mesh_axes:
      return lse
    top = most(lse)
    return top + jnp.log(total(jnp.exp(lse - top)))

  none = everywhere(jnp.full(rows.shape[:1], -jnp.inf))
  no_ids = everywhere(jnp.zeros((len(rows), best), jnp.int32))
  first = (none, none, everywhere(jnp.full((len(rows), best), -jnp.inf)), no_ids, none, everywhere(jnp.zeros(rows.shape[:1], jnp.int32)))
  draft, target, values, ids, top, target_best = over_chunks(normalise, first)
  draft, target, ids, target_best = together(draft), together(target), ids + part * size, target_best + part * size
  if mesh_axes:
    gathered = lambda x: total(jnp.where(jnp.arange(parts)[:, None, None] == part, x, 0)).swapaxes(0, 1).reshape(len(rows), parts * best)
    ids = jnp.take_along_axis(gathered(ids), _best(gathered(values), best)[1], -1)
    target_best = jax.lax.pmin(jnp.where(top == most(top), target_best, parts * size), "tensor")

  def compare(totals, part):
    mine, theirs, index = part
    logq = logits(rows, mine, index, cap) - draft[:, None]
    p = jnp.exp(logits(target_rows, theirs, index, target_cap) - target[:, None])
    cross, l1 = totals
    return cross - jnp.sum(p * jnp.where(index < size, logq, 0.0), -1), l1 + jnp.abs(jnp.exp(logq) - p * share[:, None]).sum(-1)

  share = jnp.exp(target - (target if whole_lse is None else whole_lse))
  nothing = everywhere(jnp.zeros(rows.shape[:1]))
  cross, l1 = over_chunks(compare, (nothing, jnp.where(part == 0, 1 - share, nothing)))
  mine = (labels >= part * size) & (labels < (part + 1) * size)
  label = capped_logits(rowwise, rows[:, None], table[jnp.clip(labels - part * size, 0, size - 1)][:, None], width, cap)[:, 0, 0]
  return VocabTerms(draft - total(jnp.where(mine, label, 0.0)), total(cross), total(l1), draft, target, ids, target_best)


def _best(values: Float["N V"], count: int) -> tuple[Float["N C"], Int["N C"]]:
  """The best entries of each row and where they stand; a single one without sorting, which TPUs compile and run slowly."""
  if count == 1:
    return values.max(-1, keepdims=True), jnp.argmax(values, -1, keepdims=True)
  return jax.lax.top_k(values, count)


def capped_logits(product, rows: Float["N D"], table: Float["V D"], width: int, cap: float | None) -> Float["N V"]:
  """Logits of rows, as their `product` with a table gives them. Where there is a cap (Gemma 4), the first `width` entries give what
  is soft-capped, and the rest the sequential head's bias, which is not."""
  if cap is None:
    return product(rows, table)
  logits = soft_capped(product(rows[..., :width], table[..., :width]), cap)
  return logits if rows.shape[-1] == width else logits + product(rows[..., width:], table[..., width:])


def rowwise(rows: Float["n L D"], tables: Float["n C D"]) -> Float["n L C"]:
  """Products of rows with tables of their own, in float32."""
  return jnp.matmul(rows, tables.swapaxes(-1, -2), preferred_element_type=jnp.float32)


def slot_weights(supervised: Bool["B A L"], decay: float | None) -> Float["B A L"]:
  """exp(−k/decay) on the supervised slots, k from 0."""
  k = jnp.arange(supervised.shape[-1])
  return supervised * (jnp.exp(-k / decay) if decay is not None else 1.0)


def block_loss(
    weights: BlockLoss, model, params, out: DraftOutputs, target_rows: Float["B A L D"], target_table: Float["V D"], labels: Labels,
    target_cap: float | None = None, soft: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of teacher-forced blocks and its metrics; each term is a weighted sum over a sum of weights.

  model: the drafter's functions, of which `table` and, with a selector, `select` are used; target_rows: final-normed
  hidden states of the target that predict the labels; target_table [V,D]: its head, whose logits `target_cap` caps. soft:
  cross-entropies are on the target's distribution, of which the true token, as published, is one draw.
  """
  shape = labels.tokens.shape
  w = slot_weights(labels.supervised, weights.decay)
  mean = lambda x, w=w: jnp.sum(x * w) / (jnp.sum(w) + 1e-6)
  flat = lambda x: x.reshape(-1, x.shape[-1])
  table, candidates, cap = model.table(params), model.config.candidates, model.config.model.logit_cap
  terms = vocab_terms(
      flat(out.rows), table, flat(target_rows), target_table, labels.tokens.reshape(-1), max(candidates, 1),
      cap=cap, target_cap=target_cap)
  terms = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), terms)
  ce, l1 = mean(terms.cross if soft else terms.nll), terms.l1
  total, metrics = weights.ce * ce, {"ce_loss": ce}
  drafted = terms.ids[..., 0]
  if candidates:
    unary = jnp.einsum("bale,balce->balc", out.rows, table[terms.ids], preferred_element_type=jnp.float32)
    scores = model.select(params, out, terms.ids, unary)
    at_target = soft_capped(
        jnp.einsum("bald,balcd->balc", target_rows, target_table[terms.ids], preferred_element_type=jnp.float32), target_cap)
    p = jnp.exp(at_target - terms.target_lse[..., None])
    l1 = sparse_l1(scores, p)
    match = terms.ids == labels.tokens[..., None]
    found = match.any(-1)
    share = p if soft else match.astype(scores.dtype)
    covered = share.sum(-1)
    nll = covered * jax.nn.logsumexp(scores, -1) - jnp.sum(share * scores, -1)
    selector = mean(nll / jnp.where(covered > 0, covered, 1.0), w * covered)
    total += weights.selector * selector
    supervised = jnp.maximum(labels.supervised.sum(), 1)
    metrics |= {"selector_loss": selector, "candidate_recall": (found & labels.supervised).sum() / supervised,
                **_greedy_metrics("base_", terms.ids[..., 0] == labels.tokens, labels.supervised)}
    drafted = jnp.take_along_axis(terms.ids, jnp.argmax(scores, -1)[..., None], -1)[..., 0]
  tv = mean(l1)
  total += weights.tv * tv
  accept = jax.lax.stop_gradient(jnp.clip(1 - 0.5 * l1, 0, 1))
  metrics |= {
      "l1_loss": tv, "loss_weight": w.sum(), "valid_tokens": labels.supervised.sum(), "valid_blocks": labels.supervised.any(-1).sum()}
  if out.confidence is not None:
    bce = mean(optax.sigmoid_binary_cross_entropy(out.confidence.astype(jnp.float32), accept))
    total += weights.confidence * bce
    metrics |= {"confidence_loss": bce, **_confidence_metrics(out.confidence, accept, labels.supervised, mean)}
  metrics |= _greedy_metrics("", drafted == labels.tokens, labels.supervised)
  return total, metrics | _acceptance_metrics(accept, labels.supervised)


def serial_loss(
    decay: float, model, params, out: DraftOutputs, batch: SerialBatch, supervised: Bool["B S"], target_hidden: Float["B S D"],
    target_table: Float["V D"], target_cap: float | None = None, soft: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Soft cross-entropy of training-time test, Σ_s decay^s · loss_s (Eagle3 §3), each over all B·S positions as DeepSpec
  counts them, or over the batch's B·A anchors. Step s of column i predicts the token at i+2+s; a column counts while column
  i+s is supervised. soft False: cross-entropy on that token instead, where the text has it and the drafter knows it."""
  size, steps = supervised.shape[1], out.hidden.shape[2]
  ahead = lambda x, s: jnp.pad(x[:, s:], ((0, 0), (0, min(s, size)), *((0, 0),) * (x.ndim - 2)))
  inner = supervised & (ahead(batch.segments, 1) == batch.segments)
  together = lambda s: ahead(inner, s) & (ahead(batch.segments, s) == batch.segments)
  stacked = lambda columns: jnp.stack([batch.pick(columns(s)) for s in range(steps)], 2)
  mask, target_rows = stacked(together), stacked(lambda s: ahead(target_hidden, 1 + s))
  flat = lambda x: x.reshape(-1, x.shape[-1])
  labels, whole = stacked(lambda s: ahead(batch.tokens, 2 + s)), None
  known = mask & stacked(lambda s: ahead(batch.segments, 2 + s) == batch.segments)
  if "draft_ids" in params:  # Trained on the target's distribution over the ids that can be drafted, measured on the whole.
    ids, rows = params["draft_ids"], flat(target_rows)
    whole = vocab_terms(rows, target_table, rows, target_table, labels.reshape(-1), cap=target_cap, target_cap=target_cap)
    target_table, true = target_table[ids], labels
    labels = jnp.searchsorted(ids, true).clip(max=len(ids) - 1)
    known &= ids[labels] == true
  terms = vocab_terms(
      flat(out.rows), model.table(params), flat(target_rows), target_table, labels.reshape(-1), 1,
      whole_lse=None if whole is None else whole.target_lse, target_cap=target_cap)
  if whole is not None:
    terms = terms.replace(ids=params["draft_ids"][terms.ids], target_best=whole.target_best)
  terms = jax.tree.map(lambda x: x.reshape(*mask.shape, *x.shape[1:]), terms)
  losses = jnp.sum(terms.cross * mask if soft else terms.nll * known, (0, 1)) / mask[..., 0].size
  per_step = lambda x: (x * mask).sum((0, 1)) / jnp.maximum(mask.sum((0, 1)), 1)
  alike, agrees = jnp.clip(1 - 0.5 * terms.l1, 0, 1), terms.ids[..., 0] == terms.target_best
  length = lambda x: 1 + (jnp.cumprod(x * mask, -1).sum(-1) * mask[..., 0]).sum() / jnp.maximum(mask[..., 0].sum(), 1)
  accept, right = per_step(alike), per_step(agrees)
  metrics = {"tau_probabilistic": length(alike), "tau_greedy": length(agrees)}
  for s in range(steps):
    metrics |= {f"ploss_{s}": losses[s], f"accept_rate@{s}": accept[s], f"accuracy@{s}": right[s], f"valid_tokens@{s}": mask[:, :, s].sum()}
  return jnp.sum(losses * decay ** jnp.arange(steps)), metrics


def sparse_l1(scores: Float["N C"], target: Float["N C"]) -> Float["N"]:
  """‖q − p‖₁ for q = softmax(scores) on C candidates and zero elsewhere; target: p of those candidates."""
  return jnp.abs(jax.nn.softmax(scores, -1) - target).sum(-1) + jnp.maximum(1 - target.sum(-1), 0.0)


def _greedy_metrics(prefix: str, correct: Bool["B A L"], supervised: Bool["B A L"]) -> dict[str, jax.Array]:
  """Agreement of the best drafts with the true tokens under teacher forcing; slots without a label break no run."""
  counted, hits = supervised.any(-1), (correct & supervised).sum()
  run = (jnp.cumprod(correct | ~supervised, -1) * supervised).sum(-1)
  return {
      f"{prefix}correct_tokens": hits, f"{prefix}accuracy": hits / jnp.maximum(supervised.sum(), 1),
      f"{prefix}accept_len": ((1 + run) * counted).sum() / jnp.maximum(counted.sum(), 1)}


def _confidence_metrics(confidence, accept, supervised, mean) -> dict[str, jax.Array]:
  c = jax.nn.sigmoid(confidence)
  joint = lambda x: jnp.cumprod(x * supervised, -1)
  return {
      "confidence_abs_error": mean(jnp.abs(c - accept)), "confidence_bias": mean(c - accept),
      "confidence_cumprod_bias": mean(joint(c) - joint(accept))}


def _acceptance_metrics(accept, supervised) -> dict[str, jax.Array]:
  """Expected acceptance from the distributions: at each slot, and the length of a block that starts at its anchor."""
  counted = supervised.any(-1)
  length = 1 + jnp.cumprod(accept * supervised, -1).sum(-1)
  per_slot = (accept * supervised).sum((0, 1)) / jnp.maximum(supervised.sum((0, 1)), 1)
  return {
      **{f"accept_rate@{k}": per_slot[k] for k in range(accept.shape[-1])},
      "tau_probabilistic": (length * counted).sum() / jnp.maximum(counted.sum(), 1)}


def anchor_metrics(allowed: Bool["B S"], keep: Bool["B A"], supervised: Bool["B A L"]) -> dict[str, jax.Array]:
  """How many anchors there were and how full their blocks are, as means over rows; `_ratio` of what would be possible."""
  valid, sampled = allowed.sum(1).mean(), keep.sum(1).mean()
  filled = (supervised.sum((1, 2)) / jnp.maximum(keep.sum(1), 1)).mean()
  return {
      "valid_anchors_abs": valid, "valid_anchors_ratio": valid / allowed.shape[1],
      "sampled_anchors_abs": sampled, "sampled_anchors_ratio": sampled / keep.shape[1],
      "block_supervised_tokens_abs": filled, "block_supervised_tokens_ratio": filled / supervised.shape[-1]}
