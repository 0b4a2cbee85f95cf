"""The light parts on a block drafter's backbone: sequential heads, path selector, confidence, dynamic convolution."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.kernels import dynamic_conv, path_walk
from specdec_jax.models.layers import Projection, embed, param, project_vocab
from specdec_jax.typing import Float, Int

CHUNK = 128  # Ids whose maximum the search for candidates looks at first: the lanes of a TPU register.


class BiasHead(nn.Module):
  """The bias that the tokens drafted before a slot put on its logits, of rank R (DSpark §3.1).

  kind "markov": B = W₁[x] W₂ of the previous token x. "gated": its embedding times σ(W_g [h; W₁[x]] + b). "rnn": a
  recurrent state over the whole drafted prefix, whose update and output come of one projection of [s; W₁[x]; h].
  """

  kind: str
  vocab: int
  rank: int
  width: int
  transposed: bool = False

  def setup(self):
    self.previous = param(self, "previous", nn.initializers.normal(0.02), (self.vocab, self.rank))
    self.table = param(self, "bias", nn.initializers.zeros, (self.vocab, self.rank))
    if self.kind == "gated":
      self.gate = Projection(self.width + self.rank, (self.rank,), bias=True, transposed=self.transposed)
    if self.kind == "rnn":
      self.joint = Projection(2 * self.rank + self.width, (3, self.rank), bias=True, transposed=self.transposed)

  def embed(self, tokens: Int["B L"]) -> Float["B L R"]:
    """W₁[x], also a feature of the confidence head."""
    return embed(self.previous, tokens)

  def init_state(self, *batch: int) -> Float["B R"]:
    """The state before the first slot; empty where the head has none."""
    return jnp.zeros((*batch, self.rank if self.kind == "rnn" else 0))

  def step(self, state: Float["B R"], embedded: Float["B R"], hidden: Float["B D"]) -> tuple[Float["B R"], Float["B R"]]:
    """One slot: (next state, what `bias` maps to the vocabulary)."""
    if self.kind == "markov":
      return state, embedded
    if self.kind == "gated":
      return state, embedded * nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded], -1)))
    z = self.joint(jnp.concatenate([state.astype(hidden.dtype), embedded, hidden], -1))
    keep = nn.sigmoid(z[..., 0, :])
    return (keep * state + (1 - keep) * jnp.tanh(z[..., 1, :])).astype(state.dtype), jnp.tanh(z[..., 2, :])

  def steps(self, embedded: Float["B L R"], hidden: Float["B L D"]) -> Float["B L R"]:
    """All slots of blocks whose previous tokens are known."""
    state = self.init_state(*hidden.shape[:-2])
    if not state.shape[-1]:
      return self.step(jnp.zeros((*hidden.shape[:-1], 0)), embedded, hidden)[1]
    out = []
    for k in range(hidden.shape[-2]):
      state, y = self.step(state, embedded[..., k, :], hidden[..., k, :])
      out.append(y)
    return jnp.stack(out, -2)

  def walk_inputs(self, hidden: Float["B L D"]):
    """Arguments of `kernels.markov_walk` in the dtype of `hidden`; the projection is split into what the hidden states give, for
    all slots at once, and what the slot before gives."""
    cast = lambda x: x.astype(hidden.dtype)
    inputs = {"kind": self.kind, "previous": cast(self.previous), "table": cast(self.table)}
    if self.kind == "markov":
      return inputs
    parameters = (self.gate if self.kind == "gated" else self.joint).variables["params"]
    kernel = cast(jnp.moveaxis(parameters["kernel"], -1, 0) if self.transposed else parameters["kernel"])
    kernel = kernel.reshape(kernel.shape[0], -1)
    split = self.width if self.kind == "gated" else 2 * self.rank
    of_hidden, weights = (kernel[:split], kernel[split:]) if self.kind == "gated" else (kernel[split:], kernel[:split])
    projected = jnp.dot(hidden, of_hidden, preferred_element_type=jnp.float32) + parameters["bias"].reshape(-1).astype(jnp.float32)
    return inputs | {"projected": projected, "weights": weights}

  def bias(self, features: Float["B L R"]) -> Float["B L V"]:
    return project_vocab(features, self.table, self.transposed)


class SelectorHead(nn.Module):
  """Scores of a slot's candidates b after a predecessor a: S(a, b) = U(b) + ⟨A(a) ⊙ H(h), B(b)⟩ (DFlash 2)."""

  vocab: int
  rank: int
  width: int
  transposed: bool = False

  def setup(self):
    self.predecessor = param(self, "predecessor", nn.initializers.normal(0.02), (self.vocab, self.rank))
    self.successor = param(self, "successor", nn.initializers.zeros, (self.vocab, self.rank))
    self.gate = Projection(self.width, (self.rank,), transposed=self.transposed)

  def embed(self, tokens: Int["B L"]) -> Float["B L R"]:
    """A(a), also a feature of a confidence head."""
    return embed(self.predecessor, tokens)

  def scores(self, embedded: Float["B L R"], hidden: Float["B L D"], ids: Int["B L C"], unary: Float["B L C"]) -> Float["B L C"]:
    """S(a, b) of the candidates `ids` with logits `unary`, for predecessors embedded as A(a)."""
    after = embed(self.successor, ids)
    pair = jnp.einsum("...r,...cr->...c", embedded * self.gate(hidden), after, preferred_element_type=jnp.float32)
    return unary + pair

  def walk(self, hidden: Float["B L D"], implementation: str | None, **arguments) -> tuple[Int["B L"], Float["B L C"], Float["B L C"]]:
    """The path through the candidates of every slot; arguments and result as of `path_walk`."""
    return path_walk(
        gate=self.gate(hidden), predecessor=self.predecessor, successor=self.successor, implementation=implementation, **arguments)


class ConfidenceHead(nn.Module):
  """c = wᵀ[h; W₁[x_prev]] + b, a logit (DSpark §3.1; the published code has the bias)."""

  inputs: int

  @nn.compact
  def __call__(self, features: Float["B L D"]) -> Float["B L"]:
    kernel = param(self, "kernel", nn.initializers.zeros, (1, self.inputs))
    bias = param(self, "bias", nn.initializers.zeros, (1,))
    return (features.astype(jnp.float32) @ kernel[0].astype(jnp.float32)) + bias.astype(jnp.float32)


class DynamicConv(nn.Module):
  """Depthwise convolution over the slots of a block, before and after a sublayer (DFlash 2).

  A coefficient is a learned one of the channel plus one that is predicted from the sublayer's normed input at the slot and shared
  by a group of channels (`kernels.dynamic_conv`, run as `kernels` says); starts as the identity.
  """

  taps: int
  group: int
  width: int
  transposed: bool = False
  kernels: str | None = None

  def setup(self):
    identity = lambda key, shape: jnp.zeros(shape).at[:, 0].set(1.0)
    self.base = param(self, "base", identity, (2, self.taps, self.width))
    self.dynamic = Projection(self.width, (2, self.taps, self.width // self.group), transposed=self.transposed, scale=0.0)

  def coefficients(self, x: Float["B T D"]) -> Float["B T 2 taps D/group"]:
    """The predicted part, from the sublayer's normed input: before (0) and after (1) the sublayer."""
    return self.dynamic(x)

  def __call__(self, x: Float["B T D"], coefficients, part: int, slots: int, residual: Float["B T D"] | None = None) -> Float["B T D"]:
    """Convolves blocks of `slots` tokens with one of the two sets; adds `residual`, if any."""
    return dynamic_conv(
        x=x, base=self.base, dynamic=coefficients, slots=slots, part=part, residual=residual, implementation=self.kernels)


def top_candidates(logits: Float["B L V"], count: int) -> tuple[Int["B L C"], Float["B L C"]]:
  """The `count` best tokens of every slot and their logits, best first, lowest id on ties."""
  def plain(x):
    values, ids = jax.lax.top_k(x, count)
    return ids.astype(jnp.int32), values

  if logits.shape[-1] < 16 * CHUNK * max(count, 16):  # From where on chunks are faster on CPUs.
    return plain(logits)
  return jax.lax.platform_dependent(logits, tpu=plain, default=lambda x: top_of_chunks(x, count))


def top_of_chunks(logits: Float["B L V"], count: int) -> tuple[Int["B L C"], Float["B L C"]]:
  """`jax.lax.top_k` in two stages: of the `count` chunks of the vocabulary with the best maxima, the `count` best ids.

  Exact: an id in another chunk has `count` chunks before its own, each with a maximum that is better than it, or equal and of a lower
  id. So `count` ids come before it; and as the chunks taken stand in ascending order, ties among their ids go to the lowest. Among
  maxima NaN, which a compiler may drop, is +inf."""
  more = -logits.shape[-1] % CHUNK
  chunks = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, more)], constant_values=-jnp.inf)
  chunks = chunks.reshape(*logits.shape[:-1], -1, CHUNK)
  maxima = jnp.where(jnp.isnan(chunks), jnp.inf, chunks).max(-1)
  taken = jnp.sort(jax.lax.top_k(maxima, count)[1], -1)
  best = jnp.take_along_axis(chunks, taken[..., None], -2).reshape(*logits.shape[:-1], -1)
  values, at = jax.lax.top_k(best, count)
  return (jnp.take_along_axis(taken, at // CHUNK, -1) * CHUNK + at % CHUNK).astype(jnp.int32), values
