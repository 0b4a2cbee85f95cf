"""One decoder for the Llama, Qwen3, Qwen3.5 and Gemma 4 families, by config."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.config import ModelConfig
from specdec_jax.kernels import default_implementation, ragged_verify, write_rows
from specdec_jax.models import cache as cache_lib
from specdec_jax.models import delta
from specdec_jax.models.cache import Cache
from specdec_jax.models.delta import DeltaNet
from specdec_jax.models.layers import Attention, Head, Layer, RMSNorm, attend, embed, param, project_vocab, rotary_angles, soft_capped
from specdec_jax.models.rows import Rows
from specdec_jax.sharding import constrain_rows
from specdec_jax.typing import Bool, Float, Int


class Decoder(nn.Module):
  """A decoder-only transformer with taps and an optional slot cache.

  stacked: layer parameters carry a leading axis Y and run under one `lax.scan`, so that compile time stays flat with depth and
    taps; otherwise they are a dict {"0": …} and run unrolled, a third faster on CPU, and the only way for layers of several forms.
  transposed: kernels are stored output-major (see `Projection`).
  kernels: which implementation attends to the cache (`specdec_jax.kernels.base.IMPLEMENTATIONS`), the backend's where None.
  """

  config: ModelConfig
  stacked: bool = True
  transposed: bool = False
  kernels: str | None = None

  def setup(self):
    c = self.config
    self.embedding = param(self, "embedding", nn.initializers.normal(c.init_scale), (c.vocab, c.width))
    self.layers = param(self, "layers", self._init_layers)
    self.final_norm = RMSNorm(c.width, c.norm_eps, c.norm_offset)
    if not c.tied:
      self.head = Head(c.vocab, c.width, c.init_scale, self.transposed)

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: str) -> Cache:
    """An empty cache of `length` rows for each of `batch` slots."""
    c = self.config
    sizes = [None if i in c.recurrent else (c.layer(i).kv_heads, c.layer(i).head_dim) for i in range(c.layers)]
    states = tuple(delta.init_state(c.delta, batch, dtype) if i in c.recurrent else None for i in range(c.layers)) if c.recurrent else ()
    return cache_lib.init_cache(sizes, batch, length, dtype, self.stacked, states)

  @nn.nowrap
  def mixer(self, i: int) -> type[nn.Module]:
    """What layer i mixes tokens with. Its `rewinds` says whether accepted tokens can be kept without those behind them."""
    return DeltaNet if i in self.config.recurrent else Attention

  @nn.nowrap
  def check_rewinds(self, name: str) -> None:
    """Raises ValueError for a model that cannot be decoded speculatively; `__call__` without a cache is free to all."""
    kinds = {i: self.mixer(i) for i in range(self.config.layers)}
    stuck = {k.__name__: [i for i in kinds if kinds[i] is k] for k in kinds.values() if not k.rewinds}
    if stuck:
      what = "; ".join(f"{kind} (layers {', '.join(map(str, where))})" for kind, where in stuck.items())
      raise ValueError(
          f"{name} cannot be decoded: no accepted prefix can be gone back to in {what}. Features for training can be had of it")

  def _layer(self, i: int) -> Layer:
    return Layer(self.config.layer(i), self.transposed, self.mixer(i), parent=None)

  def _init_layers(self, key):
    c = self.config
    x = jnp.zeros((1, 1, c.width))

    def attending(attention, h):
      angles = rotary_angles(attention.config.rotary, jnp.zeros((1, 1), jnp.int32))
      attention.keys_values(h, angles)
      return attention.queries(h, angles), None

    def recurring(net, h):
      *inputs, gate = net.inputs(h)
      return (net(*inputs)[0], gate), None

    keys = jax.random.split(key, c.layers)
    init = lambda k, i=0: self._layer(i).init(k, x, recurring if i in c.recurrent else attending)["params"]
    return jax.vmap(init)(keys) if self.stacked else {str(i): init(k, i) for i, k in enumerate(keys)}

  def __call__(
      self, tokens: Int["B T"], cache: Cache | None = None, segments: Int["B T"] | None = None, taps: Sequence[int] = (),
      rows: Rows | None = None, reach: int | None = None,
  ) -> tuple[Float["B T D"], Float["B T M D"], Cache | None]:
    """Final-normed hidden states, the raw outputs of the tapped layers (-1: the embedding), and the written cache.

    With a cache, tokens follow each slot's committed rows; they are written there and the lengths stay as they were:
    `Cache.commit` is the caller's decision. Without one, `segments` [B,T] packs several texts in a row: 0 is padding, a token
    sees earlier tokens of its own segment only, and positions count from the segment's start.

    rows: with a cache, the tokens that are computed; hidden states and taps are then [1,n,…], in their order. reach: rows of each slot
    that are attended to, at least those of the longest one behind this call; all where None.
    """
    c = self.config
    start = cache.lengths if cache is not None else None
    positions, visible = _cached_view(tokens, cache, reach) if cache is not None else packed_view(tokens, segments)
    at = positions if rows is None else rows.flat(positions)
    angles = {r: rotary_angles(r, at) for r in {c.layer(i).rotary: None for i in range(c.layers) if i not in c.recurrent}}
    key_positions = jnp.arange(visible.shape[-1])[None, None] if cache is not None else positions[:, None, :]
    x = embed(self.embedding, tokens if rows is None else rows.flat(tokens))
    x = constrain_rows(x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype), rows is not None)

    def attending(buffers, window, index=None):
      """`mix` of an attention layer; buffers: its keys and values or, with a traced `index`, the stacked ones."""
      seen = visible if window is None else visible & (positions[..., None] - key_positions < window)

      def mix(attention, h):
        turned = angles[attention.config.rotary]
        (q, gate), (k, v) = attention.queries_and_gate(h, turned), attention.keys_values(h, turned)
        if buffers is not None and (self.kernels or default_implementation()) != "reference":
          out, new = self._attend_cached(q, k, v, buffers, index, start, window, rows, reach)
          return out if gate is None else out * gate, new
        if rows is not None:
          q = rows.pad(q)
        if buffers is None:
          new, held = None, (cache_lib.as_keys(k), cache_lib.as_values(v))
        elif index is None:
          new = held = cache_lib.write_layer(*buffers, k, v, start, rows)
        else:
          new = cache_lib.write_stacked(*buffers, index, k, v, start, rows)
          held = tuple(jax.lax.dynamic_index_in_dim(b, index, keepdims=False) for b in new)
        if buffers is not None:
          held = held[0][..., :reach], held[1][..., :reach, :]
        out = attend(q, *(r.astype(h.dtype) for r in held), seen, c.score_scale)
        out = out if rows is None else rows.flat(out)
        if buffers is not None:  # The cache holds 0 for values that are no numbers; the row that they come from must not hide it.
          out = jnp.where(jnp.isfinite(v).all((2, 3))[..., None, None, None], out, jnp.nan)
        return out if gate is None else out * gate, new

      return mix

    def recurring(state):
      """`mix` of a recurrent layer."""

      def mix(net, h):
        *inputs, gate = net.inputs(h)
        if rows is not None:
          inputs = map(rows.pad, inputs)
        out, update = net(*inputs, state, segments)
        return (out if rows is None else rows.flat(out), gate), update

      return mix

    tapped = {-1: x}
    if self.stacked:
      def run(params, x, buffers, index, window):
        x, new = self._layer(0).apply({"params": params}, x, attending(buffers, window, index))
        return constrain_rows(x, rows is not None), new

      buffers = (cache.keys, cache.values) if cache is not None else None
      x, buffers = self._scan(run, x, buffers, sorted({t for t in taps if t >= 0}), tapped)
      cache = cache.replace(keys=buffers[0], values=buffers[1]) if cache is not None else None
    else:
      news = []
      for i in range(c.layers):
        if i in c.recurrent:
          mix = recurring(None if cache is None else cache.states[i])
        else:
          mix = attending(None if cache is None else (cache.keys[i], cache.values[i]), c.windows[i])
        x, new = self._layer(i).apply({"params": self.layers[str(i)]}, x, mix)
        x = constrain_rows(x, rows is not None)
        news.append(new)
        tapped[i] = x
      cache = self._written(cache, news) if cache is not None else None
    stack = jnp.stack([tapped[t] for t in taps], 2) if taps else jnp.zeros((*x.shape[:2], 0, x.shape[-1]), x.dtype)
    return self.final_norm(x), stack, cache

  def _attend_cached(self, q, k, v, buffers, layer, start, window, rows: Rows | None, reach: int | None):
    """What `mix` does with a cache, by kernels: they write and read stacked buffers in place, and only the rows that are seen."""
    whole = (lambda x: x) if rows is None else rows.pad
    at = {} if rows is None else {"slot": rows.slot, "offset": rows.offset}
    common = {"start": start, "layer": layer, "implementation": self.kernels}
    keys, values = write_rows(keys=buffers[0], values=buffers[1], k=whole(k), v=whole(v), **common)
    out = ragged_verify(
        q=q.reshape(-1, *q.shape[2:]), keys=keys, values=values, width=whole(k).shape[1], window=window, reach=reach,
        scale=self.config.score_scale, **at, **common)
    out = out.reshape(q.shape)
    return jnp.where(jnp.isfinite(v).all((2, 3))[..., None, None, None], out, jnp.nan), (keys, values)

  def _written(self, cache: Cache, news) -> Cache:
    """The cache after a call whose unrolled layers gave `news`: keys and values, or the update of a state."""
    recurrent = self.config.recurrent
    keys, values = zip(*((None, None) if i in recurrent else new for i, new in enumerate(news)))
    fed = tuple(new if i in recurrent else None for i, new in enumerate(news)) if recurrent else ()
    return cache.replace(keys=keys, values=values, fed=fed)

  def _scan(self, run, x, buffers, taps: Sequence[int], tapped):
    """All layers; adds the outputs of `taps` to `tapped`. The cache is the carry, so it is updated in place and never copied
    whole, and so are the taps: each layer writes its output to its place, those that are not tapped to one behind the last."""
    c = self.config
    windowed = any(c.windows)
    windows = jnp.array([w or jnp.iinfo(jnp.int32).max for w in c.windows])
    place = jnp.array([taps.index(i) if i in taps else len(taps) for i in range(c.layers)])

    def step(carry, i):
      x, buffers, kept = carry
      params = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), self.layers)
      x, new = run(params, x, buffers, i, windows[i] if windowed else None)
      kept = jax.lax.dynamic_update_index_in_dim(kept, x, place[i], 0) if taps else kept
      return (x, new, kept), None

    kept = jnp.zeros((len(taps) + 1, *x.shape), x.dtype) if taps else None
    (x, buffers, kept), _ = jax.lax.scan(step, (x, buffers, kept), jnp.arange(c.layers))
    tapped |= {t: kept[m] for m, t in enumerate(taps)}
    return x, buffers

  def logits(self, hidden: Float["B T D"]) -> Float["B T V"]:
    """Next-token logits of final-normed hidden states; call it on the rows that are needed only."""
    logits = project_vocab(hidden, self.embedding, self.transposed) if self.config.tied else self.head(hidden)
    return soft_capped(logits, self.config.logit_cap)

  def init_all(self, tokens):
    """Initialises every parameter, the head included."""
    return self.logits(self(tokens)[0])


def head_table(params) -> Float["V D"]:
  """The head [V,D] of a decoder's parameters: its embedding table where the two are tied."""
  return params["head"]["kernel"] if "head" in params else params["embedding"]


def _cached_view(tokens, cache: Cache, reach: int | None) -> tuple[Int["B T"], Bool["B T S"]]:
  positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
  return positions, jnp.arange(min(reach or cache.capacity, cache.capacity))[None, None] <= positions[..., None]


def packed_view(tokens: Int["B T"], segments: Int["B T"] | None) -> tuple[Int["B T"], Bool["B T S"]]:
  """Positions of packed texts, counted from each text's start, and which keys a token sees."""
  index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  causal = index[:, :, None] >= index[:, None, :]
  if segments is None:
    return index, causal
  same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] != 0)
  visible = causal & same
  return jnp.maximum(visible.sum(-1) - 1, 0), visible
