"""Kernels, one folder an operation; imported as `specdec_jax.kernels`."""
