"""Kernels for TPUs and GPUs with their meaning in plain JAX; one folder an operation (see `base`)."""

from specdec_jax.kernels.base import Case, Op, default_implementation
from specdec_jax.kernels.dynamic_conv import dynamic_conv
from specdec_jax.kernels.dynamic_conv import ref as dynamic_conv_ref
from specdec_jax.kernels.dynamic_conv import shapes as dynamic_conv_shapes
from specdec_jax.kernels.markov_walk import markov_walk
from specdec_jax.kernels.markov_walk import ref as markov_walk_ref
from specdec_jax.kernels.markov_walk import shapes as markov_walk_shapes
from specdec_jax.kernels.path_walk import path_walk
from specdec_jax.kernels.path_walk import ref as path_walk_ref
from specdec_jax.kernels.path_walk import shapes as path_walk_shapes
from specdec_jax.kernels.ragged_verify import block_attention, ragged_verify, write_rows
from specdec_jax.kernels.ragged_verify import ref as ragged_ref
from specdec_jax.kernels.ragged_verify import shapes as ragged_shapes

OPS: dict[str, Op] = {op.name: op for op in (
    Op("dynamic_conv", dynamic_conv, dynamic_conv_ref.dynamic_conv, dynamic_conv_shapes.CASES),
    Op("markov_walk", markov_walk, markov_walk_ref.markov_walk, markov_walk_shapes.CASES),
    Op("path_walk", path_walk, path_walk_ref.path_walk, path_walk_shapes.CASES),
    Op("block_attention", block_attention, ragged_ref.block_attention, ragged_shapes.BLOCK),
    Op("ragged_verify", ragged_verify, ragged_ref.ragged_verify, ragged_shapes.VERIFY),
    Op("write_rows", write_rows, ragged_ref.write_rows, ragged_shapes.WRITE),
)}
__all__ = [
    "Case", "OPS", "Op", "block_attention", "default_implementation", "dynamic_conv",
    "markov_walk", "path_walk", "ragged_verify", "write_rows"]
