"""Cases of the two attentions: small ones for tests, and the sizes of Qwen3-4B, of a 27 B target and of its drafter."""

import jax
import jax.numpy as jnp

from specdec_jax.kernels.base import Case


def _verify(
    name, counts, starts, columns, heads=2, groups=2, size=32, width=4, dtype="float32",
    bucket=None, stack=None, large=False, **settings,
):
  """counts, starts: tokens and committed columns of each slot; bucket: rows, None for all tokens; stack: (layers, the one read)."""
  batch = len(counts)

  def make(key):
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape).astype(dtype)
    layers = () if stack is None else stack[:1]
    out = {"start": jnp.array(starts, jnp.int32), "keys": normal(1, *layers, batch, heads, size, columns),
           "values": normal(2, *layers, batch, heads, columns, size)}
    if stack is not None:
      out["layer"] = jnp.int32(stack[1])
    if bucket is None:
      return out | {"q": normal(0, batch * width, heads, groups, size)}
    ends = jnp.cumsum(jnp.array(counts))
    slot = jnp.minimum(jnp.searchsorted(ends, jnp.arange(bucket), side="right"), batch - 1).astype(jnp.int32)
    offset = jnp.clip(jnp.arange(bucket) - (ends - jnp.array(counts))[slot], 0, width - 1).astype(jnp.int32)
    q = normal(0, batch, width, heads, groups, size)[slot, offset]  # What repeats a row has its value.
    return out | {"q": q, "slot": slot, "offset": offset}

  window = settings.get("window") or columns
  seen = sum(min(s + t + 1, window) for s, c in zip(starts, counts) for t in range(c))
  read = sum(min(s + c, window + c) for s, c in zip(starts, counts))
  tokens, item = sum(counts), jnp.dtype(dtype).itemsize
  return Case(
      name, make, dtype, {"width": width, **settings}, large=large, flops=4 * seen * heads * groups * size,
      bytes=item * heads * size * (2 * read + 2 * tokens * groups))


def _block(
    name, highs, columns, keep=None, lows=None, blocks=1, heads=2, groups=2, size=32, slots=4, dtype="float32", large=False, window=None,
    differentiable=True,
):
  """highs: context columns that each block sees, [B·A]."""
  batch = len(highs) // blocks

  def make(key):
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape).astype(dtype)
    own = (batch, blocks, slots, heads)
    bound = lambda x: jnp.array(x).reshape(batch, blocks)
    return {
        "q": normal(0, *own, groups, size),
        "keys": normal(1, batch, heads, size, columns), "values": normal(2, batch, heads, columns, size),
        "k": normal(3, *own, size), "v": normal(4, *own, size), "high": bound(highs).astype(jnp.int32),
        "keep": bound(keep or [True] * len(highs)), **({} if lows is None else {"low": bound(lows).astype(jnp.int32)})}

  read = sum(min(high - low, window or high) for high, low in zip(highs, lows or [0] * len(highs)))
  item = jnp.dtype(dtype).itemsize
  return Case(
      name, make, dtype, {"window": window}, ("q", "keys", "values", "k", "v") if differentiable else (), large,
      flops=4 * (read + slots * len(highs)) * slots * heads * groups * size,
      bytes=item * heads * size * (2 * read + 2 * len(highs) * slots * (1 + groups)))


def _write(name, starts, tokens, columns, heads=2, size=32, dtype="float32", stack=None, large=False):
  """tokens: of each slot; stack: (layers, the one written)."""
  batch = len(starts)

  def make(key):
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape).astype(dtype)
    layers, at = ((), {}) if stack is None else (stack[:1], {"layer": jnp.int32(stack[1])})
    return {
        "keys": normal(0, *layers, batch, heads, size, columns), "values": normal(1, *layers, batch, heads, columns, size),
        "k": normal(2, batch, tokens, heads, size), "v": normal(3, batch, tokens, heads, size),
        "start": jnp.array(starts, jnp.int32), **at}

  return Case(name, make, dtype, large=large, bytes=4 * jnp.dtype(dtype).itemsize * batch * tokens * heads * size)


def _spread(batch: int, longest: int) -> list[int]:
  """Lengths from an eighth of the longest up."""
  return [longest // 8 + (longest - longest // 8) * (i + 1) // batch for i in range(batch)]


def _sizes():
  """The large ones."""
  qwen = {"heads": 8, "groups": 4, "size": 128, "dtype": "bfloat16", "large": True}
  for batch in (1, 16, 64):
    starts = [n - 8 for n in _spread(batch, 2048)]
    yield _verify(f"qwen3_4b_{batch}x8", [8] * batch, starts, 2048, width=8, **qwen)
  starts = [n - 8 for n in _spread(64, 2048)]
  yield _verify("qwen3_4b_ragged_64", [1 + i % 4 for i in range(64)], starts, 2048, width=8, bucket=160, **qwen)
  yield _verify("qwen3_4b_decode_16", [1] * 16, starts[::4], 2048, width=1, stack=(4, 2), **qwen)
  yield _verify("qwen3_4b_prefill_512", [512], [0], 2048, width=512, **qwen)
  yield _verify("27b_target_16x8", [8] * 16, starts[::4], 2048, width=8, **qwen | {"heads": 4, "groups": 6, "size": 256})
  yield _verify("smollm2_1x8", [8], [1000], 2048, width=8, **qwen | {"heads": 3, "groups": 3, "size": 64})
  yield _verify("qwen3_4b_16x8_float32", [8] * 16, starts[::4], 2048, width=8, **qwen | {"dtype": "float32"})


def _blocks():
  drafter = {"heads": 8, "groups": 4, "size": 128, "dtype": "bfloat16", "large": True, "slots": 8}
  for batch in (1, 16):
    yield _block(f"drafter_{batch}x8", _spread(batch, 4096), 4096, window=2048, differentiable=False, **drafter)
  anchors = [8 * i + 5 for i in range(512)]  # Of a packed row of texts of 1024 tokens.
  yield _block("training_512x7", anchors, 4096, lows=[i // 1024 * 1024 for i in anchors], blocks=512, **drafter | {"slots": 7})
  yield _block("drafter_64x8", _spread(64, 4096), 4096, window=2048, differentiable=False, **drafter)


VERIFY = (
    _verify("lengths", [4] * 5, [1, 3, 125, 126, 129], 144),  # Last rows at 4, 6, 128, 129 and 132.
    _verify("one_token", [1] * 4, [0, 126, 127, 128], 136, width=1),
    _verify("tiles", [3, 0, 4, 1], [1090, 700, 509, 3], 1100, bucket=12, window=600),
    _verify("stacked", [2, 3], [40, 125], 256, bucket=8, stack=(3, 1), reach=140, dtype="bfloat16"),
    _verify("fully_masked", [4, 4], [6, 130], 136, window=0),
    _verify("chunks", [130, 2], [5, 600], 1100, groups=3, heads=1, width=130, bucket=140),
    *_sizes(),
)
WRITE = (
    _write("straddling", [0, 125, 127, 128, 254, 256, 300], 3, 256),
    _write("stacked", [5, 120, 390], 130, 400, heads=1, stack=(3, 1), dtype="bfloat16"),
    _write("qwen3_4b_64x8", [n - 8 for n in _spread(64, 2048)], 8, 2048, heads=8, size=128, stack=(4, 2), dtype="bfloat16", large=True),
)
BLOCK = (
    _block("contexts", [0, 1, 3, 127, 128, 129], 160, keep=[True, True, True, True, False, True]),
    _block("tiles", [1100, 40], 1100, window=700, slots=8, dtype="bfloat16"),
    _block("bounds", [70, 300, 513, 515], 640, lows=[3, 70, 300, 513], blocks=2, window=90),
    # The last block stands behind the last column that there is.
    _block("training", sorted(range(3, 1103, 17), key=lambda i: i % 3), 1088, lows=[0] * 40 + [2] * 25, blocks=65, heads=1, size=16,
           slots=5, window=600),
    *_blocks(),
)
