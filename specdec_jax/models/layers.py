"""The layers that targets and drafters share."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.config import ModelConfig, Rotary
from specdec_jax.sharding import constrain
from specdec_jax.typing import Bool, Float, Int

_ACTIVATIONS = {
    "silu": nn.silu, "relu": nn.relu, "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True)}


def rms_normed(x, eps: float):
  """x / rms(x) over the last axis, the mean of squares in float32."""
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)).astype(x.dtype)


def param(module: nn.Module, name: str, init: Callable, *arguments) -> Any:
  """`module`'s parameter: as it is where there is one, or init(key, *arguments). `Module.param` would trace `init` again at every use,
  only to compare shapes, for a decoder a third of all tracing; loaders compare them once."""
  return module.get_variable("params", name) if module.has_variable("params", name) else module.param(name, init, *arguments)


class RMSNorm(nn.Module):
  """x / rms(x) · (offset + scale) over the last axis."""

  width: int
  eps: float
  offset: float = 0.0

  @nn.compact
  def __call__(self, x):
    scale = param(self, "scale", nn.initializers.constant(1.0 - self.offset), (self.width,))
    return rms_normed(x, self.eps) * (self.offset + scale).astype(x.dtype)


class Projection(nn.Module):
  """A linear map of the last axis to `features` (one axis or several), as one two-dimensional product.

  `transposed` stores the kernel output-major, which XLA's CPU backend multiplies faster for 2 to 16 rows (`output_major`).
  """

  inputs: int
  features: tuple[int, ...]
  bias: bool = False
  transposed: bool = False
  scale: float = 0.02

  @nn.compact
  def __call__(self, x):
    shape = (*self.features, self.inputs) if self.transposed else (self.inputs, *self.features)
    kernel = param(self, "kernel", nn.initializers.normal(self.scale), shape).astype(x.dtype)
    rows = x.reshape(-1, self.inputs)
    if self.transposed:
      y = output_major(kernel.reshape(-1, self.inputs), rows)
    else:
      y = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())))  # Output axes stay apart, so that a mesh may split any of them.
    y = y.reshape(*x.shape[:-1], *self.features)
    if self.bias:
      y = y + param(self, "bias", nn.initializers.zeros, self.features).astype(x.dtype)
    return y


def output_major(kernel: Float["F D"], rows: Float["N D"], dtype=None) -> Float["N F"]:
  """rows · kernelᵀ. For few rows it is computed as kernel · rowsᵀ, behind a barrier that keeps XLA from turning the product
  round again: its CPU backend takes twice the time for the other form at 2 to 16 rows."""
  if rows.shape[0] > 32:
    return jax.lax.dot_general(rows, kernel, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
  y = jax.lax.dot_general(kernel, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
  return jax.lax.optimization_barrier(y).T


def embed(table: Float["V D"], tokens: Int["B T"]) -> Float["B T D"]:
  """Rows of an embedding table, split by vocabulary alone while they are looked up; ids beyond it give its ends."""
  return jnp.take(constrain(table, "tensor", None), tokens, axis=0, mode="clip")


def rotary_angles(rotary: Rotary, positions: Int["B T"]) -> tuple[Float["B T 1 H"], Float["B T 1 H"]]:
  """cos and sin [B,T,1,width/2] of every position."""
  frequencies, factor = rotary.frequencies()
  angles = positions[..., None, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float["B T K H"], angles) -> Float["B T K H"]:
  """Rotary embedding in the half-split form, over the first channels that `angles` covers; heads are x's axes after T."""
  cos, sin = (a.reshape(*a.shape[:2], *(1,) * (x.ndim - 3), a.shape[-1]).astype(x.dtype) for a in angles)
  half = cos.shape[-1]
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(
    q: Float["B T K G H"], k: Float["B K H S"], v: Float["B K S H"], visible: Bool["B T S"], scale: float | None = None,
) -> Float["B T K G H"]:
  """Grouped-query attention, softmax in float32; scale: of the scores, 1/√H where None. A query that sees nothing gets zeros."""
  batch, count, heads, groups, size = q.shape
  rows = q.swapaxes(1, 2).reshape(batch, heads, count * groups, size)
  scores = scaled(jnp.matmul(rows, k, preferred_element_type=jnp.float32), size, scale)
  weights = masked_softmax(scores.reshape(batch, heads, count, groups, -1), visible[:, None, :, None, :])
  out = weights.astype(v.dtype).reshape(batch, heads, count * groups, -1) @ v
  return out.reshape(batch, heads, count, groups, size).swapaxes(1, 2)


def scaled(scores, size: int, scale: float | None):
  """Attention scores of heads of `size` channels times `scale`, 1/√size where None."""
  return scores / math.sqrt(size) if scale is None else scores * scale


def soft_capped(logits, cap: float | None):
  """c · tanh(logits / c); the logits where the cap is None."""
  return logits if cap is None else cap * jnp.tanh(logits / cap)


def masked_softmax(scores, visible):
  """Softmax of the last axis over the visible entries; all zeros where none is."""
  scores = jnp.where(visible, scores, -jnp.inf)
  top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
  e = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
  return e / jnp.maximum(e.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


class Attention(nn.Module):
  """The projections of an attention layer; who attends to what is the caller's business."""

  rewinds = True  # Rows are forgotten by not looking at them.

  config: ModelConfig
  transposed: bool = False
  inputs: int = 0  # width of what queries, keys and values are made of; 0: the model's

  def setup(self):
    c = self.config
    inputs = self.inputs or c.width
    linear = lambda inputs, features: Projection(inputs, features, c.attention_bias, self.transposed, c.init_scale)
    self.q = linear(inputs, (c.kv_heads, c.groups, *((2,) if c.gated else ()), c.head_dim))
    if c.shared_kv:
      self.k = linear(inputs, (c.kv_heads, c.head_dim))
    else:
      self.kv = linear(inputs, (c.kv_heads, 2, c.head_dim))
    self.o = linear(c.heads * c.head_dim, (c.width,))
    if c.qk_norm:
      self.q_norm = RMSNorm(c.head_dim, c.norm_eps, c.norm_offset)
      self.k_norm = RMSNorm(c.head_dim, c.norm_eps, c.norm_offset)

  def queries(self, x: Float["B T D"], angles) -> Float["B T K G H"]:
    return self.queries_and_gate(x, angles)[0]

  def queries_and_gate(self, x: Float["B T D"], angles) -> tuple[Float["B T K G H"], Float["B T K G H"] | None]:
    """Queries, and what the attended values are multiplied by; None without a gate."""
    q, gate = self.q(x), None
    if self.config.gated:
      q, gate = q[..., 0, :], nn.sigmoid(q[..., 1, :])
    return rotate(self.q_norm(q) if self.config.qk_norm else q, angles), gate

  def keys_values(self, x: Float["B T D"], angles) -> tuple[Float["B T K H"], Float["B T K H"]]:
    c = self.config
    if c.shared_kv:
      k = v = self.k(x)
    else:
      kv = self.kv(x)
      k, v = kv[..., 0, :], kv[..., 1, :]
    return rotate(self.k_norm(k) if c.qk_norm else k, angles), rms_normed(v, c.norm_eps) if c.sandwich else v

  def output(self, attended: Float["B T K G H"]) -> Float["B T D"]:
    return self.o(attended.reshape(*attended.shape[:-3], -1))


class MLP(nn.Module):
  """down(activation(gate(x)) · up(x))."""

  config: ModelConfig
  transposed: bool = False

  @nn.compact
  def __call__(self, x: Float["B T D"]) -> Float["B T D"]:
    c = self.config
    gate_up = Projection(c.width, (2, c.mlp), c.mlp_bias, self.transposed, c.init_scale, name="gate_up")(x)
    y = _ACTIVATIONS[c.activation](gate_up[..., 0, :]) * gate_up[..., 1, :]
    return Projection(c.mlp, (c.width,), c.mlp_bias, self.transposed, c.init_scale, name="down")(y)


class Layer(nn.Module):
  """A pre-norm decoder layer. `mix` does the attending: (attention module, normed input) → what its `output` reads.

  mixer: what stands in the place of attention.
  """

  config: ModelConfig
  transposed: bool = False
  mixer: type[nn.Module] = Attention

  def setup(self):
    c = self.config
    norm = lambda: RMSNorm(c.width, c.norm_eps, c.norm_offset)
    self.attention_norm, self.mlp_norm = norm(), norm()
    self.attention = self.mixer(c, self.transposed)
    self.mlp = MLP(c, self.transposed)
    if c.sandwich:
      self.attention_out_norm, self.mlp_out_norm = norm(), norm()
      self.scalar = param(self, "scalar", nn.initializers.ones, (1,))

  def __call__(self, x, mix):
    attended, extra = mix(self.attention, self.attention_norm(x))
    y = self.attention.output(attended)
    if not self.config.sandwich:
      x = x + y
      return x + self.mlp(self.mlp_norm(x)), extra
    x = x + self.attention_out_norm(y)
    x = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
    return x * jax.lax.stop_gradient(self.scalar).astype(x.dtype), extra  # Stored, never trained.


class Head(nn.Module):
  """Hidden states to logits over the vocabulary, in float32."""

  vocab: int
  width: int
  scale: float = 0.02
  transposed: bool = False

  @nn.compact
  def __call__(self, x: Float["B T D"]) -> Float["B T V"]:
    table = param(self, "kernel", nn.initializers.normal(self.scale), (self.vocab, self.width))
    return project_vocab(x, table, self.transposed)


def project_vocab(x: Float["B T D"], table: Float["V D"], transposed: bool = False) -> Float["B T V"]:
  """x · tableᵀ in float32; `table` [V,D] is an embedding table or a head; `transposed` as in `Projection`."""
  rows, table = x.reshape(-1, x.shape[-1]), table.astype(x.dtype)
  if transposed:
    y = output_major(table, rows, jnp.float32)
  else:
    y = jax.lax.dot_general(rows, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  return y.reshape(*x.shape[:-1], -1)
