"""Lossless speculative decoding in JAX."""

from specdec_jax import calibrate, cost, schedule, verify
from specdec_jax.decode import Completion, generate
from specdec_jax.hub import export, load_drafter, load_target

__version__ = "0.1.0"
__all__ = ["Completion", "calibrate", "cost", "export", "generate", "load_drafter", "load_target", "schedule", "verify"]
