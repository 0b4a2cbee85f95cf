"""Losses, in float32, as sums over counted terms divided last."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from specdec_jax.models.decoder import Decoder
from specdec_jax.training.anchors import Labels
from specdec_jax.typing import Bool, Float


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
  return total, {"answer_loss": jnp.sum(losses * answers) / jnp.maximum(answers.sum(), 1), "sum": jnp.sum(losses * answers), "count": answers.sum()}


@dataclasses.dataclass(frozen=True)
class BlockLoss:
  """Weights of a block drafter's loss: L = ce·CE + tv·TV + confidence·BCE, slots weighted exp(−k/decay) (DSpark eq. 9–12).

  decay: None for equal weights. TV is the whole L1 distance, not its half, as published.
  """

  ce: float = 0.1
  tv: float = 0.9
  confidence: float = 1.0
  decay: float | None = 4.0


def slot_weights(supervised: Bool["B A L"], decay: float | None) -> Float["B A L"]:
  """exp(−k/decay) on the supervised slots, k from 0."""
  k = jnp.arange(supervised.shape[-1])
  return supervised * (jnp.exp(-k / decay) if decay is not None else 1.0)


def block_loss(
    weights: BlockLoss, logits: Float["B A L V"], confidence: Float["B A L"] | None, target_logits: Float["B A L V"],
    labels: Labels,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of teacher-forced blocks and its metrics; each term is a weighted sum over a sum of weights."""
  w = slot_weights(labels.supervised, weights.decay)
  mean = lambda x: jnp.sum(x * w) / (jnp.sum(w) + 1e-6)
  draft = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
  ce = mean(-jnp.take_along_axis(draft, labels.tokens[..., None], -1)[..., 0])
  distance = jnp.abs(jnp.exp(draft) - jax.nn.softmax(target_logits.astype(jnp.float32), -1)).sum(-1)
  tv = mean(distance)
  accept = jax.lax.stop_gradient(jnp.clip(1 - 0.5 * distance, 0, 1))
  total = weights.ce * ce + weights.tv * tv
  metrics = {"ce_loss": ce, "l1_loss": tv}
  if confidence is not None:
    bce = mean(optax.sigmoid_binary_cross_entropy(confidence.astype(jnp.float32), accept))
    total += weights.confidence * bce
    metrics |= {"confidence_loss": bce, **_confidence_metrics(confidence, accept, labels.supervised, mean)}
  return total, metrics | _acceptance_metrics(accept, labels.supervised)


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
