"""The two attentions: checks, the choice of an implementation, and the way into the kernels' form and back."""

import functools
import math

import jax
import jax.numpy as jnp

from specdec_jax.kernels.base import choose, spread
from specdec_jax.kernels.ragged_verify import gpu, intervals, ref, tpu
from specdec_jax.kernels.ragged_verify.spans import Spans, join, split
from specdec_jax.typing import Bool, Float, Int

DTYPES = ("float32", "bfloat16")


def ragged_verify(
    *, q: Float["n K G H"], start: Int["B"], keys: Float["B K H S"], values: Float["B K S H"], width: int, slot: Int["n"] | None = None,
    offset: Int["n"] | None = None, window: int | Int[""] | None = None, layer: Int[""] | None = None, reach: int | None = None,
    scale: float | None = None, implementation: str | None = None,
) -> Float["n K G H"]:
  """Attention of tokens that were just written to the slot cache: row i is token offset[i] of slot slot[i], stands at the position
  start[slot] + offset, and sees the columns 0 … its position, the last `window` of them if given. A row that sees nothing gets zeros.

  Rows come slot by slot, each slot's with offsets 0, 1, … as `models.rows.flatten` makes them; without slot and offset they are all B·width
  tokens. width: the most tokens of a slot. layer: the one to read where keys and values are stacked, [Y,B,…]. reach: columns that may be
  read, all where None; none behind a slot's last position is. scale: of the scores, 1/√H where None. Raises ValueError for shapes that do
  not fit or an unknown implementation.
  """
  _axes("ragged_verify", q=(q, "nKGH"), start=(start, "B"), values=(values, "BKSH" if layer is None else "YBKSH"))
  stack = () if layer is None else keys.shape[:1]
  batch, columns = len(start), values.shape[-2]
  heads, groups, size = q.shape[1:]
  _expect("ragged_verify", keys=(keys, (*stack, batch, heads, size, columns)), values=(values, (*stack, batch, heads, columns, size)))
  if (slot is None) != (offset is None):
    raise ValueError("ragged_verify: slot and offset come together, or neither for all tokens")
  if slot is None:
    _expect("ragged_verify", q=(q, (batch * width, heads, groups, size)))
  else:
    _expect("ragged_verify", slot=(slot, q.shape[:1]), offset=(offset, q.shape[:1]))
  chosen = choose("ragged_verify", implementation, functools.partial(_unsupported, q, keys))
  if chosen == "reference":
    return ref.ragged_verify(
        q=q, start=start, keys=keys, values=values, width=width, slot=slot, offset=offset, window=window, layer=layer, reach=reach,
        scale=scale)
  if slot is None:
    tokens, counts = q.reshape(batch, width, heads, groups, size), jnp.full((batch,), width)
  else:
    mine = slot == jnp.arange(batch)[:, None]
    counts = jnp.max(jnp.where(mine, offset + 1, 0), 1)
    before = jnp.sum(slot < jnp.arange(batch)[:, None], 1)
    tokens = q[jnp.minimum(before[:, None] + jnp.arange(width), len(q) - 1)]
  # Of flat rows a device could not tell which are of its slots: they are put to their slots and taken from there by XLA.
  held = "BK" if layer is None else "YBK"
  run = functools.partial(_verify, chosen, min(reach or columns, columns), scale)
  out = spread(run, [(tokens, "BTK"), (counts, "B"), (start, "B"), (keys, held), (values, held), (layer, ""), (window, "")], "BTK")
  return out.reshape(q.shape) if slot is None else out[slot, offset]


def _verify(chosen: str, length: int, scale: float | None, tokens, counts: Int["B"], start: Int["B"], keys, values, layer, window):
  """`ragged_verify` by a kernel, of the first `counts` of each slot's tokens [B,T,K,G,H]."""
  batch, width, _, groups, _ = tokens.shape
  chunk = max(1, min(width, _module(chosen).ROWS // groups))
  ahead = jnp.arange(0, width, chunk)
  each = lambda x: jnp.broadcast_to(x, (batch, len(ahead))).reshape(-1)
  spans = Spans(each(jnp.arange(batch)[:, None]), each(start[:, None] + ahead), each(jnp.clip(counts[:, None] - ahead, 0, chunk)))
  out = _run(chosen, split(tokens, chunk), keys, values, spans, layer, window, groups=groups, causal=True, length=length, scale=scale)
  return join(out, batch, width, groups)


def block_attention(
    *, q: Float["B A L K G H"], keys: Float["B K H S"], values: Float["B K S H"], high: Int["B A"], k: Float["B A L K H"],
    v: Float["B A L K H"], keep: Bool["B A"], low: Int["B A"] | None = None, window: int | None = None, scale: float | None = None,
    implementation: str | None = None,
) -> Float["B A L K G H"]:
  """Attention of blocks: every slot of a block sees the context columns low (0 where None) … high − 1 and all slots of its own block, under
  one softmax. Slot l stands at column high + l and sees no context `window` or more columns before it. A block with keep False gets zeros.
  scale: of the scores, 1/√H where None.

  Kernels hold no scores in device memory, for the gradient neither. Where none is taken each block reads its context anew, else all
  blocks of a batch row go through it together. Raises ValueError for shapes that do not fit or an unknown implementation.
  """
  _axes("block_attention", q=(q, "BALKGH"), values=(values, "BKSH"))
  batch, blocks, slots, heads, groups, size = q.shape
  columns, own = values.shape[-2], (batch, blocks, slots, heads, size)
  _expect("block_attention", keys=(keys, (batch, heads, size, columns)), values=(values, (batch, heads, columns, size)),
          k=(k, own), v=(v, own),
          **{name: (x, (batch, blocks)) for name, x in {"low": low, "high": high, "keep": keep}.items() if x is not None})
  chosen = choose("block_attention", implementation, functools.partial(_unsupported, q, keys, slots=slots))
  if chosen == "reference":
    return ref.block_attention(q=q, keys=keys, values=values, low=low, high=high, k=k, v=v, keep=keep, window=window, scale=scale)
  static = chosen, window, 1 / math.sqrt(size) if scale is None else scale
  own = [(x.astype(q.dtype), "BALK") for x in (k, v)]
  arguments = [(q, "BALK"), (keys, "BK"), (values, "BK"), *own, (low, "B"), (high, "B"), (keep, "B")]
  return spread(functools.partial(_blocks, static), arguments, "BALK")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocks(static, q, keys, values, k, v, low, high, keep):
  """`block_attention` by a kernel; static: implementation, window, scale."""
  chosen, window, scale = static
  batch, blocks, slots, _, groups, _ = q.shape
  flat = lambda x: x.reshape(batch * blocks, *x.shape[2:])
  spans = Spans(jnp.repeat(jnp.arange(batch), blocks), flat(high), flat(keep) * slots, None if low is None else flat(low))
  own = flat(k).transpose(0, 2, 3, 1), flat(v).swapaxes(1, 2)
  out = _run(
      chosen, split(flat(q), slots), keys, values, spans, None, window, own,
      groups=groups, causal=False, length=values.shape[-2], scale=scale)
  return join(out, batch * blocks, slots, groups).reshape(q.shape)


def _differentiable_blocks(static, q, keys, values, k, v, low, high, keep):
  """The same where a gradient is taken: the slots of all blocks are columns behind those of the context."""
  chosen, window, scale = static
  batch, blocks, slots, heads, groups, size = q.shape
  columns = values.shape[-2]
  first = jnp.zeros_like(high)[..., None] if low is None else low[..., None]
  if window is not None:
    first = jnp.maximum(first, high[..., None] + jnp.arange(slots) - window + 1)
  own = columns + slots * jnp.arange(blocks)[:, None]
  ends = (jnp.where(keep[..., None], x, 0) for x in (jnp.minimum(high, columns)[..., None], own + slots))
  each = lambda x: jnp.broadcast_to(x[..., None], (batch, blocks, slots, groups)).reshape(batch, -1)
  behind = lambda context, own: jnp.concatenate([context.astype(q.dtype), own.reshape(batch, -1, heads, size).swapaxes(1, 2)], 2)
  rows = q.transpose(0, 3, 1, 2, 4, 5).reshape(batch, heads, -1, size)
  bounds = [each(x) for pair in zip((jnp.maximum(first, 0), own), ends) for x in pair]
  out = intervals.attend(rows, behind(keys.swapaxes(2, 3), k), behind(values, v), bounds, scale=scale, implementation=chosen)
  return out.reshape(batch, heads, blocks, slots, groups, size).transpose(0, 2, 3, 1, 4, 5)


_blocks.defvjp(
    lambda static, *arrays: jax.vjp(functools.partial(_differentiable_blocks, static), *arrays), lambda static, back, grad: back(grad))


def write_rows(
    *, keys: Float["B K H S"], values: Float["B K S H"], k: Float["B T K H"], v: Float["B T K H"], start: Int["B"],
    layer: Int[""] | None = None, implementation: str | None = None,
) -> tuple[Float["B K H S"], Float["B K S H"]]:
  """Keys and values with rows k, v at positions start … of each slot, in place; rows beyond the end are dropped, values that are no numbers
  written as 0. layer: the one to write where keys and values are stacked, [Y,B,…]. For GPUs it is XLA's scatter. Raises ValueError for
  shapes that do not fit or an unknown implementation."""
  _axes("write_rows", k=(k, "BTKH"), values=(values, "BKSH" if layer is None else "YBKSH"))
  stack = () if layer is None else keys.shape[:1]
  batch, _, heads, size = k.shape
  columns = values.shape[-2]
  _expect("write_rows", keys=(keys, (*stack, batch, heads, size, columns)), values=(values, (*stack, batch, heads, columns, size)),
          v=(v, k.shape), start=(start, (batch,)))
  chosen = choose("write_rows", implementation, lambda platform: _unsupported(k, keys, platform))
  if chosen == "reference":
    return ref.write_rows(keys=keys, values=values, k=k, v=v, start=start, layer=layer)
  held = "BK" if layer is None else "YBK"
  return spread(
      functools.partial(_write, chosen), [(keys, held), (values, held), (k, "BTK"), (v, "BTK"), (start, "B"), (layer, "")], (held, held))


def _write(chosen: str, keys, values, k, v, start, layer):
  """`write_rows` on one device."""
  if chosen.startswith("gpu"):
    return ref.write_rows(keys=keys, values=values, k=k, v=v, start=start, layer=layer)
  v = jnp.where(jnp.isfinite(v), v, 0)
  put = functools.partial(tpu.write, start=start, layer=jnp.int32(0) if layer is None else layer, interpret=chosen.endswith("_interpret"))
  if layer is None:
    return put(keys[None], k.transpose(0, 2, 3, 1), axis=4)[0], put(values[None], v.swapaxes(1, 2), axis=3)[0]
  return put(keys, k.transpose(0, 2, 3, 1), axis=4), put(values, v.swapaxes(1, 2), axis=3)


def _run(chosen: str, q, keys, values, spans: Spans, layer, window, own=None, *, scale, **static):
  scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
  if layer is None:
    keys, values, layer = keys[None], values[None], 0
  module = _module(chosen)
  return module.attend(
      q, keys, values, spans, jnp.asarray(layer, jnp.int32), window, own, scale=scale, interpret=chosen.endswith("_interpret"), **static)


def _module(chosen: str):
  return tpu if chosen.startswith("tpu") else gpu


def _unsupported(q, keys, platform: str, slots: int = 1) -> str | None:
  """Why the kernel of a platform cannot do it, None if it can."""
  groups, size = q.shape[-2:]
  if q.dtype.name not in DTYPES or keys.dtype.name not in DTYPES:
    return f"queries of {q.dtype} on a cache of {keys.dtype}: the kernels are for {' and '.join(DTYPES)}"
  rows = tpu.ROWS if platform == "tpu" else gpu.ROWS
  if slots * groups > rows:
    return f"{slots} slots of {groups} heads a kv head: the kernel for {platform} holds {rows} queries of a kv head"
  if platform == "tpu" and size % 8:
    return f"head dimension {size}: the kernel for TPUs takes multiples of 8"
  if platform == "gpu" and (size < 16 or size > 256 or 2 ** int(math.log2(size)) != size):
    return f"head dimension {size}: the kernel for GPUs takes 16, 32, 64, 128 and 256"
  return None


def _axes(op: str, **arrays) -> None:
  """Raises ValueError for the first array that has not as many axes as there are letters beside it."""
  for name, (array, axes) in arrays.items():
    if jnp.ndim(array) != len(axes):
      raise ValueError(f"{op}: {name} needs the axes [{','.join(axes)}], not {jnp.shape(array)}")


def _expect(op: str, **arrays) -> None:
  """Raises ValueError for the first array that has not the shape beside it."""
  for name, (array, shape) in arrays.items():
    if array.shape != shape:
      raise ValueError(f"{op}: {name} must be {shape} beside the other arguments, not {array.shape}")
