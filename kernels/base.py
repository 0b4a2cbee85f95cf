"""What the kernel folders share: which implementation runs where, and the cases that tests, benchmarks and compilation go through.

A folder has `ref.py`, the meaning in jnp; `pallas.py`, a TPU kernel and a Triton kernel for GPUs; `api.py`, which picks one and
says how a mesh splits its arguments; and `shapes.py`, its cases.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import PartitionSpec as P

from specdec_jax import sharding

IMPLEMENTATIONS = ("reference", "tpu", "gpu", "tpu_interpret", "gpu_interpret")
SPLIT = {"B": sharding.BATCH, "K": "tensor"}  # The mesh axes that an axis of the legend lies along, where they divide it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of values and gradients against the reference, absolute and relative


@dataclasses.dataclass(frozen=True)
class Case:
  """One set of arguments of a kernel. make: typed key → {argument: array}; settings: static arguments; differentiable: arguments that
  a gradient is taken for; large: for benchmarks and compilation, the rest is for tests; flops, bytes: what the call has to
  compute and to move at least (floating-point operations; bytes of device memory)."""

  name: str
  make: Callable[[jax.Array], dict[str, jax.Array]]
  dtype: str = "float32"
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  differentiable: tuple[str, ...] = ()
  large: bool = False
  flops: int = 0
  bytes: int = 0

  def __str__(self):
    return self.name

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """What `make` returns, without making it."""
    return jax.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Op:
  """A kernel as tests and benchmarks see it: call(*, implementation, **arguments, **settings), the reference with the same
  arguments, and cases."""

  name: str
  call: Callable[..., Any]
  reference: Callable[..., Any]
  cases: tuple[Case, ...]


def default_implementation() -> str:
  """That of the default backend: kernels on TPUs and GPUs, the reference elsewhere."""
  return {"tpu": "tpu", "gpu": "gpu"}.get(jax.default_backend(), "reference")


def choose(op: str, implementation: str | None, unsupported: Callable[[str], str | None]) -> str:
  """The implementation that runs: the one asked for (None: the default) or, where `unsupported(platform)` gives a reason why the
  kernel of "tpu" or "gpu" cannot, the reference; each reason is logged once. On a mesh of several devices a kernel has to run under
  `spread`, since XLA does not partition it; where that cannot be, it is the reference. Raises ValueError for an unknown name."""
  implementation = implementation or default_implementation()
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"{op}: unknown implementation {implementation!r}: one of {', '.join(IMPLEMENTATIONS)}")
  if implementation == "reference":
    return implementation
  reason = _beyond_spread() or unsupported(implementation.removesuffix("_interpret"))
  if reason is None:
    return implementation
  _warn(op, reason)
  return "reference"


def spread(call: Callable, arguments: Sequence[tuple[Any, str]], results: Any) -> Any:
  """call(*arrays), on a mesh by every device on its own part (`jax.shard_map`).

  arguments: arrays or None, each with the letters (`typing`) of its first axes; results: such letters for what `call` returns, in the
  form of that or of a prefix. What SPLIT names is split where the mesh divides it; else the devices along those mesh axes hold it whole
  and all do the same. Gradients of what is whole are summed over the devices."""
  mesh = jax.sharding.get_abstract_mesh()
  if _on_one_device(mesh):
    return call(*(x for x, _ in arguments))
  sizes = {letter: size for x, letters in arguments if x is not None for letter, size in zip(letters, jnp.shape(x))}
  names = {letter: axes for letter, axes in SPLIT.items() if letter in sizes and sizes[letter] % sharding.ways(mesh, axes) == 0}
  spec = lambda letters: P(*(names.get(letter) for letter in letters))
  arrays, letters = zip(*arguments)
  # A kernel's results do not say along which mesh axes they vary, so there is nothing to check.
  return jax.shard_map(call, in_specs=tuple(map(spec, letters)), out_specs=jax.tree.map(spec, results), check_vma=False)(*arrays)


def ways(axes: str | Sequence[str]) -> int:
  """Parts that these axes of the mesh in use split something into: 1 without one, and where a device already sees its own part only."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if _on_one_device(mesh) or _beyond_spread() else sharding.ways(mesh, axes)


def _on_one_device(mesh) -> bool:
  return mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual


def _beyond_spread() -> str | None:
  """Why `spread` cannot run on the mesh in use, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  if _on_one_device(mesh):
    return None
  if not set(sharding.AXES) <= set(mesh.axis_names):
    return f"a mesh with axes {', '.join(mesh.axis_names)}: kernels are split along {', '.join(sharding.AXES)}"
  return f"the mesh axes {', '.join(mesh.manual_axes)} alone are manual" if mesh.manual_axes else None


@functools.cache
def _warn(op: str, reason: str) -> None:
  logging.warning("%s runs as plain XLA: %s", op, reason)
