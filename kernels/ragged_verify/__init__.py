"""Attention of a few new tokens a slot against the slot cache: of tokens to verify, and of a block of drafts;
and the writing of such tokens."""

from specdec_jax.kernels.ragged_verify.api import block_attention, ragged_verify, write_rows

__all__ = ["block_attention", "ragged_verify", "write_rows"]
