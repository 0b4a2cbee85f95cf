"""Losses, in float32, as sums over counted terms divided last."""

import jax
import jax.numpy as jnp
import optax

from specdec_jax.models.decoder import Decoder


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
