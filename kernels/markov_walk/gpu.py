"""One slot as two Triton kernels, so that all multiprocessors have work at any batch: tiles of the vocabulary, then what they found.

The head's features, of rank R, are made between the slots by XLA. A sampled batch's logits over temperature replace the base logits in
place, slot by slot.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specdec_jax.kernels.markov_walk.noise import gumbel
from specdec_jax.kernels.markov_walk.ref import Walk, product, step
from specdec_jax.sampling import GREEDY_BELOW

FEW = 4  # up to so many rows the sixteen of a tensor core's tile are taken apart, for noise of the real ones only
LAST = jnp.iinfo(jnp.int32).max


def unsupported(batch: int, table) -> str | None:
  rank = table.shape[1]
  if rank < 16 or rank & (rank - 1) or rank > 512:
    return f"the GPU kernel needs a rank that is a power of two from 16 to 512, not {rank}"
  return None


def does_not_pay(table) -> str | None:
  """The kernel moves fewer bytes in fewer launches than XLA (H200) at any size; below this it leaves multiprocessors without a tile."""
  return f"a vocabulary of {table.shape[0]} is fewer tiles than multiprocessors" if table.shape[0] < 132 * 64 else None


def walk(*, anchor, previous, table, base, projected, weights, temperature, keys, kind: str, interpret=False) -> Walk:
  """See `markov_walk`; keys: their data, uint32 [B,L,2]."""
  batch, length, _ = base.shape

  def slot(carry, inputs):
    token, state, base = carry
    k, h = inputs
    state, features = step(kind, state, jnp.take(previous, token, axis=0, mode="clip"), h, weights)
    base, token, *rest = one(features.astype(table.dtype), table, base, k, temperature, keys, interpret)
    return (token, state, base), (token, *rest)

  first = (anchor, jnp.zeros((batch, previous.shape[1])), base)
  rows = None if projected is None else projected.swapaxes(0, 1)
  (_, _, scaled), found = jax.lax.scan(slot, first, (jnp.arange(length), rows))
  drafts, best, lse, norm = (x.T for x in found)
  return Walk(drafts, best, lse, *((None, None) if temperature is None else (scaled, norm)))


def one(features, table, base, k, temperature, keys, interpret):
  """Slot k: (base with the slot's scaled logits in it if sampled, token, best, lse, norm)."""
  batch, vocab, rank = features.shape[0], *table.shape
  block = min(64, max(16, pl.next_power_of_2(batch)))
  tile = 128 if block == 16 else 64
  blocks, tiles = pl.cdiv(batch, block), pl.cdiv(vocab, tile)
  features = jnp.pad(features, ((0, blocks * block - batch), (0, 0)))
  settings = () if temperature is None else (temperature, keys)
  a_row = jax.ShapeDtypeStruct((batch, tiles), jnp.float32)
  sampled = bool(settings)
  whole = pl.BlockSpec(memory_space=pl.ANY)
  out = pl.pallas_call(
      lambda *refs: _score(refs, block, tile, sampled), grid=(tiles, blocks), in_specs=[whole] * (4 + len(settings)),
      out_specs=[whole] * (5 + sampled), out_shape=[a_row, a_row, a_row, a_row, jax.ShapeDtypeStruct(a_row.shape, jnp.int32)]
      + ([jax.ShapeDtypeStruct(base.shape, base.dtype)] if sampled else []), input_output_aliases={3: 5} if sampled else {},
      compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1), interpret=interpret, name="markov_walk_score",
      cost_estimate=pl.CostEstimate(
          flops=2 * batch * vocab * rank, transcendentals=batch * vocab * (1 + 3 * sampled),
          bytes_accessed=4 * batch * vocab * (1 + sampled) + table.size * table.dtype.itemsize),
  )(k[None], features, table, base, *settings)
  a_number = jax.ShapeDtypeStruct((batch,), jnp.float32)
  found = pl.pallas_call(
      lambda *refs: _finish(refs, sampled), grid=(batch,), in_specs=[whole] * (5 + sampled), out_specs=[whole] * 4,
      out_shape=[jax.ShapeDtypeStruct((batch,), jnp.int32), a_number, a_number, a_number],
      compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1), interpret=interpret, name="markov_walk_finish",
  )(*out[:5], *settings[:1])
  return (out[5] if sampled else base), *found


def _score(refs, block: int, tile: int, sampled: bool) -> None:
  """A tile's logits of a block of rows, and their largest, sums, best score and its id."""
  slot, features, table, base, *refs = refs
  if sampled:
    temperature, keys, *refs = refs
  tops, scores, sums, scaled_sums, best_ids, *scaled_out = refs
  batch, vocab = base.shape[0], table.shape[0]
  i, first = pl.program_id(0), pl.program_id(1) * block
  k = slot[0]
  ids = i * tile + jnp.arange(tile)
  w = plgpu.load(table.at[ids[:, None], jnp.arange(table.shape[1])[None]], mask=(ids < vocab)[:, None], other=0)
  bias = product(features[pl.ds(first, block), :], w)

  def finish(row, bias):
    """row: one row's number, or those of all as a column."""
    there, column = row < batch, ids if jnp.ndim(row) == 0 else ids[None]
    number = row if jnp.ndim(row) == 0 else row[:, 0]
    inside = there & (column < vocab)
    logits = plgpu.load(base.at[row, k, column], mask=inside, other=-jnp.inf) + bias
    score = logits
    put = lambda ref, x: plgpu.store(ref.at[number, i], x, mask=number < batch)
    spread = lambda x: x if jnp.ndim(x) == 0 else x[:, None]
    if sampled:
      get = lambda ref, *more, other: plgpu.load(ref.at[(number, *more)], mask=number < batch, other=other)
      t = get(temperature, other=1.0)
      cold = t < GREEDY_BELOW
      t = spread(jnp.where(cold, 1.0, t))
      scaled = logits / t
      plgpu.store(scaled_out[0].at[row, k, column], scaled, mask=inside)
      noise = gumbel(spread(get(keys, k, jnp.int32(0), other=0)), spread(get(keys, k, jnp.int32(1), other=0)), column)
      score = jnp.where(spread(cold), logits, scaled + noise)
    top = logits.max(-1)
    zero = jnp.where(top == -jnp.inf, 0.0, top)
    put(tops, top)
    put(sums, jnp.exp(logits - spread(zero)).sum(-1))
    highest = score.max(-1)
    put(scores, highest)
    put(best_ids, jnp.where(score == spread(highest), column, LAST).min(-1))
    put(scaled_sums, jnp.exp(scaled - spread(zero) / t).sum(-1) if sampled else top)

  if batch > FEW:
    finish(first + jnp.arange(block)[:, None], bias)
  else:
    for b in range(batch):
      finish(jnp.int32(b), jnp.where(jnp.arange(block)[:, None] == b, bias, 0.0).sum(0))


def _finish(refs, sampled: bool) -> None:
  """A row's tiles to its token."""
  tops, scores, sums, scaled_sums, best_ids, *refs = refs
  if sampled:
    temperature, *refs = refs
  token_out, best_out, lse_out, norm_out = refs
  b, tiles = pl.program_id(0), tops.shape[1]
  at = jnp.arange(pl.next_power_of_2(tiles))
  get = lambda ref, other: plgpu.load(ref.at[b, at], mask=at < tiles, other=other)
  top = get(tops, -jnp.inf)
  best = top.max(0)
  zero = jnp.where(best == -jnp.inf, 0.0, best)
  total = (get(sums, 0.0) * jnp.exp(top - zero)).sum(0)
  lse = best + jnp.log(total)
  best = jnp.where(lse == lse, best, jnp.nan)
  score = get(scores, -jnp.inf)
  token = jnp.where(score == score.max(0), get(best_ids, LAST), LAST).min(0)
  token_out[b] = jnp.where(jnp.abs(best) < jnp.inf, token, -1)
  best_out[b], lse_out[b] = best, lse
  norm = lse
  if sampled:
    t = temperature[b]
    t = jnp.where(t < GREEDY_BELOW, 1.0, t)
    norm = best / t + jnp.log((get(scaled_sums, 0.0) * jnp.exp(top / t - zero / t)).sum(0))
  norm_out[b] = norm
