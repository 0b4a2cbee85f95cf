"""Attention of a few new tokens a slot against the slot cache: of tokens to verify, and of a block of drafts."""

from specdec_jax.kernels.ragged_verify.api import block_attention, ragged_verify

__all__ = ["block_attention", "ragged_verify"]
