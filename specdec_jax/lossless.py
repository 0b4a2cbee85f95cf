"""Checks on real outputs that speculation changed nothing (METRICS, losslessness contracts).

Contract 1, greedy float32: equal texts. Contract 2, greedy bfloat16: equal, or apart at a near tie. Contract 3, sampling: the
target's own distribution, which no single text shows: `surprisal` tests every token against it, `two_samples` tests
positions against the target's own samples.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decode import Completion, round_up
from specdec_jax.models.target import Target
from specdec_jax.sampling import Sampling, adjusted, distribution, make_sampling
from specdec_jax.typing import Float, Int

LEAST_LOG_P = -5.0  # Rarer tokens count as this rare: what is bounded can be tested by few tokens.
FLOAT32_NOISE = 1e-3  # What a cache, another batch or another block length may move a float32 logit by.


@dataclasses.dataclass(frozen=True)
class Forced:
  """What the target says of each token [T] of a text, read in one pass (teacher forcing), settings applied.

  log_p: of the token, −inf for one that is impossible, beyond near ties of what decides that; mean, variance: of
  max(log p, LEAST_LOG_P) under the same distribution; gap: the best logit less the token's; tie: gaps up to it are near ties, one
  bfloat16 step of the best logit, or float32 noise.
  """

  log_p: Float["T"]
  mean: Float["T"]
  variance: Float["T"]
  gap: Float["T"]
  tie: Float["T"]


def teacher_force(target: Target, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 0.0, **settings) -> Forced:
  """One pass over prompt and tokens; settings as of `generate`, for this request."""
  text, start = [*prompt, *tokens], len(prompt)
  rows = np.zeros((2, 1, round_up(len(text), 64)), np.int32)
  rows[0, 0, : len(text)], rows[1] = text, -1
  rows[1, 0, start : len(text)] = tokens
  sampling = make_sampling(1, target.vocab, temperature, prompts=[prompt], **settings)
  out = _forced(target.decoder, target.dtype, target.params, jnp.asarray(rows[0]), jnp.asarray(rows[1]), sampling)
  return Forced(*(np.asarray(x, np.float64)[start - 1 : len(text) - 1] for x in out))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forced(decoder, dtype: str, params, tokens: Int["B T"], emitted: Int["B T"], sampling):
  """Of row t, what it says of token t+1 (of the last, nothing): log p, mean and variance of the bounded one, gap, largest near tie."""
  hidden, _, _ = decoder.apply({"params": params}, tokens)
  logits = decoder.apply({"params": params}, hidden, method="logits")
  sampling = sampling.along(emitted)
  if sampling.counts is not None:
    sampling = sampling.replace(counts=sampling.counts[:, 1:])  # Row t has read the tokens up to t.
  p, adjust = distribution(logits, sampling), adjusted(logits, sampling)
  log_p = jnp.log(p)
  bounded = jnp.maximum(log_p, LEAST_LOG_P)
  mean = (p * bounded).sum(-1)
  following = jnp.roll(tokens, -1, 1)
  of_next = lambda x: jnp.take_along_axis(x, following[..., None], -1)[..., 0]
  tie = _tie(dtype, adjust.max(-1))
  nearly = distribution(logits + tie[..., None] * jax.nn.one_hot(following, logits.shape[-1]), _widened(sampling, tie.max()))
  found = of_next(log_p)
  found = jnp.where(found == -jnp.inf, jnp.log(of_next(nearly)), found)
  return tuple(x[0] for x in (found, mean, (p * (bounded - mean[..., None]) ** 2).sum(-1), adjust.max(-1) - of_next(adjust), tie))


def _tie(dtype: str, best: Float["B T"]) -> Float["B T"]:
  """What a logit may be off by beside the best one."""
  if dtype == "float32":
    return jnp.full(best.shape, FLOAT32_NOISE)
  return 2.0 ** (jnp.floor(jnp.log2(jnp.maximum(jnp.abs(best), 1e-6))) - 7)  # bfloat16 holds 8 significant bits.


def _widened(sampling: Sampling, noise: float) -> Sampling:
  """Settings whose nucleus reaches as far as that of logits that are off by `noise`."""
  if sampling.top_p is None:
    return sampling
  share = sampling.top_p
  return sampling.replace(top_p=share + 2 * noise / sampling.temperature * share * (1 - share))


@dataclasses.dataclass(frozen=True)
class Divergence:
  """Where two greedy texts of one prompt part: request, output position, the gap of the target's logits of the two tokens
  there (inf where one text has ended), and whether that is a near tie."""

  request: int
  position: int
  gap: float
  near_tie: bool


def first_divergences(target: Target, prompts, ours: Sequence[Completion], plain: Sequence[Completion], **settings) -> list[Divergence]:
  """One for each request whose texts differ."""
  out = []
  for i, (prompt, a, b) in enumerate(zip(prompts, ours, plain, strict=True)):
    if a.tokens == b.tokens:
      continue
    at = next((k for k, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
    if at is None:
      out.append(Divergence(i, min(len(a.tokens), len(b.tokens)), math.inf, False))
      continue
    one, other = (teacher_force(target, prompt, c.tokens[: at + 1], **settings) for c in (a, b))
    gap = abs(float(one.gap[-1] - other.gap[-1]))
    out.append(Divergence(i, at, gap, gap <= one.tie[-1]))
  return out


def identical(ours: Sequence[Completion], plain: Sequence[Completion]) -> int:
  """Requests whose tokens are equal (contract 1)."""
  return sum(a.tokens == b.tokens for a, b in zip(ours, plain, strict=True))


@dataclasses.dataclass(frozen=True)
class Surprisal:
  """How probable sampled tokens were beyond what is expected of samples: the sum of their bounded log p less its means, the variance
  of that sum, and how many tokens could not be sampled at all. Those of several runs add."""

  total: float
  variance: float
  impossible: int

  def __add__(self, other: "Surprisal") -> "Surprisal":
    return Surprisal(self.total + other.total, self.variance + other.variance, self.impossible + other.impossible)

  @property
  def z(self) -> float:
    """The sum in standard deviations; normal only where many surprises are expected."""
    return -math.inf if self.impossible else self.total / math.sqrt(max(self.variance, 1e-12))

  @property
  def p_value(self) -> float:
    """A bound on the probability of a sum so far from 0, either way, where all is well. It holds for any number of tokens, however
    they depend on those before, also where hardly a surprise is expected (Freedman 1975, for sums of bounded differences)."""
    if self.impossible:
      return 0.0
    off = abs(self.total)
    return min(1.0, 2 * math.exp(-(off**2) / (2 * (self.variance - LEAST_LOG_P * off / 3)))) if off else 1.0


def surprisal(target: Target, prompts: Sequence[Sequence[int]], done: Sequence[Completion], temperature: float, **settings) -> Surprisal:
  """Whether sampled tokens are as surprising as the target's own samples are (contract 3), every position teacher-forced."""
  forced = [teacher_force(target, prompt, c.tokens, temperature, **settings) for prompt, c in zip(prompts, done, strict=True)]
  return Surprisal(
      sum(float((np.maximum(f.log_p, LEAST_LOG_P) - f.mean).sum()) for f in forced), sum(float(f.variance.sum()) for f in forced),
      sum(int((f.log_p == -np.inf).sum()) for f in forced))


@dataclasses.dataclass(frozen=True)
class TwoSamples:
  """Ours against the target's own samples at each output position: p of a chi-square test, total variation, and the total
  variation that two samples of one distribution have by chance (mean over shuffles)."""

  p_value: list[float]
  total_variation: list[float]
  noise_floor: list[float]


def two_samples(ours: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], positions: int, shuffles: int = 50) -> TwoSamples:
  """Compares the first `positions` tokens of independent samples; a text that has ended counts as one more token."""
  rng = np.random.default_rng(0)
  at = lambda samples, k: np.array([s[k] if k < len(s) else -1 for s in samples])
  return TwoSamples(*map(list, zip(*(_compare(at(ours, k), at(plain, k), rng, shuffles) for k in range(positions)))))


def _compare(a: Int["n"], b: Int["n"], rng: np.random.Generator, shuffles: int) -> tuple[float, float, float]:
  """p of the chi-square test, total variation, and its mean over shuffles, of two samples of ids."""
  ids, together = np.unique(np.concatenate([a, b]), return_inverse=True)
  count = lambda x: np.bincount(x, minlength=len(ids))
  distance = lambda x: float(0.5 * np.abs(count(x[: len(a)]) / len(a) - count(x[len(a) :]) / len(b)).sum())
  floor = float(np.mean([distance(rng.permutation(together)) for _ in range(shuffles)]))
  return _chi_square(count(together[: len(a)]), count(together[len(a) :])), distance(together), floor


def _chi_square(a: Int["n"], b: Int["n"]) -> float:
  """p of the test that two histograms are of one distribution; cells of fewer than 10 in all are one cell."""
  rare = a + b < 10
  table = np.stack([np.append(x[~rare], x[rare].sum()) for x in (a, b)]).astype(float)
  table = table[:, table.sum(0) > 0]
  if table.shape[1] < 2:
    return 1.0
  expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
  return float(jax.scipy.stats.chi2.sf(((table - expected) ** 2 / expected).sum(), table.shape[1] - 1))
