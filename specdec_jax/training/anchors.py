"""Anchors: where in a sequence the training blocks start, and what each block sees and predicts."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.block import BlockBatch
from specdec_jax.typing import Bool, Float, Int, Key


@flax.struct.dataclass
class Labels:
  """What the slots of a block should predict. tokens [B,A,L]: true next tokens; index [B,A,L]: the row whose target
  distribution predicts that token; supervised [B,A,L]: slots that count."""

  tokens: Int["B A L"]
  index: Int["B A L"]
  supervised: Bool["B A L"]


RULES = ("cumulative", "whole_block")


def candidates(supervised: Bool["B S"], segments: Int["B S"], rule: str = "cumulative", block: int = 1) -> Bool["B S"]:
  """Positions where a block may start.

  "cumulative" (DeepSpec): the token and the next one are both supervised and of one text; a block may run over the end.
  "whole_block" (NeMo): the token is supervised and all `block` slots lie in its text.
  """
  check_rule(rule)
  if block > segments.shape[1]:
    return jnp.zeros(supervised.shape, bool)
  ahead = block - 1 if rule == "whole_block" else 1
  later = jnp.pad(segments[:, ahead:], ((0, 0), (0, ahead)))
  inside = (segments == later) & (segments > 0)
  if rule == "whole_block":
    return supervised & inside
  return supervised & inside & jnp.pad(supervised[:, 1:], ((0, 0), (0, 1)))


def check_rule(rule: str) -> None:
  if rule not in RULES:
    raise ValueError(f"unknown anchor rule {rule!r}: {' or '.join(RULES)}")


def sample_anchors(key: Key[""], allowed: Bool["B S"], count: int) -> tuple[Int["B A"], Bool["B A"]]:
  """`count` distinct allowed positions of each row, ascending; where there are fewer, the rest are anchor 0, keep False."""
  if count > allowed.shape[1]:
    raise ValueError(f"{count} anchors do not fit a row of {allowed.shape[1]} tokens")
  scores = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
  _, picked = jax.lax.top_k(scores, count)
  keep = jnp.take_along_axis(allowed, picked, 1)
  order = jnp.sort(jnp.where(keep, picked, allowed.shape[1]), 1)
  keep = order < allowed.shape[1]
  return jnp.where(keep, order, 0), keep


def make_blocks(
    tokens: Int["B S"], segments: Int["B S"], positions: Int["B S"], supervised: Bool["B S"], features: Float["B S M D"],
    anchors: Int["B A"], keep: Bool["B A"], length: int, slots: int, rule: str = "cumulative",
) -> tuple[BlockBatch, Labels]:
  """The blocks at `anchors`, of `slots` input slots: draft k of `length` follows the true token at anchor+k and predicts the
  one at anchor+1+k.

  The tokens of a text lie side by side, and `positions` count them from 0. A block sees the context of its own text strictly
  before its anchor. A label that is out of range, unsupervised or of another text is not supervised; under the rule
  "cumulative" neither is any after it.
  """
  check_rule(rule)
  size = tokens.shape[1]
  pick = lambda x, index: jnp.take_along_axis(x, index.reshape(index.shape[0], -1), 1).reshape(index.shape)
  index = jnp.where(keep, anchors, 0)[..., None] + jnp.arange(length)
  label = jnp.where(keep[..., None], jnp.minimum(index + 1, size - 1), 0)
  true = pick(tokens, label)
  home = pick(segments, anchors)
  good = (index + 1 < size) & pick(supervised, label) & (pick(segments, label) == home[..., None]) & keep[..., None]
  position = pick(positions, anchors)
  batch = BlockBatch(
      features=features, positions=positions, tokens=jnp.concatenate([pick(tokens, anchors)[..., None], true[..., :-1]], -1),
      block_positions=position[..., None] + jnp.arange(slots), low=anchors - position, high=anchors, keep=keep)
  supervised = jnp.cumprod(good, -1, dtype=jnp.int32) > 0 if rule == "cumulative" else good
  return batch, Labels(true, jnp.maximum(label - 1, 0), supervised)
