"""Measures of speculative decoding: one name, one formula; counts are summed first and divided last.

Rounds come as one list per request. None stands for a figure whose denominator is 0; reports print it as "n/a".
"""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Round = tuple[int, int, int]  # (drafted, accepted, emitted)
Requests = Sequence[Sequence[Round]]

FORMULAS: dict[str, str] = {
  "accepted_length": "Σ emitted / rounds (bonus token in, prefill token out)",
  "accepted_drafts": "Σ accepted / rounds",
  "draft_acceptance_rate": "Σ accepted / Σ drafted",
  "verify_length": "Σ (1 + drafted) / rounds",
  "wasted_verify_tokens": "Σ (drafted − accepted) / Σ (1 + drafted)",
  "position_acceptance": "[k] = rounds with accepted ≥ k / rounds with drafted ≥ k, k = 1, 2, …",
  "conditional_acceptance": "[k] = rounds with accepted ≥ k / rounds with drafted ≥ k and accepted ≥ k − 1, k = 1, 2, …",
  "accepted_histogram": "[n] = rounds with accepted = n, n = 0, 1, …",
  "request_mean_accepted_length": "mean over requests with a round of (Σ emitted / rounds)",
  "macro_accepted_length": "mean over data sets with a round of accepted_length",
  "expected_accepted_length": "1 + Σ_k Π_{j ≤ k} conditional_acceptance[j]; a proxy, not a measured length",
  "rounds": "verify calls, counted once per request in the call",
  "by_request": "[i] = (rounds, Σ emitted) of request i",
  "requests": "requests measured, those without a round included",
  "longest_repeat": "longest run of one equal token in the output",
  "tokens_per_s": "delivered tokens / wall seconds (compile and warm-up outside)",
  "training_tokens_per_s": "rows · row length / wall seconds of one training step",
  "speedup": "tokens_per_s / tokens_per_s of the matched autoregressive run (same prompts, budget, stops, concurrency, process)",
  "ttft": "seconds from request to first token; p50, p90, p99, n",
  "tpot": "(last − first token time) / (tokens − 1), seconds; p50, p90, p99, n",
  "round_latency": "seconds per round; p50, p90, p99, n",
  "request_latency": "seconds per request; p50, p90, p99, n",
  "user_tps": "1 / tpot, tokens per second",
  "batch_use": "real tokens / bucket tokens",
  "ece": "expected calibration error of the cumulative product, 20 equal bins, per position",
  "brier": "mean (cumulative product − outcome)², per position",
  "auc": "area under the ROC curve of the cumulative product, per position; n/a when all outcomes agree",
  "peak_memory": "device bytes: target, drafter, caches, peak; on CPU the resident set",
  "cost_per_token": "device-seconds / delivered tokens (drafter memory stated beside it)",
}


def acceptance(requests: Requests) -> dict[str, Any]:
  """Every acceptance figure of METRICS.md, by its name in FORMULAS; lists start at draft position 1, the histogram at 0.

  Rounds of several devices or runs are put into one `requests`, so that their counts add before they divide.
  Raises ValueError naming the request and round whose counts cannot be.
  """
  per_request = [_counts(rounds, i) for i, rounds in enumerate(requests)]
  drafted, accepted, emitted = np.concatenate([np.zeros((0, 3), np.int64), *per_request]).T
  positions = range(1, int(drafted.max(initial=0)) + 1)
  rounds, verified = drafted.size, (1 + drafted).sum()
  reached = [(accepted >= k).sum() for k in positions]
  return {
    "accepted_length": _ratio(emitted.sum(), rounds),
    "accepted_drafts": _ratio(accepted.sum(), rounds),
    "draft_acceptance_rate": _ratio(accepted.sum(), drafted.sum()),
    "verify_length": _ratio(verified, rounds),
    "wasted_verify_tokens": _ratio((drafted - accepted).sum(), verified),
    "position_acceptance": [_ratio(n, (drafted >= k).sum()) for k, n in zip(positions, reached, strict=True)],
    "conditional_acceptance": [
      _ratio(n, ((drafted >= k) & (accepted >= k - 1)).sum()) for k, n in zip(positions, reached, strict=True)
    ],
    "accepted_histogram": np.bincount(accepted, minlength=len(positions) + 1).tolist() if rounds else [],
    "request_mean_accepted_length": _mean(_ratio(r[:, 2].sum(), len(r)) for r in per_request),
    "rounds": rounds,
    "requests": len(per_request),
  }


def macro_accepted_length(datasets: Mapping[str, Requests]) -> float | None:
  """Mean over data sets of accepted_length; a data set without a round counts nowhere."""
  return _mean(acceptance(requests)["accepted_length"] for requests in datasets.values())


def bootstrap(statistic: Callable[..., float], *groups: Sequence, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
  """The 95 % percentile interval of statistic(*groups) when the items (requests, documents) of each group are drawn anew.

  Groups of one length are paired: they are resampled with the same indices, as methods on the same prompts must be.
  """
  rng, found = np.random.default_rng(seed), []
  for _ in range(resamples):
    drawn = {n: rng.integers(0, n, n) for n in sorted({len(g) for g in groups})}
    found.append(statistic(*([g[i] for i in drawn[len(g)]] for g in groups)))
  low, high = np.percentile(found, [2.5, 97.5])
  return float(low), float(high)


def accepted_length_ratio(requests: Requests, baseline: Requests) -> float:
  """accepted_length over that of a baseline on the same prompts."""
  lengths = [sum(e for r in rs for _, _, e in r) / max(sum(map(len, rs)), 1) for rs in (requests, baseline)]
  return lengths[0] / lengths[1]


def pooled(parts: Iterable[tuple[float, float]]) -> float | None:
  """Σ correct / Σ total over the (correct, total) pairs of devices, micro-batches or data sets; a fraction in [0, 1].

  Raises ValueError for a pair outside 0 ≤ correct ≤ total.
  """
  correct = total = 0.0
  for i, (c, n) in enumerate(parts):
    if not 0 <= c <= n:
      raise ValueError(f"part {i}: {c} correct of {n}")
    correct, total = correct + c, total + n
  return _ratio(correct, total)


def expected_accepted_length(conditional: Sequence[float | None]) -> float | None:
  """Proxy of accepted_length from conditional acceptances: 1 + Σ_k Π_{j≤k} c_j; None where a c_j that matters is None.

  Exact only for conditional counts of full-length rounds; marginal accuracies give a wrong answer.
  Raises ValueError for a value outside [0, 1].
  """
  length = survive = 1.0
  for k, c in enumerate(conditional, 1):
    if survive == 0:
      break
    if c is None:
      return None
    if not 0 <= c <= 1:
      raise ValueError(f"conditional acceptance at position {k} is {c}, outside [0, 1]")
    survive *= c
    length += survive
  return length


def longest_repeat(tokens: Sequence[int]) -> int:
  """Length of the longest run of one equal token; 0 for no tokens."""
  tokens = np.asarray(tokens)
  if not tokens.size:
    return 0
  starts = np.flatnonzero(np.r_[True, tokens[1:] != tokens[:-1]])
  return int(np.diff(np.r_[starts, tokens.size]).max())


def percentiles(values: Iterable[float]) -> dict[str, Any]:
  """{"p50", "p90", "p99", "n"} of the values, linear between neighbours; None and n = 0 when there are none.

  Raises ValueError for a value that is not finite.
  """
  array = np.asarray(list(values), np.float64)
  if not np.isfinite(array).all():
    raise ValueError(f"value {int(np.flatnonzero(~np.isfinite(array))[0])} is not finite")
  cuts = np.percentile(array, (50, 90, 99)).tolist() if array.size else (None, None, None)
  return {**dict(zip(("p50", "p90", "p99"), cuts, strict=True)), "n": array.size}


def tpot(first: float, last: float, tokens: int) -> float | None:
  """Seconds per token after the first, (last − first) / (tokens − 1); None below two tokens, ValueError if last < first."""
  if last < first:
    raise ValueError(f"the last token, at {last} s, comes before the first, at {first} s")
  return _ratio(last - first, tokens - 1) if tokens > 1 else None


def user_tps(tpot: float | None) -> float | None:
  """Tokens per second that one user sees, 1 / tpot."""
  return _ratio(1, tpot)


def speedup(tokens_per_s: float | None, baseline_tokens_per_s: float | None) -> float | None:
  """tokens_per_s over that of the matched autoregressive run; None without such a run."""
  return None if tokens_per_s is None else _ratio(tokens_per_s, baseline_tokens_per_s)


def peak_memory_bytes() -> int:
  """High-water mark of this process's resident set, in bytes."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB.


def _counts(rounds: Sequence[Round], request: int) -> np.ndarray:
  """The rounds of one request as integers [rounds, 3], checked."""
  for i, counts in enumerate(rounds):
    where = f"request {request}, round {i}"
    if len(counts) != 3 or not all(isinstance(c, (int, np.integer)) for c in counts):
      raise ValueError(f"{where}: {counts} is not (drafted, accepted, emitted)")
    drafted, accepted, emitted = counts
    if min(counts) < 0:
      raise ValueError(f"{where}: a negative count in {counts}")
    if accepted > drafted:
      raise ValueError(f"{where}: accepted {accepted} of {drafted} drafted")
    if emitted > accepted + 1:
      raise ValueError(f"{where}: emitted {emitted} with {accepted} accepted")
  return np.array(rounds, np.int64).reshape(-1, 3)


def _ratio(numerator: float, denominator: float | None) -> float | None:
  return float(numerator / denominator) if denominator else None


def _mean(values: Iterable[float | None]) -> float | None:
  known = [v for v in values if v is not None]
  return _ratio(sum(known), len(known))
