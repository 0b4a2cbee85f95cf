"""The gated delta net, the recurrent layer of the Qwen3.5 family (Gated Delta Networks, arXiv 2412.06464).

For every value head a memory S [H,H] maps keys to values. A token decays it, S ← exp(g)·S, and corrects what it holds under the
token's key: S ← S + k uᵀ with u = β(v − Sᵀk); it reads Sᵀq. Within a chunk the corrections of all tokens solve one triangular
system, so a chunk costs a few products. They depend on earlier tokens only: what the first tokens of a call add to the memory is
known whatever becomes of the others, and rewinding is adding fewer of them (`State.after`).
"""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.config import DeltaConfig, ModelConfig
from specdec_jax.models.layers import Projection, RMSNorm, param
from specdec_jax.typing import Float, Int

CHUNK = 64

_dot = functools.partial(jnp.matmul, precision="highest")  # Errors of the memory last: no shortened products on TPUs and GPUs.


@flax.struct.dataclass
class Update:
  """What the tokens of a call do to a state: inputs [B,T,F] of the convolution, keys [B,T,K,H], corrections [B,T,N,H], and the
  log decays [B,T,N]."""

  inputs: Float["B T F"]
  keys: Float["B T K H"]
  corrections: Float["B T N H"]
  decays: Float["B T N"]


@flax.struct.dataclass
class State:
  """What a layer keeps of a slot: the last inputs of its convolution, one fewer than it has taps, [B,T,F]; memory [B,N,H,H],
  keys by values, float32."""

  inputs: Float["B T F"]
  memory: Float["B N H H"]

  def after(self, update: Update, rows: Int["B"]) -> "State":
    """The state behind the first `rows` tokens of a call."""
    taps, groups = self.inputs.shape[1], self.memory.shape[1] // update.keys.shape[2]
    inputs = jnp.concatenate([self.inputs, update.inputs.astype(self.inputs.dtype)], 1)
    inputs = jnp.take_along_axis(inputs, (rows[:, None] + jnp.arange(taps))[..., None], 1)
    stands = (jnp.arange(update.decays.shape[1]) < rows[:, None])[..., None]
    until = jax.lax.cumsum(jnp.where(stands, update.decays, 0.0), 1, reverse=True)  # From each token on: of the last few, no small
    since, total = jnp.pad(until[:, 1:], ((0, 0), (0, 1), (0, 0))), until[:, 0]  # differences of large sums, however long the call.
    weighted = jnp.where(stands[..., None], jnp.exp(since)[..., None] * update.corrections, 0.0)
    keys = jnp.repeat(jnp.where(stands[..., None], update.keys, 0.0), groups, 2)
    return State(inputs, jnp.exp(total)[..., None, None] * self.memory + _dot(keys.transpose(0, 2, 3, 1), weighted.swapaxes(1, 2)))


def init_state(c: DeltaConfig, batch: int, dtype) -> State:
  """The state before the first token."""
  return State(jnp.zeros((batch, c.conv - 1, c.channels), dtype), jnp.zeros((batch, c.value_heads, c.key_dim, c.value_dim)))


class DeltaNet(nn.Module):
  """Projections, convolution, gates and norm around `delta_rule`; the caller keeps the state."""

  rewinds = True  # By `State.after`.

  config: ModelConfig
  transposed: bool = False

  def setup(self):
    c, d = self.config, self.config.delta
    linear = lambda inputs, features: Projection(inputs, features, transposed=self.transposed, scale=c.init_scale)
    self.qkv, self.z = linear(c.width, (d.channels,)), linear(c.width, (d.value_heads, d.value_dim))
    self.gates = linear(c.width, (d.value_heads, 2))
    self.taps = param(self, "taps", nn.initializers.uniform(2 * d.conv**-0.5), (d.channels, 1, d.conv))
    self.rate = param(self, "rate", lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)), (d.value_heads,))
    self.shift = param(self, "shift", _shift, (d.value_heads,))
    self.norm = RMSNorm(d.value_dim, c.norm_eps)
    self.o = linear(d.value_heads * d.value_dim, (c.width,))

  def inputs(self, x: Float["B T D"]):
    """(inputs of the convolution [B,T,F], β [B,T,N], log decay [B,T,N], output gate [B,T,N,H]) of normed hidden states."""
    gates = self.gates(x).astype(jnp.float32)
    decay = -jnp.exp(self.rate.astype(jnp.float32)) * nn.softplus(gates[..., 1] + self.shift)
    return self.qkv(x), nn.sigmoid(gates[..., 0]), decay, self.z(x)

  def __call__(
      self, inputs: Float["B T F"], beta: Float["B T N"], decay: Float["B T N"], state: State | None = None,
      segments: Int["B T"] | None = None,
  ) -> tuple[Float["B T N H"], Update]:
    """What the tokens read, and what they do to the state. segments [B,T]: without a state, texts packed in a row."""
    d = self.config.delta
    batch, count, _ = inputs.shape
    if state is not None:  # No number of a row that was never accepted may reach those before it: 0 · NaN is NaN.
      sound = jnp.isfinite(inputs).all(-1) & jnp.isfinite(beta).all(-1) & jnp.isfinite(decay).all(-1)
      inputs, beta, decay = (jnp.where(sound[..., None], x, 0) for x in (inputs, beta, decay))
    mixed = nn.silu(convolve(inputs, self.taps[:, 0], None if state is None else state.inputs, segments)).astype(jnp.float32)
    q, k, v = jnp.split(mixed, [d.key_heads * d.key_dim, 2 * d.key_heads * d.key_dim], -1)
    q, k = (unit(x.reshape(batch, count, d.key_heads, d.key_dim)) for x in (q, k))
    memory = init_state(d, batch, inputs.dtype).memory if state is None else state.memory
    out, corrections = delta_rule(
        q * d.key_dim**-0.5, k, v.reshape(batch, count, d.value_heads, d.value_dim), beta, decay, memory, segments)
    if state is not None:
      out = jnp.where(sound[..., None, None], out, jnp.nan)
    return out.astype(inputs.dtype), Update(inputs, k, corrections, decay)

  def output(self, read: tuple[Float["B T N H"], Float["B T N H"]]) -> Float["B T D"]:
    """From what was read, and the output gate."""
    out, z = read
    gated = self.norm(out) * nn.silu(z.astype(jnp.float32)).astype(out.dtype)
    return self.o(gated.reshape(*gated.shape[:-2], -1))


def _shift(key, shape):
  """Decays of 0.1 to 0.001 a token times the rate, evenly in the logarithm, as in Mamba 2."""
  step = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
  return step + jnp.log(-jnp.expm1(-step))


def unit(x: Float["B T K H"]) -> Float["B T K H"]:
  """x / ‖x‖."""
  return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def convolve(
    x: Float["B T F"], taps: Float["F n"], before: Float["B T F"] | None, segments: Int["B T"] | None = None,
) -> Float["B T F"]:
  """Causal depthwise convolution; before: the inputs ahead of the first token, zeros where None; taps stay inside a segment."""
  count, width = x.shape[1], taps.shape[1]
  before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype) if before is None else before.astype(x.dtype)
  row, out = jnp.concatenate([before, x], 1), 0.0
  for i in range(width):
    part = row[:, i : i + count] * taps[:, i].astype(x.dtype)
    back = width - 1 - i
    if segments is not None and back:
      same = segments == jnp.pad(segments[:, : max(count - back, 0)], ((0, 0), (min(back, count), 0)), constant_values=-1)
      part = jnp.where(same[..., None], part, 0)
    out += part
  return out


def delta_rule(
    q: Float["B T K H"], k: Float["B T K H"], v: Float["B T N H"], beta: Float["B T N"], decay: Float["B T N"], memory: Float["B N H H"],
    segments: Int["B T"] | None = None,
) -> tuple[Float["B T N H"], Float["B T N H"]]:
  """What each token reads, and its correction u, chunk by chunk; each key head serves consecutive value heads.

  segments [B,T]: a token reads its own segment only, and `memory` belongs to the first token's.
  """
  count, groups = q.shape[1], v.shape[2] // q.shape[2]
  heads = lambda x: x.swapaxes(1, 2)
  q, k = (jnp.repeat(heads(x), groups, 1) for x in (q, k))
  row = (q, k, heads(v), heads(beta), heads(decay), segments)
  if count <= CHUNK:
    out, u, _ = _chunk(memory, None if segments is None else segments[:, 0], *row)
    return heads(out), heads(u)
  chunks = -(-count // CHUNK)

  def split(x):
    """[B,…,T,…] to chunks [n,B,…,C,…]; what is added behind does nothing."""
    axis = 1 if x.ndim == 2 else 2
    x = jnp.pad(x, [(0, chunks * CHUNK - count if i == axis else 0) for i in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, CHUNK, *x.shape[axis + 1 :]), axis, 0)

  def step(carry, part):
    memory, last = carry
    segments = part[-1]
    out, u, memory = _chunk(memory, last, *part, moves_on=True)
    return (memory, None if segments is None else segments[:, -1]), (out, u)

  first = (memory, None if segments is None else segments[:, 0])
  _, (out, u) = jax.lax.scan(step, first, jax.tree.map(split, row))
  whole = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1])[:, :, :count]
  return heads(whole(out)), heads(whole(u))


def _chunk(memory, owner, q, k, v, beta, decay, segments, moves_on: bool = False):
  """One chunk [B,N,C,H]: (read, corrections, the memory behind it or, unless it `moves_on`, None). owner [B]: the memory's segment."""
  size = q.shape[2]
  total = jnp.cumsum(decay, -1)
  sees, held = jnp.tril(jnp.ones((size, size), bool)), True
  if segments is not None:
    sees = sees & (segments[:, None, :, None] == segments[:, None, None, :])
    held = (segments == owner[:, None])[:, None]
  between = jnp.exp(jnp.where(sees, total[..., :, None] - total[..., None, :], -jnp.inf))
  past = jnp.where(held, jnp.exp(total), 0.0)[..., None]
  known = _dot(jnp.concatenate([k, q], 2), memory)
  u = beta[..., None] * (v - past * known[:, :, :size])
  if size > 1:
    lower = jnp.tril(beta[..., None] * between * _dot(k, k.swapaxes(2, 3)), -1)
    u = jax.lax.linalg.triangular_solve(lower, u, left_side=True, lower=True, unit_diagonal=True)
  out = past * known[:, :, size:] + _dot(between * _dot(q, k.swapaxes(2, 3)), u)
  if not moves_on:
    return out, u, None
  kept = jnp.exp(total[..., -1:])
  if segments is not None:
    kept = jnp.where(held[..., -1:], kept, 0.0)
  return out, u, kept[..., None] * memory + _dot((k * between[..., -1, :, None]).swapaxes(2, 3), u)
