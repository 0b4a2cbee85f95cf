"""Dynamic depthwise convolution over the slots of a block."""

from specdec_jax.kernels.dynamic_conv.api import dynamic_conv

__all__ = ["dynamic_conv"]
