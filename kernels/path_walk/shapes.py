"""Cases of the path walk: for tests small and awkward, for benchmarks the 1.92 B drafter of DFlash 2 and its like."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.kernels.base import Case


def make(key, batch, length, count, rank, vocab, dtype, temperature):
  """Random arguments; the candidates of a slot are distinct."""
  keys = jax.random.split(key, 7)
  table = lambda k: jax.random.normal(k, (vocab, rank)).astype(dtype)
  start = jax.random.randint(keys[0], (batch, length, 1), 0, vocab)
  ids = ((start + jnp.arange(count) * max(vocab // count, 1)) % vocab).astype(jnp.int32)
  unary = jnp.sort(jax.random.normal(keys[1], ids.shape), -1, descending=True)
  out = {
      "anchor": ids[:, 0, 0], "ids": ids, "unary": unary,
      "gate": (jax.random.normal(keys[2], (batch, length, rank)) / rank**0.5).astype(dtype),
      "predecessor": table(keys[3]), "successor": table(keys[4])}
  if temperature is not None:
    out |= {
        "temperature": jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,)), "noise": jax.random.gumbel(keys[5], ids.shape)}
  return out


def case(name, batch, length, count, rank, vocab, dtype="float32", temperature=None, large=False):
  size = jnp.dtype(dtype).itemsize
  pairs = batch * length * count
  moved = (pairs + batch * length) * rank * size + batch * length * rank * size + pairs * 4 * (4 if temperature is None else 5)
  return Case(
      name, functools.partial(
          make, batch=batch, length=length, count=count, rank=rank, vocab=vocab, dtype=dtype, temperature=temperature),
      dtype, large=large, flops=2 * pairs * rank, bytes=moved)


CASES = (
    case("one slot, one candidate", 1, 1, 1, 8, 11),
    case("three blocks", 17, 3, 5, 24, 37),
    case("mixed temperatures", 3, 7, 16, 40, 61, temperature=(0.7, 0.0, 1.3)),
    case("two groups of slots", 2, 9, 32, 128, 211, temperature=1.0),
    case("bf16", 3, 4, 16, 256, 97, "bfloat16", temperature=1.0),
    *(case(f"{name}, batch {batch}{', greedy' if t is None else ''}", batch, 7, 16, 256, vocab, "bfloat16", t, large=True)
      for name, vocab in (("27B", 248320),) for batch in (1, 16, 64) for t in (None, 1.0)),
    case("4B, batch 16, 32 candidates of 16 slots", 16, 16, 32, 256, 151936, "bfloat16", 1.0, large=True),
    case("4B, batch 16, float32", 16, 7, 16, 256, 151936, "float32", 1.0, large=True),
)
