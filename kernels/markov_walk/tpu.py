"""The whole walk as one TPU kernel: grid (slots, tiles of the vocabulary), tokens and features in scratch.

What of W₂ fits stays in VMEM from the first slot on (all of Qwen3's 151,936 × 256 in bfloat16 does), so that the later slots read
little more than their base logits from HBM; the tiles that do not fit are streamed again for every slot.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specdec_jax.kernels.markov_walk.noise import gumbel
from specdec_jax.kernels.markov_walk.ref import Walk, product, step
from specdec_jax.sampling import GREEDY_BELOW

TILE, LANES, AHEAD = 4096, 128, 4  # ids a grid step, of a vector register; resident tiles whose copies are under way
CHUNK = {False: 65536, True: 16384}  # logits that are in work at a time, greedy and sampled
HEADROOM = 20 << 20  # bytes of VMEM left to the pipeline's buffers, to temporaries and to XLA
GROUP = 16  # rows that a copy of one embedding row brings: bfloat16 is tiled by 16


def unsupported(batch: int, table) -> str | None:
  vocab, rank = table.shape
  if vocab % GROUP:
    return f"the TPU kernel needs a vocabulary of a multiple of {GROUP}, not {vocab}"
  if rank % LANES:
    return f"the TPU kernel needs a rank of a multiple of {LANES}, not {rank}"
  if batch > 256:
    return f"the TPU kernel takes up to 256 rows, not {batch}"
  return None


def does_not_pay(table) -> str | None:
  """By XLA's own estimate of cycles and bytes (v5e) the kernel is ahead wherever there is more than one tile to stream."""
  return f"a vocabulary of {table.shape[0]} is one tile" if table.shape[0] <= TILE else None


def walk(
    *, anchor, previous, table, base, projected, weights, temperature, keys, kind: str, interpret=False, vmem: int | None = None,
) -> Walk:
  """See `markov_walk`; keys: their data, uint32 [B,L,2]. vmem: bytes to keep W₂ in; None: the chip's, less `HEADROOM`."""
  (batch, length, vocab), rank = base.shape, table.shape[1]
  tile = min(TILE * 64 // max(64, pl.next_power_of_2(batch)), pl.cdiv(vocab, LANES) * LANES)
  tiles = pl.cdiv(vocab, tile)
  if vmem is None:
    vmem = (128 << 20 if interpret else pltpu.get_tpu_info().vmem_capacity_bytes) - HEADROOM
  resident = min(tiles, vmem // (tile * rank * table.dtype.itemsize))
  sampled = temperature is not None
  whole = lambda *shape: pl.BlockSpec(shape, lambda k, i: (0,) * len(shape))
  a_slot = lambda *shape: pl.BlockSpec((None, *shape), lambda k, i: (k, *(0,) * len(shape)))
  wide = pl.BlockSpec((None, batch, tile), lambda k, i: (k, 0, i))
  streamed = pl.BlockSpec((tile, rank), lambda k, i: (jnp.maximum(i, jnp.minimum(resident, tiles - 1)), 0))
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  inputs = {
      "first": (anchor, pl.BlockSpec(memory_space=pltpu.SMEM)), "previous": (previous, anywhere), "table": (table, anywhere),
      "base": (base.swapaxes(0, 1), wide)}
  if resident < tiles:
    inputs["streamed"] = table, streamed
  if kind != "markov":
    inputs |= {"projected": (projected.swapaxes(0, 1), a_slot(batch, projected.shape[-1])), "weights": (weights, whole(*weights.shape))}
  if sampled:
    inputs |= {"keys": (keys.swapaxes(0, 1), a_slot(batch, 2)), "temperature": (temperature[:, None], whole(batch, 1))}
  outputs = {name: (jax.ShapeDtypeStruct((length, batch, 1), dtype), a_slot(batch, 1)) for name, dtype in (
      ("drafts", jnp.int32), ("best", jnp.float32), ("lse", jnp.float32), *([("norm", jnp.float32)] if sampled else []))}
  if sampled:
    outputs["scaled"] = jax.ShapeDtypeStruct((length, batch, vocab), jnp.float32), wide
  running = pltpu.VMEM((batch, LANES), jnp.float32)
  scratch = {
      "bank": pltpu.VMEM((max(resident, 1) * tile, rank), table.dtype), "loads": pltpu.SemaphoreType.DMA((AHEAD,)),
      "rows": pltpu.VMEM((batch, GROUP, rank), previous.dtype), "row_loads": pltpu.SemaphoreType.DMA((batch,)),
      "tokens": pltpu.VMEM((batch, 1), jnp.int32), "ids": pltpu.SMEM((batch, 1), jnp.int32), "move": pltpu.SemaphoreType.DMA(()),
      "embedded": pltpu.VMEM((batch, rank), jnp.float32), "state": pltpu.VMEM((batch, rank), jnp.float32),
      "features": pltpu.VMEM((batch, rank), table.dtype), "score": running, "id": pltpu.VMEM((batch, LANES), jnp.int32),
      "top": running, "sum": running, "scaled_sum": running}
  names = (*inputs, *outputs, *scratch)
  out = pl.pallas_call(
      lambda *refs: _kernel(types.SimpleNamespace(**dict(zip(names, refs))), kind, tile, tiles, resident, vocab, sampled),
      grid=(length, tiles), in_specs=[spec for _, spec in inputs.values()], out_specs=[spec for _, spec in outputs.values()],
      out_shape=[shape for shape, _ in outputs.values()], scratch_shapes=list(scratch.values()), interpret=interpret, name="markov_walk",
      compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem + HEADROOM * 3 // 4),
      cost_estimate=pl.CostEstimate(
          flops=2 * base.size * rank, transcendentals=base.size * (1 + 3 * sampled),
          bytes_accessed=4 * base.size * (1 + sampled) + (tiles + (length - 1) * (tiles - resident)) * tile * rank * table.dtype.itemsize),
  )(*(x for x, _ in inputs.values()))
  found = dict(zip(outputs, out))
  narrow = lambda name: found[name][..., 0].T
  return Walk(
      narrow("drafts"), narrow("best"), narrow("lse"), *((found["scaled"].swapaxes(0, 1), narrow("norm")) if sampled else (None, None)))


def _kernel(r, kind: str, tile: int, tiles: int, resident: int, vocab: int, sampled: bool) -> None:
  """One slot's tile. r: references by name."""
  k, i = pl.program_id(0), pl.program_id(1)
  _load(r, k, i, tile, tiles, resident, vocab)

  @pl.when(i == 0)
  def _():
    _start(r, k, kind, vocab)

  if resident:
    @pl.when(i < resident)
    def _():
      _score(r, r.bank, jnp.minimum(i, resident - 1) * tile, i, tile, vocab, sampled)
  if resident < tiles:
    @pl.when(i >= resident)
    def _():
      _score(r, r.streamed, 0, i, tile, vocab, sampled)

  @pl.when(i == tiles - 1)
  def _():
    _finish(r, sampled)


def _load(r, k, i, tile: int, tiles: int, resident: int, vocab: int) -> None:
  """In the first slot: tile i of W₂ is in the bank when this returns, the next ones are on their way."""
  def copy(j, act):
    place = lambda rows: pltpu.make_async_copy(
        r.table.at[pl.ds(j * tile, rows)], r.bank.at[pl.ds(j * tile, rows)], r.loads.at[jax.lax.rem(j, AHEAD)])
    last = vocab - (tiles - 1) * tile
    if resident < tiles or last == tile:
      act(place(tile))
    elif tiles == 1:
      act(place(last))
    else:
      pl.when(j < tiles - 1)(lambda: act(place(tile)))
      pl.when(j == tiles - 1)(lambda: act(place(last)))

  if not resident:
    return

  @pl.when((k == 0) & (i == 0))
  def _():
    for j in range(min(AHEAD - 1, resident)):
      copy(jnp.int32(j), lambda c: c.start())

  @pl.when((k == 0) & (i < resident))
  def _():
    pl.when(i + AHEAD - 1 < resident)(lambda: copy(i + AHEAD - 1, lambda c: c.start()))
    copy(i, lambda c: c.wait())


def _start(r, k, kind: str, vocab: int) -> None:
  """A slot's beginning: the last token's embedding is fetched, the features made, the running values reset."""
  batch, rank = r.embedded.shape

  @pl.when(k == 0)
  def _():
    r.state[...] = jnp.zeros_like(r.state)

  @pl.when(k > 0)
  def _():
    move = pltpu.make_async_copy(r.tokens, r.ids, r.move)
    move.start()
    move.wait()

  token = lambda b: jnp.clip(jnp.where(k == 0, r.first[b], r.ids[b, 0]), 0, vocab - 1)

  def fetch(b):
    group = pl.multiple_of(token(b) // GROUP * GROUP, GROUP)
    return pltpu.make_async_copy(r.previous.at[pl.ds(group, GROUP)], r.rows.at[b], r.row_loads.at[b])

  @pl.loop(0, batch)
  def _(b):
    fetch(b).start()

  @pl.loop(0, batch)
  def _(b):
    fetch(b).wait()
    here = jax.lax.broadcasted_iota(jnp.int32, (GROUP, rank), 0) == jax.lax.rem(token(b), GROUP)
    r.embedded[pl.ds(b, 1), :] = jnp.where(here, r.rows[b].astype(jnp.float32), 0.0).sum(0, keepdims=True)

  head = (None, None) if kind == "markov" else (r.projected[...], r.weights[...])
  state, features = step(kind, r.state[...], r.embedded[...], *head)
  r.state[...], r.features[...] = state, features.astype(r.features.dtype)
  for running in (r.score, r.top):
    running[...] = jnp.full_like(running, -jnp.inf)
  for running in (r.id, r.sum, r.scaled_sum):
    running[...] = jnp.zeros_like(running)


def _score(r, table, row, i, tile: int, vocab: int, sampled: bool) -> None:
  """A tile's logits go into the running values of each lane; `row`: where the tile stands in `table`."""
  batch = r.features.shape[0]
  chunk = min(tile, max(LANES, CHUNK[sampled] // (pl.cdiv(batch, 8) * 8)))
  chunk = next(c for c in range(chunk // LANES * LANES, 0, -LANES) if tile % c == 0)
  features = r.features[...]
  if sampled:
    cold = r.temperature[...] < GREEDY_BELOW
    temperature = jnp.where(cold, 1.0, r.temperature[...])
    low, high = r.keys[:, 0:1], r.keys[:, 1:2]

  @pl.loop(0, tile // chunk)
  def _(c):
    columns = pl.ds(pl.multiple_of(c * chunk, LANES), chunk)
    w = table[pl.ds(pl.multiple_of(row + c * chunk, LANES), chunk), :]
    ids = i * tile + c * chunk + jax.lax.broadcasted_iota(jnp.int32, (batch, chunk), 1)
    logits = jnp.where(ids < vocab, r.base[:, columns] + product(features, w), -jnp.inf)
    score = logits
    if sampled:
      scaled = logits / temperature
      r.scaled[:, columns] = scaled
      score = jnp.where(cold, logits, scaled + gumbel(low, high, ids))
    parts = [slice(j * LANES, (j + 1) * LANES) for j in range(chunk // LANES)]
    best, best_id = r.score[...], r.id[...]
    for part in parts:
      better = score[:, part] > best
      best, best_id = jnp.where(better, score[:, part], best), jnp.where(better, ids[:, part], best_id)
    r.score[...], r.id[...] = best, best_id
    top = functools.reduce(jnp.maximum, [logits[:, part] for part in parts], r.top[...])
    zero = jnp.where(top == -jnp.inf, 0.0, top)
    r.sum[...] = r.sum[...] * jnp.exp(r.top[...] - zero) + sum(jnp.exp(logits[:, part] - zero) for part in parts)
    if sampled:
      zero = zero / temperature
      r.scaled_sum[...] = (
          r.scaled_sum[...] * jnp.exp(r.top[...] / temperature - zero) + sum(jnp.exp(scaled[:, part] - zero) for part in parts))
    r.top[...] = top


def _finish(r, sampled: bool) -> None:
  """A slot's end: across the lanes, to one token."""
  def log_sum(top, total):
    best = top.max(1, keepdims=True)
    total = (total * jnp.exp(top - jnp.where(best == -jnp.inf, 0.0, best))).sum(1, keepdims=True)
    return best, best + jnp.log(total)

  best, lse = log_sum(r.top[...], r.sum[...])
  best = jnp.where(lse == lse, best, jnp.nan)
  highest = r.score[...].max(1, keepdims=True)
  token = jnp.where(r.score[...] == highest, r.id[...], jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
  token = jnp.where(jnp.abs(best) < jnp.inf, token, -1)
  r.best[...], r.lse[...], r.drafts[...], r.tokens[...] = best, lse, token, token
  if sampled:
    temperature = jnp.where(r.temperature[...] < GREEDY_BELOW, 1.0, r.temperature[...])
    r.norm[...] = log_sum(r.top[...] / temperature, r.scaled_sum[...])[1]
