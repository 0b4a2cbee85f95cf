"""Attention over spans for GPUs (Triton): a program for each span, kv head and share of the columns; a second kernel joins shares."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specdec_jax.kernels.ragged_verify.spans import EVERY, Spans
from specdec_jax.typing import Float, Int

ROWS = 64  # Queries of a kv head in a span, at most.
PROGRAMS = 264  # Two for each multiprocessor of an H200: with fewer spans and heads the columns are shared out.
LOWEST = -1e30


def attend(
    q: Float["n K N H"], keys: Float["Y B K H S"], values: Float["Y B K S H"], spans: Spans, layer: Int[""], window: Int[""] | None,
    own: tuple[Float["n K H L"], Float["n K L H"]] | None = None, *, groups: int, causal: bool, length: int, scale: float, interpret=False,
) -> Float["n K N H"]:
  """Attended queries; columns from `length` on are never read. own: keys and values that all queries of a span see besides."""
  n, heads, rows, size = q.shape
  tile = 64 if q.dtype == jnp.bfloat16 else 16  # Columns that are read at once.
  shares = max(1, min(PROGRAMS // (n * heads), -(-length // (2 * tile))))
  first, stop = spans.columns(causal, window, length)
  padded = max(16, pl.next_power_of_2(rows))
  low = jnp.zeros_like(spans.base) if spans.low is None else spans.low
  scalars = (spans.row, spans.base, low, spans.count, first // tile, -(-stop // tile), layer, EVERY if window is None else window)
  slots = 0
  if own is not None:
    slots = own[1].shape[2]
    extra = max(16, pl.next_power_of_2(slots)) - slots
    own = (jnp.pad(own[0], ((0, 0), (0, 0), (0, 0), (0, extra))), jnp.pad(own[1], ((0, 0), (0, 0), (0, extra), (0, 0))))
  kernel = functools.partial(
      _kernel, groups=groups, causal=causal, scale=scale, tile=tile, length=length, shares=shares, windowed=window is not None,
      bounded=spans.low is not None, slots=slots)
  of_span = lambda *axes: pl.BlockSpec((None, None, *axes), lambda i, h, *_: (i, h, 0, 0))
  of_share = lambda *axes: pl.BlockSpec((None, None, None, *axes), lambda i, h, share: (i, h, share, *(0 for _ in axes)))
  whole, params = (
      jax.ShapeDtypeStruct((n, heads, padded, size), q.dtype),
      plgpu.CompilerParams(num_warps=8 if padded * size > 8192 else 4, num_stages=2))
  part = lambda *axes: jax.ShapeDtypeStruct((n, heads, shares, padded, *axes), jnp.float32)
  out = pl.pallas_call(
      kernel, grid=(n, heads, shares), in_specs=[*[pl.BlockSpec()] * len(scalars), of_span(padded, size), pl.BlockSpec(), pl.BlockSpec(),
                                                 *(of_span(*x.shape[2:]) for x in own or ())],
      out_specs=of_span(padded, size) if shares == 1 else [of_share(padded, size), of_share(padded), of_share(padded)],
      out_shape=whole if shares == 1 else [part(size), part(), part()], compiler_params=params, interpret=interpret,
  )(*(jnp.asarray(x, jnp.int32).reshape(-1) for x in scalars),
    jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0))), keys, values, *(own or ()))
  if shares > 1:
    every = lambda *axes: pl.BlockSpec((None, None, shares, *axes), lambda i, h: (i, h, *(0 for _ in (0, *axes))))
    out = pl.pallas_call(
        _join, grid=(n, heads), in_specs=[every(padded, size), every(padded), every(padded)],
        out_specs=of_span(padded, size), out_shape=whole, compiler_params=params, interpret=interpret)(*out)
  return out[:, :, :rows]


def _kernel(
    row, base, low, count, first, stop, layer, reach, q_ref, k_ref, v_ref, *refs, groups, causal, scale, tile, length, shares,
    windowed, bounded, slots,
):
  own, out = refs[:-1 if shares == 1 else -3], refs[-1 if shares == 1 else -3:]
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
    at = pl.ds(t * tile, tile)
    column = t * tile + jnp.arange(tile)
    mask = {} if k_ref.shape[-1] % tile == 0 else {"mask": column < length, "other": 0.0}
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
  if shares == 1:
    out[0][...] = _divided(acc, total, q.dtype)
  else:
    out[0][...], out[1][...], out[2][...] = acc, m, total


def _join(acc_ref, m_ref, total_ref, o_ref):
  """Shares of the columns into one softmax."""

  def step(share, carry):
    m, total, acc = carry
    new = jnp.maximum(m, m_ref[share])
    before, now = jnp.exp(m - new), jnp.exp(m_ref[share] - new)
    return new, before * total + now * total_ref[share], before[:, None] * acc + now[:, None] * acc_ref[share]

  shares, rows, size = acc_ref.shape
  _, total, acc = jax.lax.fori_loop(0, shares, step, (jnp.full((rows,), LOWEST), jnp.zeros((rows,)), jnp.zeros((rows, size))))
  o_ref[...] = _divided(acc, total, o_ref.dtype)


def _divided(acc, total, dtype):
  return (acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]).astype(dtype)
