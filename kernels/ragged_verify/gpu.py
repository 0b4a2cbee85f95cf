"""Attention over spans for GPUs (Triton): a program for each span, kv head and share of the columns; shares are joined by XLA."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specdec_jax.kernels.ragged_verify.spans import EVERY, Spans
from specdec_jax.typing import Float, Int

ROWS = 64  # Queries of a kv head in a span, at most.
TILE = 64  # Columns that are read at once.
PROGRAMS = 264  # Two for each multiprocessor of an H200: with fewer spans and heads the columns are shared out.
LOWEST = -1e30


def attend(
    q: Float["n K N H"], keys: Float["Y B K H S"], values: Float["Y B K S H"], spans: Spans, layer: Int[""], window: Int[""] | None,
    own: tuple[Float["n K H L"], Float["n K L H"]] | None = None, *, groups: int, causal: bool, length: int, scale: float, interpret=False,
) -> Float["n K N H"]:
  """Attended queries; columns from `length` on are never read. own: keys and values that all queries of a span see besides."""
  n, heads, rows, size = q.shape
  shares = max(1, min(PROGRAMS // (n * heads), -(-length // (4 * TILE))))
  first, stop = spans.columns(causal, window, length)
  padded = max(16, pl.next_power_of_2(rows))
  low = jnp.zeros_like(spans.base) if spans.low is None else spans.low
  scalars = (spans.row, spans.base, low, spans.count, first // TILE, -(-stop // TILE), layer, EVERY if window is None else window)
  slots = 0
  if own is not None:
    slots = own[1].shape[2]
    extra = max(16, pl.next_power_of_2(slots)) - slots
    own = (jnp.pad(own[0], ((0, 0), (0, 0), (0, 0), (0, extra))), jnp.pad(own[1], ((0, 0), (0, 0), (0, extra), (0, 0))))
  kernel = functools.partial(
      _kernel, groups=groups, causal=causal, scale=scale, length=length, shares=shares, windowed=window is not None, bounded=spans.low is not None, slots=slots)
  of_span = lambda i, h, c: (i, h, 0, 0)
  of_share = lambda i, h, c: (i, h, c, 0)
  part = lambda *axes: jax.ShapeDtypeStruct((n, heads, shares, padded, *axes), jnp.float32)
  out, top, total = pl.pallas_call(
      kernel, grid=(n, heads, shares),
      in_specs=[*[pl.BlockSpec()] * len(scalars), pl.BlockSpec((None, None, padded, size), of_span), pl.BlockSpec(), pl.BlockSpec(),
                *(pl.BlockSpec((None, None, *x.shape[2:]), of_span) for x in own or ())],
      out_specs=[pl.BlockSpec((None, None, None, padded, size), lambda i, h, c: (i, h, c, 0, 0)),
                 *[pl.BlockSpec((None, None, None, padded), of_share)] * 2],
      out_shape=[part(size), part(), part()],
      compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2), interpret=interpret,
  )(*(jnp.asarray(x, jnp.int32).reshape(-1) for x in scalars), jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0))), keys, values, *(own or ()))
  weight = jnp.exp(top - jnp.max(top, 2, keepdims=True))
  total = jnp.maximum(jnp.sum(weight * total, 2), jnp.finfo(jnp.float32).tiny)
  return (jnp.sum(weight[..., None] * out, 2) / total[..., None]).astype(q.dtype)[:, :, :rows]


def _kernel(
    row, base, low, count, first, stop, layer, reach, q_ref, k_ref, v_ref, *refs, groups, causal, scale, length, shares, windowed, bounded, slots,
):
  *own, o_ref, m_ref, l_ref = refs
  i, h, share = (pl.program_id(a) for a in range(3))
  rows, size = q_ref.shape
  q, here, exists = q_ref[...], base[i], count[i] > 0
  dot = functools.partial(plgpu.dot, precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None)
  position = here + jnp.arange(rows) // groups
  bound = jnp.minimum(position + 1 if causal else jnp.broadcast_to(here, (rows,)), length)

  m, total, acc = jnp.full((rows,), LOWEST), jnp.zeros((rows,)), jnp.zeros((rows, size))
  if own:
    seen = (jnp.arange(own[1].shape[0]) < slots) & exists & (share == 0)
    scores = jnp.where(seen[None, :], dot(q, own[0][...]) * scale, -jnp.inf)
    m = jnp.maximum(m, jnp.max(scores, 1))
    p = jnp.exp(scores - m[:, None])
    total, acc = jnp.sum(p, 1), dot(p.astype(q.dtype), own[1][...])

  def step(t, carry):
    m, total, acc = carry
    at = pl.ds(t * TILE, TILE)
    column = t * TILE + jnp.arange(TILE)
    mask = {} if k_ref.shape[-1] % TILE == 0 else {"mask": column < length, "other": 0.0}
    k = plgpu.load(k_ref.at[layer[0], row[i], h, :, at], **{n: x[None, :] if n == "mask" else x for n, x in mask.items()})
    v = plgpu.load(v_ref.at[layer[0], row[i], h, at, :], **{n: x[:, None] if n == "mask" else x for n, x in mask.items()})
    seen = column[None, :] < bound[:, None]
    if windowed:
      seen &= column[None, :] > (position - reach[0])[:, None]
    if bounded:
      seen &= column[None, :] >= low[i]
    scores = jnp.where(seen, dot(q, k.astype(q.dtype)) * scale, -jnp.inf)
    new = jnp.maximum(m, jnp.max(scores, 1))
    p, alpha = jnp.exp(scores - new[:, None]), jnp.exp(m - new)
    return new, alpha * total + jnp.sum(p, 1), alpha[:, None] * acc + dot(p.astype(q.dtype), v.astype(q.dtype))

  size_of_share = -(-(stop[i] - first[i]) // shares)
  begin = first[i] + share * size_of_share
  m, total, acc = jax.lax.fori_loop(begin, jnp.minimum(begin + size_of_share, stop[i]), step, (m, total, acc))
  o_ref[...], m_ref[...], l_ref[...] = acc, m, total
