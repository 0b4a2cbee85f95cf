"""The layers that targets and drafters share."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.config import ModelConfig, Rotary
from specdec_jax.sharding import constrain
from specdec_jax.typing import Bool, Float, Int

_ACTIVATIONS = {
    "silu": nn.silu, "relu": nn.relu, "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True)}


class RMSNorm(nn.Module):
  """x / rms(x) · scale over the last axis, the mean of squares in float32."""

  width: int
  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (self.width,))
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    return x32.astype(x.dtype) * scale.astype(x.dtype)


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
    kernel = self.param("kernel", nn.initializers.normal(self.scale), shape).astype(x.dtype)
    rows = x.reshape(-1, self.inputs)
    if self.transposed:
      y = output_major(kernel.reshape(-1, self.inputs), rows)
    else:
      y = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())))  # Output axes stay apart, so that a mesh may split any of them.
    y = y.reshape(*x.shape[:-1], *self.features)
    if self.bias:
      y = y + self.param("bias", nn.initializers.zeros, self.features).astype(x.dtype)
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


def attend(q: Float["B T K G H"], k: Float["B K H S"], v: Float["B K S H"], visible: Bool["B T S"]) -> Float["B T K G H"]:
  """Grouped-query attention, softmax in float32. A query that sees nothing gets zeros."""
  batch, count, heads, groups, size = q.shape
  rows = q.swapaxes(1, 2).reshape(batch, heads, count * groups, size)
  scores = jnp.matmul(rows, k, preferred_element_type=jnp.float32) / math.sqrt(size)
  weights = masked_softmax(scores.reshape(batch, heads, count, groups, -1), visible[:, None, :, None, :])
  out = weights.astype(v.dtype).reshape(batch, heads, count * groups, -1) @ v
  return out.reshape(batch, heads, count, groups, size).swapaxes(1, 2)


def masked_softmax(scores, visible):
  """Softmax of the last axis over the visible entries; all zeros where none is."""
  scores = jnp.where(visible, scores, -jnp.inf)
  top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
  e = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
  return e / jnp.maximum(e.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


class Attention(nn.Module):
  """The projections of an attention layer; who attends to what is the caller's business."""

  config: ModelConfig
  transposed: bool = False
  inputs: int = 0  # width of what queries, keys and values are made of; 0: the model's

  def setup(self):
    c = self.config
    inputs = self.inputs or c.width
    linear = lambda inputs, features: Projection(inputs, features, c.attention_bias, self.transposed, c.init_scale)
    self.q = linear(inputs, (c.kv_heads, c.groups, c.head_dim))
    self.kv = linear(inputs, (c.kv_heads, 2, c.head_dim))
    self.o = linear(c.heads * c.head_dim, (c.width,))
    if c.qk_norm:
      self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
      self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

  def queries(self, x: Float["B T D"], angles) -> Float["B T K G H"]:
    q = self.q(x)
    return rotate(self.q_norm(q) if self.config.qk_norm else q, angles)

  def keys_values(self, x: Float["B T D"], angles) -> tuple[Float["B T K H"], Float["B T K H"]]:
    kv = self.kv(x)
    k = kv[..., 0, :]
    return rotate(self.k_norm(k) if self.config.qk_norm else k, angles), kv[..., 1, :]

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
  """A pre-norm decoder layer. `mix` does the attending: (attention module, normed input) → attended heads."""

  config: ModelConfig
  transposed: bool = False

  def setup(self):
    c = self.config
    self.attention_norm = RMSNorm(c.width, c.norm_eps)
    self.attention = Attention(c, self.transposed)
    self.mlp_norm = RMSNorm(c.width, c.norm_eps)
    self.mlp = MLP(c, self.transposed)

  def __call__(self, x, mix):
    attended, extra = mix(self.attention, self.attention_norm(x))
    x = x + self.attention.output(attended)
    return x + self.mlp(self.mlp_norm(x)), extra


class Head(nn.Module):
  """Hidden states to logits over the vocabulary, in float32."""

  vocab: int
  width: int
  scale: float = 0.02
  transposed: bool = False

  @nn.compact
  def __call__(self, x: Float["B T D"]) -> Float["B T V"]:
    table = self.param("kernel", nn.initializers.normal(self.scale), (self.vocab, self.width))
    return project_vocab(x, table, self.transposed)


def project_vocab(x: Float["B T D"], table: Float["V D"], transposed: bool = False) -> Float["B T V"]:
  """x · tableᵀ in float32; `table` [V,D] is an embedding table or a head; `transposed` as in `Projection`."""
  rows, table = x.reshape(-1, x.shape[-1]), table.astype(x.dtype)
  if transposed:
    y = output_major(table, rows, jnp.float32)
  else:
    y = jax.lax.dot_general(rows, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  return y.reshape(*x.shape[:-1], -1)
