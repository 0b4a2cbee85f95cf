"""The block drafter: one non-causal pass over [anchor, mask, …] that reads the target's features (DFlash, DSpark, DFlash 2)."""

import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.config import DrafterConfig
from specdec_jax.drafters.base import DraftOutputs, FromConfig, Proposal, best_logit, logit, proposal
from specdec_jax.drafters.heads import BiasHead, ConfidenceHead, DynamicConv, SelectorHead, top_candidates
from specdec_jax.kernels import block_attention, default_implementation, write_rows
from specdec_jax.kernels.markov_walk import implementation_for, markov_walk
from specdec_jax.models.cache import Cache, as_keys, as_values, init_cache, write_layer
from specdec_jax.models.layers import Head, Layer, Projection, RMSNorm, embed, param, rotary_angles, soft_capped
from specdec_jax.sampling import GREEDY_BELOW, Role, Sampling, adjusted, gumbel, next_token, real_logits, role_keys
from specdec_jax.sharding import constrain_rows
from specdec_jax.typing import Bool, Float, Int
from specdec_jax.verify import SparseDistribution

BIASED = ("markov", "gated", "rnn")  # the kinds of BiasHead


@flax.struct.dataclass
class BlockBatch:
  """Blocks of a training batch: context rows [B,S], anchors [B,A].

  features [B,S,M,D]: the target's taps; positions [B,S]; tokens [B,A,L]: the true tokens anchor … anchor+γ-1, what each
  prediction's predecessor is; block_positions [B,A,L]: of every input slot; low, high [B,A]: a block sees the context rows low …
  high − 1, at successive positions, and stands at high; keep [B,A]: False for blocks that do not count.
  """

  features: Float["B S M D"]
  positions: Int["B S"]
  tokens: Int["B A L"]
  block_positions: Int["B A L"]
  low: Int["B A"]
  high: Int["B A"]
  keep: Bool["B A"]


class ConvLayer(Layer):
  """A decoder layer with a dynamic convolution over each block before and after both sublayers; `slots`: of one block."""

  taps: int = 2
  group: int = 16
  slots: int = 1
  kernels: str | None = None

  def setup(self):
    super().setup()
    conv = lambda: DynamicConv(self.taps, self.group, self.config.width, self.transposed, self.kernels)
    self.attention_conv, self.mlp_conv = conv(), conv()

  def __call__(self, x, mix):
    extra = None

    def sublayer(x, norm, conv, inner):
      h = norm(x)
      k = conv.coefficients(h)
      return conv(inner(conv(h, k, 0, self.slots)), k, 1, self.slots, residual=x)

    def attend(h):
      nonlocal extra
      attended, extra = mix(self.attention, h)
      return self.attention.output(attended)

    x = sublayer(x, self.attention_norm, self.attention_conv, attend)
    return sublayer(x, self.mlp_norm, self.mlp_conv, self.mlp), extra


class BlockNetwork(nn.Module):
  """Parameters and layers of a block drafter; see `BlockDrafter` for the functions that decoding and training call."""

  config: DrafterConfig
  transposed: bool = False
  confidence_trains: bool = False
  kernels: str | None = None

  def setup(self):
    c, m = self.config, self.config.model
    self.embedding = param(self, "embedding", nn.initializers.normal(m.init_scale), (m.vocab, m.width))
    self.head = Head(m.vocab, m.width, m.init_scale, self.transposed)
    self.fuse = Projection(len(c.taps) * m.width, (m.width,), transposed=self.transposed, scale=m.init_scale)
    self.fuse_norm = RMSNorm(m.width, m.norm_eps)
    layer = lambda m: (
        ConvLayer(m, self.transposed, taps=c.conv, group=c.conv_group, slots=c.block, kernels=self.kernels) if c.conv else
        Layer(m, self.transposed))
    self.layers = [layer(m.layer(i)) for i in range(m.layers)]
    self.final_norm = RMSNorm(m.width, m.norm_eps)
    if c.head == "selector":
      self.selector = SelectorHead(m.vocab, c.rank, m.width, self.transposed)
    elif c.head != "none":
      self.markov = BiasHead(c.head, m.vocab, c.rank, m.width, self.transposed)
    if c.confidence:
      self.confidence = ConfidenceHead(m.width + (c.rank if c.confidence_with_head else 0))

  def fused(self, features: Float["B T M D"]) -> Float["B T D"]:
    """H_ctx = RMSNorm(W_c [taps]), what every layer reads as context [DFlash]."""
    return constrain_rows(self.fuse_norm(self.fuse(features.reshape(*features.shape[:-2], -1))))

  def context(self, features: Float["B T M D"], positions: Int["B T"]) -> list[tuple[Float["B T K H"], Float["B T K H"]]]:
    """Keys and values of context rows, for every layer."""
    fused = self.fused(features)
    return [layer.attention.keys_values(fused, rotary_angles(layer.config.rotary, positions)) for layer in self.layers]

  def slots(
      self, context, anchors: Int["B A"], positions: Int["B A L"], high: Int["B A"], keep: Bool["B A"], low: Int["B A"] | None = None,
  ) -> Float["B A L D"]:
    """Final-normed hidden states of every input slot. context: (keys [B,K,H,S], values [B,K,S,H]) of every layer; anchors:
    the tokens of slot 0, the other slots are masks. A block sees the rows low (0 where None) … high − 1 of the context, and stands at
    high. Blocks with keep False see nothing and hold masks only."""
    c, m = self.config, self.config.model
    batch, blocks, slots = positions.shape
    first = (jnp.arange(slots) == 0) & keep[..., None]
    x = embed(self.embedding, jnp.where(first, anchors[..., None], c.mask_id)).reshape(batch, blocks * slots, -1)
    x = constrain_rows(x if m.embedding_scale == 1.0 else x * jnp.asarray(m.embedding_scale, x.dtype))
    for layer, (keys, values), window in zip(self.layers, context, m.windows):

      def mix(attention, h, keys=keys, values=values, window=window):
        shape = lambda y: y.reshape(batch, blocks, slots, *y.shape[2:])
        angles = rotary_angles(attention.config.rotary, positions.reshape(batch, -1))
        k, v = attention.keys_values(h, angles)
        out = block_attention(
            q=shape(attention.queries(h, angles)), keys=keys, values=values, low=low, high=high, k=shape(k), v=shape(v), keep=keep,
            window=window, scale=m.score_scale, implementation=self.kernels)
        return out.reshape(batch, blocks * slots, *out.shape[3:]), None

      x = constrain_rows(layer(x, mix)[0])
    return self.final_norm(x).reshape(batch, blocks, slots, -1)

  def hidden(self, *inputs) -> Float["B A L D"]:
    """The γ slots that predict; inputs as in `slots`."""
    every = self.slots(*inputs)
    return every if self.config.anchor_predicts else every[:, :, 1:]

  def base_logits(self, hidden):
    return soft_capped(self.head(hidden), self.config.model.logit_cap)

  def embed_previous(self, tokens: Int["B L"]) -> Float["B L R"] | None:
    """The sequential head's embedding of previous tokens; None without a head."""
    if self.config.head == "none":
      return None
    return (self.selector if self.config.head == "selector" else self.markov).embed(tokens)

  def score_confidence(self, hidden: Float["B L D"], embedded: Float["B L R"] | None) -> Float["B L"] | None:
    """Confidence logits, or None without the head."""
    c = self.config
    if not c.confidence:
      return None
    features = jnp.concatenate([hidden, embedded], -1) if c.confidence_with_head else hidden
    return self.confidence(features if self.confidence_trains else jax.lax.stop_gradient(features))

  def predict(self, state, hidden: Float["B D"], base: Float["B V"], previous: Int["B"]):
    """One slot after `previous`: (head state, logits [B,V] with the bias, confidence); base: the head's logits."""
    embedded = self.embed_previous(previous)
    logits = base
    if self.config.head in BIASED:
      state, features = self.markov.step(state, embedded, hidden)
      logits = base + self.markov.bias(features)
    return state, logits, self.score_confidence(hidden, embedded)

  def walk_inputs(self, hidden: Float["B L D"]):
    """What the walk of a bias head needs besides base logits: see `BiasHead.walk_inputs`."""
    return self.markov.walk_inputs(hidden)

  def select(self, hidden: Float["B L D"], embedded: Float["B L R"], ids: Int["B L C"], unary: Float["B L C"]) -> Float["B L C"]:
    """The path selector's scores of candidates."""
    return self.selector.scores(embedded, hidden, ids, unary)

  def walk(self, hidden: Float["B L D"], **arguments):
    """The path selector's walk; arguments and result as of `path_walk`."""
    return self.selector.walk(hidden, self.kernels, **arguments)

  def __call__(self, batch: BlockBatch) -> DraftOutputs:
    """Teacher-forced outputs of training blocks."""
    context = [(as_keys(k), as_values(v)) for k, v in self.context(batch.features, batch.positions)]
    hidden = self.hidden(context, batch.tokens[..., 0], batch.block_positions, batch.high, batch.keep, batch.low)
    embedded, rows = self.embed_previous(batch.tokens), hidden
    if self.config.head in BIASED:
      rows = jnp.concatenate([hidden, self.markov.steps(embedded, hidden)], -1)
    return DraftOutputs(hidden, rows, embedded, self.score_confidence(hidden, embedded))

  def init_all(self, batch: BlockBatch):
    """Initialises every parameter."""
    out = self(batch)
    base = self.base_logits(out.hidden)
    if self.config.head == "selector":
      return self.select(out.hidden, out.embedded, *top_candidates(base, self.config.candidates))
    return base


@dataclasses.dataclass(frozen=True)
class BlockDrafter(FromConfig):
  """The functions of a block drafter (`specdec_jax.drafters.base.DraftModel`); its state is a context cache.

  confidence_trains: whether the confidence loss reaches the backbone. It does in DeepSpec's code; here the confidence
  learns what the drafter is and leaves it alone (DSpark §3.1), unless asked for. kernels: the implementation of the parts that
  have kernels (`specdec_jax.kernels.base`), in training as in decoding; that of the backend where None.
  """

  config: DrafterConfig
  transposed: bool = False
  dtype: str = "float32"
  confidence_trains: bool = False
  kernels: str | None = None

  @property
  def network(self) -> BlockNetwork:
    return BlockNetwork(self.config, self.transposed, self.confidence_trains, self.kernels)

  @property
  def _plain(self) -> bool:
    return (self.kernels or default_implementation()) == "reference"

  def init_params(self, key):
    """Fresh parameters."""
    c, m = self.config, self.config.model
    ones = jnp.ones((1, 1), jnp.int32)
    batch = BlockBatch(
        jnp.zeros((1, 1, len(c.taps), m.width)), 0 * ones, jnp.zeros((1, 1, c.draft_length), jnp.int32),
        jnp.zeros((1, 1, c.block), jnp.int32), 0 * ones, ones, ones > 0)
    return self.network.init(key, batch, method="init_all")["params"]

  def init_state(self, batch: int, length: int) -> Cache:
    m = self.config.model
    sizes = [(m.layer(i).kv_heads, m.layer(i).head_dim) for i in range(m.layers)]
    return init_cache(sizes, batch, length, self.dtype, stacked=False)

  def extend(self, params, state: Cache, features, tokens, positions, valid) -> Cache:
    del tokens  # The features of a position already hold its token.
    rows = self.network.apply({"params": params}, features, positions, method="context")
    start = positions[:, 0]
    write = write_layer
    if not self._plain:
      write = lambda keys, values, k, v, start: write_rows(keys=keys, values=values, k=k, v=v, start=start, implementation=self.kernels)
    written = [write(keys, values, k, v, start) for keys, values, (k, v) in zip(state.keys, state.values, rows)]
    return Cache(*map(tuple, zip(*written)), start + valid)

  def propose(self, params, state: Cache, anchor, position, keys, sampling: Sampling) -> Proposal:
    c = self.config
    batch = anchor.shape[0]
    apply = lambda *args, method: self.network.apply({"params": params}, *args, method=method)
    positions = position[:, None, None] + jnp.arange(c.block)
    context = [(k.astype(self.dtype), v.astype(self.dtype)) for k, v in zip(state.keys, state.values)]
    hidden = apply(context, anchor[:, None], positions, state.lengths[:, None], jnp.ones((batch, 1), bool), method="hidden")[:, 0]
    base = real_logits(apply(hidden, method="base_logits"), sampling.vocab)
    walk = self._select_path if c.head == "selector" else self._walk
    return walk(apply, hidden, base, anchor, keys, sampling)

  def _walk(self, apply, hidden, base, anchor, keys, sampling: Sampling) -> Proposal:
    """Token by token, each from the logits biased by those before it."""
    batch = anchor.shape[0]
    if self.config.head in BIASED and sampling.plain:
      head, keys_if_drawn = apply(hidden, method="walk_inputs"), None if sampling.greedy else keys
      implementation = implementation_for(self.kernels, batch, head["table"], keys_if_drawn)
      if implementation != "reference":
        return self._walk_at_once(apply, head | {"implementation": implementation}, hidden, base, anchor, keys, sampling)

    def slot(carry, inputs):
      previous, state, sampling = carry
      h, u, key = inputs
      state, logits, confidence = apply(state, h, u, previous, method="predict")
      token, q = next_token(logits, sampling, key, Role.DRAFT)
      confidence = best_logit(logits, sampling) if confidence is None else confidence
      return (token, state, sampling.after(token[:, None], 1)), (token, q, confidence)

    first = (anchor, jnp.zeros((batch, self.config.rank if self.config.head == "rnn" else 0)), sampling)
    _, (drafts, q, confidence) = jax.lax.scan(slot, first, (hidden.swapaxes(0, 1), base.swapaxes(0, 1), keys.swapaxes(0, 1)))
    return proposal(drafts, None, q, confidence, sampling)

  def _walk_at_once(self, apply, head, hidden, base, anchor, keys, sampling: Sampling) -> Proposal:
    """The same in one operation (`kernels.markov_walk`), from the same noise, for what nothing but a temperature shapes."""
    drawn = {} if sampling.greedy else {"temperature": sampling.temperature, "keys": role_keys(keys, Role.DRAFT)}
    walk = markov_walk(anchor=anchor, base=base, **drawn, **head)
    before = jnp.concatenate([anchor[:, None], walk.drafts[:, :-1]], 1)
    confidence = apply(hidden, apply(before, method="embed_previous"), method="score_confidence")
    confidence = logit(walk.best - walk.lse) if confidence is None else confidence
    none = walk.best == -jnp.inf
    if sampling.greedy:
      chance = jnp.where(none, 0.0, jnp.where(jnp.isfinite(walk.best), 1.0, jnp.nan))
      return Proposal(walk.drafts, SparseDistribution(walk.drafts[..., None], chance[..., None]), confidence)
    one = jnp.where(jnp.isfinite(walk.best)[..., None], jax.nn.one_hot(walk.drafts, base.shape[-1]), jnp.nan)
    cold = (sampling.temperature < GREEDY_BELOW)[:, None, None]
    q = jnp.where(cold, one, jnp.exp(walk.scaled - walk.norm[..., None]))
    return Proposal(walk.drafts, jnp.where(none[..., None], 0.0, q), confidence)

  def _select_path(self, apply, hidden, base, anchor, keys, sampling: Sampling) -> Proposal:
    """A walk over each slot's candidates: argmax of the scores, or a draw from their softmax, which is the exact sparse q."""
    c = self.config
    ids, _ = top_candidates(adjusted(base, sampling), c.candidates)
    unary = jnp.take_along_axis(base, ids, -1)
    if not sampling.plain:
      return self._select_slots(apply, hidden, ids, unary, anchor, keys, sampling)
    noise = None if sampling.greedy else jax.vmap(lambda k: gumbel(k, c.candidates, Role.DRAFT))(keys)
    index, scores, q = apply(hidden, method=lambda m, h: m.walk(
        h, anchor=anchor, ids=ids, unary=unary, temperature=sampling.temperature, noise=noise))
    drafts = jnp.where(index < 0, -1, jnp.take_along_axis(ids, jnp.maximum(index, 0)[..., None], -1)[..., 0])
    previous = jnp.concatenate([anchor[:, None], drafts[:, :-1]], 1)
    confidence = apply(hidden, apply(previous, method="embed_previous"), method="score_confidence")
    confidence = best_logit(scores, sampling, ids) if confidence is None else confidence
    return Proposal(drafts, SparseDistribution(drafts[..., None] if sampling.greedy else ids, q), confidence)

  def _select_slots(self, apply, hidden, ids, unary, anchor, keys, sampling: Sampling) -> Proposal:
    """The same slot by slot, where settings of the sampling act on the scores, some by the drafts before."""

    def slot(carry, inputs):
      previous, sampling = carry
      h, candidates, u, key = inputs
      embedded = apply(previous, method="embed_previous")
      scores = apply(h, embedded, candidates, u, method="select")
      index, q = next_token(scores, sampling, key, Role.DRAFT, candidates)
      token = jnp.where(index < 0, -1, jnp.take_along_axis(candidates, jnp.maximum(index, 0)[:, None], 1)[:, 0])
      confidence = apply(h, embedded, method="score_confidence")
      confidence = best_logit(scores, sampling, candidates) if confidence is None else confidence
      return (token, sampling.after(token[:, None], 1)), (token, q, confidence)

    _, (drafts, q, confidence) = jax.lax.scan(
        slot, (anchor, sampling), tuple(x.swapaxes(0, 1) for x in (hidden, ids, unary, keys)))
    return proposal(drafts, ids, q, confidence, sampling)

  def block_outputs(self, params, batch: BlockBatch) -> DraftOutputs:
    return self.network.apply({"params": params}, batch)

  def select(self, params, outputs: DraftOutputs, ids: Int["B A L C"], unary: Float["B A L C"]) -> Float["B A L C"]:
    """Teacher-forced scores of candidates; only with the selector head."""
    return self.network.apply({"params": params}, outputs.hidden, outputs.embedded, ids, unary, method="select")

  def table(self, params) -> Float["V D"]:
    """What `DraftOutputs.rows` meet to give logits: the head, beside it the bias head's map to the vocabulary."""
    head = params["head"]["kernel"]
    return jnp.concatenate([head, params["markov"]["bias"]], 1) if "markov" in params else head
