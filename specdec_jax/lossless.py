"""Checks on real outputs that speculation changed nothing (METRICS, losslessness contracts)."""

import math
from collections.abc import Sequence

import numpy as np

from specdec_jax.decode import Completion, round_up
from specdec_jax.models.target import Target
from specdec_jax.sampling import distribution, make_sampling


def identical(ours: Sequence[Completion], plain: Sequence[Completion]) -> int:
  """Requests whose tokens are equal (contract 1)."""
  return sum(a.tokens == b.tokens for a, b in zip(ours, plain))


def surprisal_z(target: Target, prompts: Sequence[Sequence[int]], done: Sequence[Completion], temperature: float) -> float:
  """Whether sampled tokens are as surprising as the target's own samples are: a z-score, |z| > 4 is a fault (contract 3).

  Every position is teacher-forced. If token x is drawn from p, log p(x) has mean Σ p log p; the differences add up to a sum
  of mean 0 and known variance. A token of probability 0 gives −inf.
  """
  total, variance = 0.0, 0.0
  for prompt, c in zip(prompts, done):
    tokens = [*prompt, *c.tokens]
    row = np.zeros((1, round_up(len(tokens), 64)), np.int32)
    row[0, : len(tokens)] = tokens
    logits = target.forward(row).logits[:, len(prompt) - 1 : len(tokens) - 1]
    p = np.asarray(distribution(logits, make_sampling(1, target.config.vocab, temperature))[0], np.float64)
    with np.errstate(divide="ignore"):
      log_p = np.log(p)
    finite = np.where(p > 0, log_p, 0.0)
    mean = (p * finite).sum(-1)
    total += float((log_p[np.arange(len(c.tokens)), c.tokens] - mean).sum())
    variance += float((p * (finite - mean[:, None]) ** 2).sum())
  return total / math.sqrt(max(variance, 1e-12))
