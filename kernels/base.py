"""What the kernel folders share: which implementation runs where, and the cases that tests, benchmarks and compilation go through.

A folder has `ref.py`, the meaning in jnp; `pallas.py`, a TPU kernel and a Triton kernel for GPUs; `api.py`, which picks one; and
`shapes.py`, its cases.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

IMPLEMENTATIONS = ("reference", "tpu", "gpu", "tpu_interpret", "gpu_interpret")
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
  kernel of "tpu" or "gpu" cannot, the reference; each reason is logged once. On a mesh of several devices it is always the reference:
  XLA does not partition kernels. Raises ValueError for an unknown name."""
  implementation = implementation or default_implementation()
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"{op}: unknown implementation {implementation!r}: one of {', '.join(IMPLEMENTATIONS)}")
  if implementation == "reference":
    return implementation
  mesh = jax.sharding.get_abstract_mesh()
  whole = mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual
  reason = unsupported(implementation.removesuffix("_interpret")) if whole else f"a mesh of {mesh.size} devices would have to partition it"
  if reason is None:
    return implementation
  _warn(op, reason)
  return "reference"


@functools.cache
def _warn(op: str, reason: str) -> None:
  logging.warning("%s runs as plain XLA: %s", op, reason)
