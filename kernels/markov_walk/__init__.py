"""The sequential sampling loop of a block drafter's Markov, gated or RNN head, without a bias over the vocabulary in memory."""

from specdec_jax.kernels.markov_walk.api import implementation_for, markov_walk
from specdec_jax.kernels.markov_walk.ref import Walk

__all__ = ["Walk", "implementation_for", "markov_walk"]
