"""markov_walk: arguments checked, an implementation chosen."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax.kernels import base as common
from specdec_jax.kernels.markov_walk import gpu, ref, tpu
from specdec_jax.kernels.markov_walk.ref import Walk
from specdec_jax.typing import Float, Int, Key

PARTS = {"markov": (0, 0), "gated": (1, 1), "rnn": (2, 3)}  # rows and columns of the weights, in units of R
WHOLE = ("previous", "table", "weights")  # What has no axis of rows.


def markov_walk(
    *, anchor: Int["B"], previous: Float["V R"], table: Float["V R"], base: Float["B L V"], projected: Float["B L R"] | None = None,
    weights: Float["R R"] | None = None, temperature: Float["B"] | None = None, keys: Key["B L"] | None = None, kind: str = "markov",
    implementation: str | None = None,
) -> Walk:
  """Drafts L tokens one after the other, each from base logits and the bias of what was drafted before it (DSpark §3.1).

  anchor: the token before slot 0. previous: W₁, table: W₂, in one dtype. base: float32 logits of the backbone, −∞ for ids that are none.
  kind "markov": features are W₁[x]. "gated": W₁[x] ⊙ σ(projected + W₁[x]·weights), projected float32 [B,L,R], weights [R,R]. "rnn":
  z = projected + [s, W₁[x]]·weights with projected float32 [B,L,3R], weights [2R,3R]; its thirds are the gate, the new state and the
  output. temperature: None for the argmax everywhere (lowest id on ties); else a row below `sampling.GREEDY_BELOW` takes the argmax and
  the others draw by the Gumbel maximum with the noise jax.random.gumbel(keys[b,k], (V,)). implementation: see `kernels.base.choose`;
  None runs a kernel where it pays. Raises ValueError where shapes or dtypes do not fit.
  """
  _check(anchor, previous, table, base, projected, weights, temperature, keys, kind)
  chosen = implementation_for(implementation, base.shape[0], table, keys)
  arguments = dict(
      anchor=anchor, previous=previous, table=table, base=base, projected=projected, weights=weights, temperature=temperature,
      keys=keys, kind=kind)
  if chosen == "reference":
    return ref.markov_walk(**arguments)
  arguments["keys"] = None if keys is None else jax.random.key_data(keys)
  platform, _, interpret = chosen.partition("_")
  walk = functools.partial({"tpu": tpu.walk, "gpu": gpu.walk}[platform], kind=arguments.pop("kind"), interpret=bool(interpret))
  split = [(x, "" if name in WHOLE else "B") for name, x in arguments.items()]
  return common.spread(lambda *arrays: walk(**dict(zip(arguments, arrays))), split, "B")


def implementation_for(implementation: str | None, batch: int, table: Float["V R"], keys: Key["B L"] | None) -> str:
  """What `markov_walk` runs for `batch` rows: the reference where a kernel cannot, or where none was asked for and it does not pay.

  On a mesh rows are split. The vocabulary is not: where the tensor axis splits it, W₂ and the base logits would be gathered in every
  round, for Qwen3-4B and 16 rows 146 MB by every device, which takes as long as the rest of the draft; the reference exchanges a few
  numbers a row and slot."""
  def unsupported(platform):
    if common.ways("tensor") > 1:
      return f"the tensor axis of the mesh splits its vocabulary over {common.ways('tensor')} devices, and the kernels need all of it"
    if keys is not None and (str(jax.random.key_impl(keys)) != "threefry2x32" or not jax.config.jax_threefry_partitionable):
      return f"the noise is made in the kernel, which knows partitionable threefry2x32 keys and not {jax.random.key_impl(keys)}"
    kernel = {"tpu": tpu, "gpu": gpu}[platform]
    return kernel.unsupported(batch, table) or (None if implementation else kernel.does_not_pay(table))

  return common.choose("markov_walk", implementation, unsupported)


def _check(anchor, previous, table, base, projected, weights, temperature, keys, kind) -> None:
  if kind not in PARTS:
    raise ValueError(f"markov_walk: unknown kind {kind!r}: one of {', '.join(PARTS)}")
  if base.ndim != 3 or table.ndim != 2:
    raise ValueError(f"markov_walk: base must be [B,L,V] and table [V,R], not {base.shape} and {table.shape}")
  (batch, length, vocab), rank = base.shape, table.shape[1]
  rows, columns = (n * rank for n in PARTS[kind])
  expected = {
      "anchor": (anchor, (batch,)), "table": (table, (vocab, rank)), "previous": (previous, (vocab, rank)),
      "projected": (projected, (batch, length, columns) if rows else None), "weights": (weights, (rows, columns) if rows else None),
      "temperature": (temperature, None if temperature is None else (batch,)),
      "keys": (keys, None if temperature is None else (batch, length))}
  for name, (array, shape) in expected.items():
    found = None if array is None else tuple(array.shape)
    if found != shape:
      raise ValueError(f"markov_walk: {name} must be {shape or 'None'} for base {base.shape}, rank {rank} and kind {kind!r}, not {found}")
  for name, array in (("base", base), ("projected", projected), ("temperature", temperature)):
    if array is not None and array.dtype != jnp.float32:
      raise ValueError(f"markov_walk: {name} must be float32, not {array.dtype}")
  if previous.dtype != table.dtype or table.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"markov_walk: previous and table must both be float32 or both bfloat16, not {previous.dtype} and {table.dtype}")
