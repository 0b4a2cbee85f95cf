"""Serial drafters: one layer, run once a draft on its own last hidden state (Eagle3, MTP)."""

import dataclasses
import math

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.config import SerialConfig
from specdec_jax.drafters.base import DraftOutputs, FromConfig, Proposal, best_logit, proposal
from specdec_jax.models.cache import Cache, init_cache, write_layer
from specdec_jax.models.layers import MLP, Attention, Head, Projection, RMSNorm, attend, embed, masked_softmax, param, rotary_angles
from specdec_jax.sampling import Role, Sampling, next_token
from specdec_jax.sharding import constrain_rows
from specdec_jax.typing import Bool, Float, Int


@flax.struct.dataclass
class SerialBatch:
  """Packed rows of a training batch: features [B,S,M,D], the target's taps; tokens, segments, positions [B,S]; anchors
  [B,A]: the columns to draft from, all of them where None. Every column is context for those after it either way."""

  features: Float["B S M D"]
  tokens: Int["B S"]
  segments: Int["B S"]
  positions: Int["B S"]
  anchors: Int["B A"] | None = None

  def pick(self, x):
    """The columns of x [B,S,…] that are drafted from, [B,A,…]."""
    if self.anchors is None:
      return x
    return jnp.take_along_axis(x, self.anchors.reshape(*self.anchors.shape, *(1,) * (x.ndim - 2)), 1)


@flax.struct.dataclass
class SerialState:
  """What was committed. A pair joins the feature of a position with the token after it; pair i stands in cache row i+1, and
  row 0 is never seen. pending [B,D]: the last feature, whose token is the anchor."""

  cache: Cache
  pending: Float["B D"]


class SerialNetwork(nn.Module):
  """Parameters and layer; see `SerialDrafter` for the functions that decoding and training call."""

  config: SerialConfig
  transposed: bool = False

  def setup(self):
    c, m = self.config, self.config.model
    eagle = c.kind == "eagle3"
    linear = lambda inputs: Projection(inputs, (m.width,), transposed=self.transposed, scale=m.init_scale)
    norm = lambda: RMSNorm(m.width, m.norm_eps)
    self.embedding = param(self, "embedding", nn.initializers.normal(m.init_scale), (m.vocab, m.width))
    self.head = Head(c.draft_vocab or m.vocab, m.width, m.init_scale, self.transposed)
    if c.draft_vocab:
      self.draft_ids = param(self, "draft_ids", lambda key: jnp.arange(c.draft_vocab, dtype=jnp.int32))
    self.fuse = linear(len(c.taps) * m.width if eagle else 2 * m.width)
    self.embedding_norm, self.hidden_norm, self.mlp_norm, self.final_norm = norm(), norm(), norm(), norm()
    if not eagle:
      self.attention_norm = norm()
    self.attention = Attention(m, self.transposed, 2 * m.width if eagle else 0)
    self.mlp = MLP(m, self.transposed)

  def fused(self, features: Float["B T M D"]) -> Float["B T D"]:
    """The feature that stands for the target's hidden state."""
    if self.config.kind == "mtp":
      return features[..., 0, :]
    return self.fuse(features.reshape(*features.shape[:-2], -1))

  def pair(self, hidden: Float["B T D"], tokens: Int["B T"]) -> tuple[Float["B T D"], Float["B T D"]]:
    """(residual, attention input) of features, or the layer's own outputs, joined with the tokens after them."""
    e = constrain_rows(self.embedding_norm(embed(self.embedding, tokens).astype(hidden.dtype)))
    if self.config.kind == "eagle3":
      return hidden, jnp.concatenate([e, self.hidden_norm(hidden)], -1)
    x = self.fuse(jnp.concatenate([self.hidden_norm(hidden), e], -1))
    return x, self.attention_norm(x)

  def keys_values(self, h, positions):
    return self.attention.keys_values(h, self._angles(positions))

  def queries(self, h, positions):
    return self.attention.queries(h, self._angles(positions))

  def _angles(self, positions):
    return rotary_angles(self.config.model.rotary, positions)

  def finish(self, x, attended) -> Float["B T D"]:
    """The layer's output, which is also the next step's hidden state."""
    x = x + self.attention.output(attended)
    return constrain_rows(x + self.mlp(self.mlp_norm(x)))

  def rows(self, hidden: Float["B T D"]) -> Float["B T D"]:
    """What the head reads."""
    return self.final_norm(hidden)

  def logits(self, hidden: Float["B T D"]) -> Float["B T V"]:
    """Logits over the whole vocabulary; ids that cannot be drafted have −inf."""
    logits = self.head(self.final_norm(hidden))
    if not self.config.draft_vocab:
      return logits
    full = jnp.full((*logits.shape[:-1], self.config.model.vocab), -jnp.inf)
    return full.at[..., self.draft_ids].set(logits)

  def __call__(self, batch: SerialBatch) -> DraftOutputs:
    """Training-time test: step s of column i reads the token i+1+s and the output of step s−1 of the same column; it sees
    the true past (step 0 of the columns up to i, within the window) and its own column's earlier steps (Eagle3 §3)."""
    c = self.config
    size = batch.tokens.shape[1]
    ahead = lambda x, s: jnp.pad(x[:, s:], ((0, 0), (0, min(s, size))))
    positions, segments = batch.pick(batch.positions), batch.pick(batch.segments)
    columns = jnp.broadcast_to(jnp.arange(size), batch.tokens.shape)
    causal = (batch.pick(columns)[..., None] >= jnp.arange(size)) & (segments[..., None] == batch.segments[:, None])
    window = c.model.windows[0]
    distance = positions[..., None] - batch.positions[:, None]
    x, h = self.pair(self.fused(batch.features), ahead(batch.tokens, 1))
    past = self.keys_values(h, batch.positions)
    x, h, own, out = batch.pick(x), batch.pick(h), [], []
    for s in range(c.steps):
      if s:
        x, h = self.pair(hidden, batch.pick(ahead(batch.tokens, s + 1)))
        own.append(self.keys_values(h, positions + s))
      valid = (batch.pick(ahead(batch.segments, s)) == segments) & (segments > 0)
      near = causal & valid[..., None]
      if window is not None:
        near &= distance + s < window
      recent = own if window is None else own[max(len(own) - window, 0) :]
      attended = attend_own(self.queries(h, positions + s), *past, near, recent, valid)
      hidden = self.finish(x, attended)
      out.append(hidden)
    hidden = jnp.stack(out, 2)
    return DraftOutputs(hidden, self.rows(hidden))

  def init_all(self, batch: SerialBatch):
    """Initialises every parameter."""
    return self.logits(self(batch).hidden)


def attend_own(
    q: Float["B A K G H"], keys: Float["B S K H"], values: Float["B S K H"], visible: Bool["B A S"], own, valid: Bool["B A"],
) -> Float["B A K G H"]:
  """Queries attend to the past that they see and to their own column's entries `own`, under one softmax."""
  scores = jnp.einsum("bakgh,bskh->bakgs", q, keys, preferred_element_type=jnp.float32)
  mine = [jnp.einsum("bakgh,bakh->bakg", q, k, preferred_element_type=jnp.float32)[..., None] for k, _ in own]
  sees = jnp.concatenate([visible, *(valid[..., None] for _ in own)], -1)[:, :, None, None]
  weights = masked_softmax(jnp.concatenate([scores, *mine], -1) / math.sqrt(q.shape[-1]), sees).astype(q.dtype)
  size = keys.shape[1]
  out = jnp.einsum("bakgs,bskh->bakgh", weights[..., :size], values)
  for t, (_, v) in enumerate(own):
    out += weights[..., size + t, None] * v[:, :, :, None]
  return out


@dataclasses.dataclass(frozen=True)
class SerialDrafter(FromConfig):
  """The functions of a serial drafter (`specdec_jax.drafters.base.DraftModel`)."""

  config: SerialConfig
  transposed: bool = False
  dtype: str = "float32"

  @property
  def network(self) -> SerialNetwork:
    return SerialNetwork(self.config, self.transposed)

  def init_params(self, key):
    """Fresh parameters."""
    ones = jnp.ones((1, 1), jnp.int32)
    features = jnp.zeros((1, 1, len(self.config.taps), self.config.model.width))
    return self.network.init(key, SerialBatch(features, ones, ones, 0 * ones), method="init_all")["params"]

  def init_state(self, batch: int, length: int) -> SerialState:
    m = self.config.model
    cache = init_cache([(m.kv_heads, m.head_dim)], batch, length + 1, self.dtype, stacked=False)
    return SerialState(cache, jnp.zeros((batch, m.width), self.dtype))

  def extend(self, params, state: SerialState, features, tokens, positions, valid) -> SerialState:
    apply = lambda *args, method: self.network.apply({"params": params}, *args, method=method)
    fused = apply(features, method="fused").astype(self.dtype)
    hidden = jnp.concatenate([state.pending[:, None], fused[:, :-1]], 1)
    _, h = apply(hidden, tokens, method="pair")
    k, v = apply(h, positions - 1, method="keys_values")
    start = positions[:, 0]
    keys, values = write_layer(state.cache.keys[0], state.cache.values[0], k, v, start)
    last = jnp.take_along_axis(fused, jnp.maximum(valid - 1, 0)[:, None, None], 1)[:, 0]
    return SerialState(Cache((keys,), (values,), start + valid), jnp.where((valid > 0)[:, None], last, state.pending))

  def propose(self, params, state: SerialState, anchor, position, keys, sampling: Sampling) -> Proposal:
    apply = lambda *args, method: self.network.apply({"params": params}, *args, method=method)
    rows = jnp.arange(state.cache.capacity)
    window = self.config.model.windows[0]

    def step(carry, inputs):
      hidden, token, held, sampling = carry
      k, key = inputs
      row = position + k
      x, h = apply(hidden[:, None], token[:, None], method="pair")
      at = (row - 1)[:, None]
      held = write_layer(*held, *apply(h, at, method="keys_values"), row)
      visible = (rows >= 1) & (rows <= row[:, None])
      if window is not None:
        visible &= row[:, None] - rows < window
      attended = attend(apply(h, at, method="queries"), *(b.astype(h.dtype) for b in held), visible[:, None])
      hidden = apply(x, attended, method="finish")
      logits = apply(hidden, method="logits")[:, 0]
      token, q = next_token(logits, sampling, key, Role.DRAFT)
      return (hidden[:, 0], token, held, sampling.after(token[:, None], 1)), (token, q, best_logit(logits, sampling))

    first = (state.pending, anchor, (state.cache.keys[0], state.cache.values[0]), sampling)
    _, (drafts, q, confidence) = jax.lax.scan(step, first, (jnp.arange(self.config.steps), keys.swapaxes(0, 1)))
    return proposal(drafts, None, q, confidence, sampling)

  def block_outputs(self, params, batch: SerialBatch) -> DraftOutputs:
    return self.network.apply({"params": params}, batch)

  def table(self, params) -> Float["V D"]:
    """What `DraftOutputs.rows` meet to give logits."""
    return params["head"]["kernel"]
