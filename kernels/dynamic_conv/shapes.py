"""Cases of `dynamic_conv`: blocks of 1 to 129 slots, group sizes, parts, more than two blocks of the grid; large: those of a round and of
training of Qwen3-4B's drafter (D 2560, 7 slots) and of the 27 B target's (D 5120, 8 slots)."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.kernels.base import Case


def make(key, *, shape, slots, groups, taps, dtype, parts, residual):
  del slots
  keys = jax.random.split(key, 4)
  normal = lambda i, *axes: jax.random.normal(keys[i], axes)
  of = () if parts is None else (parts,)
  out = {"x": normal(0, *shape), "base": normal(1, *of, taps, shape[-1]), "dynamic": normal(2, *shape[:-1], *of, taps, groups)}
  out |= {"residual": normal(3, *shape)} if residual else {}
  return {k: v if k == "base" else v.astype(dtype) for k, v in out.items()}


def case(name, shape, slots, group, taps=2, dtype="float32", part=None, residual=False, large=False) -> Case:
  tokens, groups, size = shape[0] * shape[1], shape[-1] // group, jnp.dtype(dtype).itemsize
  arguments = functools.partial(
      make, shape=shape, slots=slots, groups=groups, taps=taps, dtype=dtype, parts=None if part is None else 2, residual=residual)
  settings = {"slots": slots} | ({} if part is None else {"part": part})
  flops = tokens * shape[-1] * (3 * taps - 1 + residual)
  moved = tokens * size * (shape[-1] * (2 + residual) + taps * groups) + 4 * taps * shape[-1]
  return Case(name, arguments, dtype, settings, ("x", "base", "dynamic", *(("residual",) if residual else ())), large, flops, moved)


def released(name, blocks, slots, width):
  """Before a sublayer, and after it with the residual."""
  shape = (blocks, slots, width)
  return (case(f"{name}_before", shape, slots, 16, dtype="bfloat16", part=0, large=True),
          case(f"{name}_after", shape, slots, 16, dtype="bfloat16", part=1, residual=True, large=True))


CASES = (
    case("one_slot", (2, 3, 128), 1, 16),
    case("three_slots_four_taps", (1, 6, 40), 3, 8, taps=4, part=1, residual=True),
    case("127_slots", (1, 127, 128), 127, 128, taps=3),
    case("128_slots_bf16", (1, 128, 128), 128, 16, dtype="bfloat16", part=1),
    case("129_slots", (1, 129, 32), 129, 1),
    case("many_blocks_bf16", (3, 28 * 7, 128), 7, 16, dtype="bfloat16", part=0, residual=True),
    case("many_channels", (2, 7 * 5, 768), 5, 16),
    *released("4b_one", 1, 7, 2560), *released("4b_64", 64, 7, 2560), *released("27b_one", 1, 8, 5120), *released("27b_16", 16, 8, 5120),
    case("4b_training", (4, 512 * 7, 2560), 7, 16, dtype="bfloat16", part=0, large=True),
    *((case(f"27b_training_{n}", (2, 512 * 8, 5120), 8, 16, dtype=t, part=1, residual=True, large=True))
      for n, t in (("bf16", "bfloat16"), ("f32", "float32"))),
)
