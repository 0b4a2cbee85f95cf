"""The choice among implementations of the path walk."""

import jax.numpy as jnp

from specdec_jax import sharding
from specdec_jax.kernels import base
from specdec_jax.kernels.path_walk import pallas, ref
from specdec_jax.typing import Float, Int


def path_walk(
    *, anchor: Int["B"], ids: Int["B L C"], unary: Float["B L C"], gate: Float["B L R"], predecessor: Float["V R"],
    successor: Float["V R"], temperature: Float["B"] | None = None, noise: Float["B L C"] | None = None, implementation: str | None = None,
) -> tuple[Int["B L"], Float["B L C"], Float["B L C"]]:
  """The path through the candidates `ids` with logits `unary`, from the token `anchor` on: (index of the candidate taken at every slot,
  the scores of each slot's candidates after the one taken before, their distribution q).

  S_t(a, b) = unary_t(b) + ⟨A(a) ⊙ gate_t, B(b)⟩ with A `predecessor` and B `successor`. temperature None: every row is greedy, takes
  the best score, lowest index on ties, and q [B,L,1] is that of the candidate taken. Else a token is drawn from q =
  softmax(S / temperature) by the Gumbel maximum with `noise`, and rows of temperature 0 are greedy. A row that is no distribution (NaN
  or +inf scores, or all −inf) gives index -1 and a q of NaN or, all −inf, 0. Raises ValueError for shapes that do not fit.
  """
  check(anchor, ids, unary, gate, predecessor, successor, temperature, noise)
  chosen = base.choose("path_walk", implementation, lambda platform: unsupported(platform, ids.shape[-1], predecessor.size))
  bias, scale = ref.folded(unary, temperature, noise)
  arguments = bias, scale, anchor, ids, gate, predecessor, successor
  if chosen == "reference":
    index, pair = ref.walk(*arguments)
  else:
    index, pair = _walk(chosen, *arguments)
  return ref.outcome(index, pair, unary, temperature, scale)


def _walk(chosen: str, bias, scale, anchor, ids, gate, predecessor, successor):
  """`ref.walk` by a kernel. On a mesh requests are split. The codebooks, whose ids lie on different devices, are not gathered: XLA takes
  the rows of a request's tokens from them, and the kernel walks in a vocabulary of these."""
  kernel, interpret = pallas.tpu if chosen.startswith("tpu") else pallas.gpu, chosen.endswith("_interpret")
  if base.ways(sharding.AXES) == 1:
    return kernel(bias, scale, anchor, ids, gate, predecessor, successor, interpret=interpret)
  tokens = jnp.concatenate([anchor[:, None], ids.reshape(len(ids), -1)], 1)

  def run(bias, scale, gate, predecessor, successor):
    place = jnp.arange(predecessor.shape[0] * predecessor.shape[1]).reshape(predecessor.shape[:2])
    tables = (x.reshape(-1, x.shape[-1]) for x in (predecessor, successor))
    return kernel(bias, scale, place[:, 0], place[:, 1:].reshape(bias.shape), gate, *tables, interpret=interpret)

  return base.spread(run, [(x, "B") for x in (bias, scale, gate, ref.rows(predecessor, tokens), ref.rows(successor, tokens))], "B")


def unsupported(platform: str, candidates: int, table: int) -> str | None:
  """Why the kernel of a platform cannot walk through that many candidates a slot of codebooks with that many numbers."""
  if candidates > 32:
    return f"{candidates} candidates, its kernels take at most 32"
  if platform == "gpu" and table >= 2**31:
    return f"codebooks of {table} numbers, beyond 32-bit offsets"
  return None


def check(anchor, ids, unary, gate, predecessor, successor, temperature, noise) -> None:
  """Raises ValueError where a shape does not follow from ids [B,L,C] and predecessor [V,R]."""
  if ids.ndim != 3 or predecessor.ndim != 2:
    raise ValueError(f"path_walk: ids must be [B,L,C] and predecessor [V,R], not {ids.shape} and {predecessor.shape}")
  if (temperature is None) != (noise is None):
    raise ValueError("path_walk: temperature and noise go together: both, or neither for a greedy walk")
  batch, length, _ = ids.shape
  wanted = {
      "anchor": (anchor, (batch,)), "unary": (unary, ids.shape), "gate": (gate, (batch, length, predecessor.shape[1])),
      "successor": (successor, predecessor.shape), "temperature": (temperature, (batch,)), "noise": (noise, ids.shape)}
  for name, (x, shape) in wanted.items():
    if x is not None and x.shape != shape:
      raise ValueError(f"path_walk: {name} must be {shape}, not {x.shape}, with ids {ids.shape} and predecessor {predecessor.shape}")
