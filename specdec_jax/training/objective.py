"""From a batch of packed rows to a drafter's loss, for every kind of drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import hub, sharding
from specdec_jax.config import DrafterConfig
from specdec_jax.data import feature_cache, packing
from specdec_jax.drafters import BlockDrafter, SerialDrafter
from specdec_jax.drafters.serial import SerialBatch
from specdec_jax.models.decoder import head_table, packed_view
from specdec_jax.models.target import Target
from specdec_jax.training import anchors, features, losses

FROZEN = ("embedding", "head", "draft_ids")  # The target's, as published.


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of a drafter, in the parts that it is made of.

  anchors_per_row: columns or blocks that are drafted from; 0, serial drafters only, for every column. anchor_rule, loss,
  ce_share: of block drafters only; before the share `ce_share` of training, cross-entropy stands in for TV, which learns
  slowly while q is far from p. soft: whether cross-entropies are on the target's distribution, as serial drafters are published, or on
  the true token, as block drafters are.
  batch: tokens, segments, answer [B,S], progress (0 to 1), and from a feature cache `cached`. constants: "target", its
  parameters, and "frozen", the drafter's.
  """

  target: Target
  model: BlockDrafter | SerialDrafter
  anchors_per_row: int
  anchor_rule: str = "cumulative"
  loss: losses.BlockLoss = losses.BlockLoss()
  ce_share: float = 0.0
  soft: bool = False

  def __post_init__(self):
    if self.anchors_per_row < (1 if isinstance(self.model.config, DrafterConfig) else 0):
      raise ValueError(f"anchors_per_row is {self.anchors_per_row}: a block drafter needs at least 1, a serial one 0 for every column")

  def read(self, batch, constants):
    """(taps [B,S,M,D], final-normed hidden states [B,S,D], positions [B,S]), read from the batch or computed."""
    if "cached" in batch:
      return *feature_cache.restore(batch["cached"]), packed_view(batch["tokens"], batch["segments"])[0]
    return features.target_features(self.target.decoder, constants["target"], batch["tokens"], batch["segments"], self.model.taps)

  def inputs(self, batch, read, key):
    """What the drafter reads, and the labels of blocks."""
    c = self.model.config
    tokens, segments, supervised, (taps, _, positions) = batch["tokens"], batch["segments"], batch["answer"], read
    if isinstance(c, DrafterConfig):
      allowed = anchors.candidates(supervised, segments, self.anchor_rule, c.block)
      picked, keep = anchors.sample_anchors(key, allowed, self.anchors_per_row)
      return anchors.make_blocks(
          tokens, segments, positions, supervised, taps, picked, keep, c.draft_length, c.block, self.anchor_rule)
    rows = SerialBatch(taps, tokens, segments, positions)
    if self.anchors_per_row:
      picked, keep = anchors.sample_anchors(key, anchors.candidates(supervised, segments), self.anchors_per_row)
      rows = rows.replace(anchors=jnp.where(keep, picked, tokens.shape[1] - 1))  # The last column predicts nothing.
    return rows, None

  def __call__(self, params, batch, key, constants):
    """(loss, metrics) for the trainer."""
    model, w = self.model, self.loss
    params, table, cap = {**params, **constants["frozen"]}, head_table(constants["target"]), self.target.config.logit_cap
    _, hidden, _ = read = self.read(batch, constants)
    inputs, labels = self.inputs(batch, read, key)
    out = model.block_outputs(params, inputs)
    if labels is None:
      return losses.serial_loss(model.config.step_decay, model, params, out, inputs, batch["answer"], hidden, table, cap, self.soft)
    warm = batch["progress"] < self.ce_share
    weights = dataclasses.replace(w, ce=jnp.where(warm, 1.0, w.ce), tv=jnp.where(warm, 0.0, w.tv))
    return losses.block_loss(weights, model, params, out, features.target_rows(hidden, labels.index), table, labels, cap, self.soft)


def initial(model: BlockDrafter | SerialDrafter, target: Target, packed: packing.Rows, seed: int):
  """(trainable, frozen) parameters of a new drafter. A reduced vocabulary holds the most frequent tokens of the answers."""
  make = lambda key: {k: v for k, v in model.init_params(key).items() if k not in FROZEN or k == "draft_ids"}
  params = sharding.create(make, target.mesh, jax.random.key(seed), transposed=model.transposed)
  frozen, c = hub.target_tables(target), model.config
  if "draft_ids" in params:
    counts = np.bincount(packed.tokens[packed.answer], minlength=c.model.vocab)
    frozen["draft_ids"] = sharding.create(
        jnp.asarray, target.mesh, np.sort(np.argsort(-counts, kind="stable")[: c.draft_vocab]).astype(np.int32))
    frozen["head"] = hub.reduced_head(target, frozen["draft_ids"])
  return {k: v for k, v in params.items() if k not in FROZEN}, frozen
