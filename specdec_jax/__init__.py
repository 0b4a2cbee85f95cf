"""Lossless speculative decoding in JAX."""

from specdec_jax import advise, calibrate, cost, schedule, verify
from specdec_jax.decode import Completion, generate
from specdec_jax.engine import Engine
from specdec_jax.hub import export, load_drafter, load_target

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "advise", "calibrate", "cost", "export", "generate", "load_drafter", "load_target", "schedule", "verify"]
