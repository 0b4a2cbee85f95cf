"""The walk of a path selector over the candidates of a block (DFlash 2)."""

from specdec_jax.kernels.path_walk.api import path_walk

__all__ = ["path_walk"]
