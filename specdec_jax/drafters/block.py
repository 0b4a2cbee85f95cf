"""The block drafter: one non-causal pass over [anchor, mask, …] that reads the target's features (DFlash, DSpark)."""

import dataclasses
import math

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.config import DrafterConfig
from specdec_jax.drafters.base import Proposal
from specdec_jax.drafters.heads import ConfidenceHead, MarkovHead
from specdec_jax.models.cache import Cache, as_keys, as_values, init_cache, write_layer
from specdec_jax.models.layers import Head, Layer, Projection, RMSNorm, masked_softmax, rotary_angles
from specdec_jax.sampling import Role, Sampling, distribution, draw, greedy_tokens
from specdec_jax.typing import Bool, Float, Int
from specdec_jax.verify import SparseDistribution


@flax.struct.dataclass
class BlockBatch:
  """Blocks of a training batch: context rows [B,S], anchors [B,A].

  features [B,S,M,D]: the target's taps; positions [B,S]; tokens [B,A,L]: the true tokens anchor … anchor+L-1, what each
  slot's predecessor is; visible [B,A,S]: context that a block sees; keep [B,A]: False for blocks that do not count.
  """

  features: Float["B S M D"]
  positions: Int["B S"]
  tokens: Int["B A L"]
  block_positions: Int["B A L"]
  visible: Bool["B A S"]
  keep: Bool["B A"]


@flax.struct.dataclass
class BlockOutputs:
  """hidden [B,A,L,D], logits [B,A,L,V] with the sequential head's bias, confidence [B,A,L] logits or None."""

  hidden: Float["B A L D"]
  logits: Float["B A L V"]
  confidence: Float["B A L"] | None


class BlockNetwork(nn.Module):
  """Parameters and layers of a block drafter; see `BlockDrafter` for the functions that decoding and training call."""

  config: DrafterConfig
  transposed: bool = False
  confidence_trains: bool = False

  def setup(self):
    c, m = self.config, self.config.model
    self.embedding = self.param("embedding", nn.initializers.normal(m.init_scale), (m.vocab, m.width))
    self.head = Head(m.vocab, m.width, m.init_scale, self.transposed)
    self.fuse = Projection(len(c.taps) * m.width, (m.width,), transposed=self.transposed, scale=m.init_scale)
    self.fuse_norm = RMSNorm(m.width, m.norm_eps)
    self.layers = [Layer(m, self.transposed) for _ in range(m.layers)]
    self.final_norm = RMSNorm(m.width, m.norm_eps)
    if c.markov_rank:
      self.markov = MarkovHead(m.vocab, c.markov_rank)
    if c.confidence:
      self.confidence = ConfidenceHead(m.width + (c.markov_rank if c.confidence_with_markov else 0))

  def fused(self, features: Float["B T M D"]) -> Float["B T D"]:
    """H_ctx = RMSNorm(W_c [taps]), what every layer reads as context [DFlash]."""
    return self.fuse_norm(self.fuse(features.reshape(*features.shape[:-2], -1)))

  def context(self, features: Float["B T M D"], positions: Int["B T"]) -> list[tuple[Float["B T K H"], Float["B T K H"]]]:
    """Keys and values of context rows, for every layer."""
    fused, angles = self.fused(features), rotary_angles(self.config.model.rotary, positions)
    return [layer.attention.keys_values(fused, angles) for layer in self.layers]

  def hidden(
      self, context, context_positions: Int["B S"], tokens: Int["B A L"], positions: Int["B A L"], visible: Bool["B A S"],
      keep: Bool["B A"],
  ) -> Float["B A L D"]:
    """Final-normed hidden states of the blocks. context: (keys [B,K,H,S], values [B,K,S,H]) of every layer.

    tokens: only slot 0, the anchor, is read; the others are masks. Blocks with keep False see nothing and hold masks only.
    """
    c, m = self.config, self.config.model
    batch, anchors, slots = tokens.shape
    first = (jnp.arange(slots) == 0) & keep[..., None]
    x = jnp.take(self.embedding, jnp.where(first, tokens, c.mask_id), axis=0, mode="clip").reshape(batch, anchors * slots, -1)
    angles = rotary_angles(m.rotary, positions.reshape(batch, -1))
    for layer, (keys, values), window in zip(self.layers, context, m.windows):
      near = True if window is None else positions[..., None] - context_positions[:, None, None] < window

      def mix(attention, h, keys=keys, values=values, near=near):
        shape = lambda y: y.reshape(batch, anchors, slots, *y.shape[2:])
        k, v = attention.keys_values(h, angles)
        sees = visible[:, :, None] & near & keep[..., None, None]
        out = attend_block(shape(attention.queries(h, angles)), keys, values, sees, shape(k), shape(v), keep)
        return out.reshape(batch, anchors * slots, *out.shape[3:]), None

      x, _ = layer(x, mix)
    return self.final_norm(x).reshape(batch, anchors, slots, -1)

  def predict(self, hidden, base, previous) -> tuple[Float["B L V"], Float["B L"] | None]:
    """Logits and confidence of slots whose previous tokens are known; base: the head's logits of `hidden`."""
    c = self.config
    embedded = self.markov.embed(previous) if c.markov_rank else None
    logits = base + self.markov(embedded, hidden) if c.markov_rank else base
    if not c.confidence:
      return logits, None
    features = jnp.concatenate([hidden, embedded], -1) if c.confidence_with_markov else hidden
    return logits, self.confidence(features if self.confidence_trains else jax.lax.stop_gradient(features))

  def base_logits(self, hidden):
    return self.head(hidden)

  def __call__(self, batch: BlockBatch) -> BlockOutputs:
    """Teacher-forced outputs of training blocks."""
    context = [(as_keys(k), as_values(v)) for k, v in self.context(batch.features, batch.positions)]
    hidden = self.hidden(context, batch.positions, batch.tokens, batch.block_positions, batch.visible, batch.keep)
    return BlockOutputs(hidden, *self.predict(hidden, self.base_logits(hidden), batch.tokens))


def attend_block(q: Float["B A L K G H"], keys: Float["B K H S"], values: Float["B K S H"], visible: Bool["B A L S"],
                 k: Float["B A L K H"], v: Float["B A L K H"], keep: Bool["B A"]) -> Float["B A L K G H"]:
  """Queries of a block attend to the context they see and to every slot of their own block, under one softmax."""
  batch, anchors, slots, heads, groups, size = q.shape
  context = keys.shape[-1]
  rows = q.transpose(0, 3, 1, 2, 4, 5)  # [B,K,A,L,G,H], so that every product below reads its operands as they are.
  merge = lambda x, *axes: x.reshape(batch, heads, *axes, x.shape[-1])
  outside = jnp.matmul(merge(rows, -1), keys, preferred_element_type=jnp.float32)
  inside = jnp.matmul(merge(rows, anchors, slots * groups), k.transpose(0, 3, 1, 4, 2), preferred_element_type=jnp.float32)
  scores = jnp.concatenate([merge(outside, anchors, slots, groups), merge(inside, anchors, slots, groups)], -1) / math.sqrt(size)
  own = jnp.broadcast_to(keep[:, :, None, None], (*visible.shape[:-1], slots))
  seen = jnp.concatenate([jnp.broadcast_to(visible, (*visible.shape[:-1], context)), own], -1)
  weights = masked_softmax(scores, seen[:, None, :, :, None, :]).astype(v.dtype)
  out = merge(merge(weights[..., :context], -1) @ values, anchors, slots, groups)
  out += merge(merge(weights[..., context:], anchors, slots * groups) @ v.transpose(0, 3, 1, 2, 4), anchors, slots, groups)
  return out.transpose(0, 2, 3, 1, 4, 5)


@dataclasses.dataclass(frozen=True)
class BlockDrafter:
  """The four functions of a block drafter (`specdec_jax.drafters.base.DraftModel`); its state is a context cache.

  confidence_trains: whether the confidence loss reaches the backbone. It does in DeepSpec's code; here the confidence
  learns what the drafter is and leaves it alone (DSpark §3.1), unless asked for.
  """

  config: DrafterConfig
  transposed: bool = False
  dtype: str = "float32"
  confidence_trains: bool = False

  @property
  def network(self) -> BlockNetwork:
    return BlockNetwork(self.config, self.transposed, self.confidence_trains)

  @property
  def taps(self) -> tuple[int, ...]:
    return self.config.taps

  @property
  def draft_length(self) -> int:
    return self.config.draft_length

  def init_params(self, key):
    """Fresh parameters."""
    c, m = self.config, self.config.model
    ones = jnp.ones((1, 1), jnp.int32)
    batch = BlockBatch(
        jnp.zeros((1, 1, len(c.taps), m.width)), 0 * ones, jnp.zeros((1, 1, c.block), jnp.int32),
        jnp.zeros((1, 1, c.block), jnp.int32), ones[:, :, None] > 0, ones > 0)
    return self.network.init(key, batch)["params"]

  def init_state(self, batch: int, length: int) -> Cache:
    m = self.config.model
    return init_cache(m.layers, batch, m.kv_heads, length, m.head_dim, self.dtype, stacked=False)

  def extend(self, params, state: Cache, features, tokens, positions, valid) -> Cache:
    del tokens  # The features of a position already hold its token.
    rows = self.network.apply({"params": params}, features, positions, method="context")
    start = positions[:, 0]
    written = [write_layer(keys, values, k, v, start) for keys, values, (k, v) in zip(state.keys, state.values, rows)]
    return Cache(*map(tuple, zip(*written)), start + valid)

  def propose(self, params, state: Cache, anchor, position, keys, sampling: Sampling) -> Proposal:
    c = self.config
    batch = anchor.shape[0]
    apply = lambda *args, method: self.network.apply({"params": params}, *args, method=method)
    positions = position[:, None, None] + jnp.arange(c.block)
    visible = jnp.arange(state.capacity) < state.lengths[:, None, None]
    tokens = jnp.broadcast_to(anchor[:, None, None], (batch, 1, c.block))
    context = [(k.astype(self.dtype), v.astype(self.dtype)) for k, v in zip(state.keys, state.values)]
    rows = jnp.arange(state.capacity)[None]
    hidden = apply(context, rows, tokens, positions, visible, jnp.ones((batch, 1), bool), method="hidden")[:, 0]
    base = apply(hidden, method="base_logits")

    def slot(previous, inputs):
      h, u, key = inputs
      logits, confidence = apply(h, u, previous, method="predict")
      if sampling.greedy:
        token, q = greedy_tokens(logits, sampling.vocab), jnp.zeros((batch, 0))
      else:
        q = distribution(logits, sampling)
        token = draw(key, q, Role.DRAFT)
      return token, (token, q, jnp.zeros((batch, 0)) if confidence is None else confidence)

    _, (drafts, q, confidence) = jax.lax.scan(
        slot, anchor, (hidden.swapaxes(0, 1), base.swapaxes(0, 1), keys.swapaxes(0, 1)))
    drafts = drafts.swapaxes(0, 1)
    dense = SparseDistribution(drafts[..., None], jnp.ones((*drafts.shape, 1))) if sampling.greedy else q.swapaxes(0, 1)
    return Proposal(drafts, dense, confidence.swapaxes(0, 1) if c.confidence else None)

  def block_outputs(self, params, batch: BlockBatch) -> BlockOutputs:
    return self.network.apply({"params": params}, batch)
