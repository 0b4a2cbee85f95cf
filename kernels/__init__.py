"""Kernels for TPUs and GPUs with their meaning in plain JAX; one folder an operation (see `base`)."""

from specdec_jax.kernels.base import Case, Op, default_implementation

OPS: dict[str, Op] = {}
__all__ = ["OPS", "Case", "Op", "default_implementation"]
