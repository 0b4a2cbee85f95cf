"""Kernels for TPUs and GPUs with their meaning in plain JAX; one folder an operation (see `base`)."""

from specdec_jax.kernels.base import Case, Op, default_implementation
from specdec_jax.kernels.dynamic_conv import dynamic_conv
from specdec_jax.kernels.dynamic_conv import ref as dynamic_conv_ref
from specdec_jax.kernels.dynamic_conv import shapes as dynamic_conv_shapes

OPS: dict[str, Op] = {
    "dynamic_conv": Op("dynamic_conv", dynamic_conv, dynamic_conv_ref.dynamic_conv, dynamic_conv_shapes.CASES),
}
__all__ = ["OPS", "Case", "Op", "default_implementation", "dynamic_conv"]
