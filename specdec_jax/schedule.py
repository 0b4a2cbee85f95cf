"""How many drafts of each request are verified (DSpark §5.2, Algorithm 1).

Pure functions, no host reads. A request's length is always a prefix. Whether draft k is verified may depend on drafts before
it and on older rounds, never on draft k itself or later ones: `fixed`, `by_threshold`, `causal` and `by_rank` keep to that on
this round's confidences, `unconstrained` does not and is for confidences of older rounds, of which `asynchronous` takes its
budget.

Survival of draft k is the product of the confidences up to it. Confidences that are no probabilities (NaN, outside [0, 1])
count as 0, and `invalid` counts them. Ties go by request, then position. sps [n]: verify steps per second, entry b-1 for a step of
b tokens, up to all drafts of all requests (`CostTable.sps(most)`); every request has one token in a step without any draft.

Exact on two conditions that `generate` keeps: no noise is drawn from twice (`Sampling.round_keys`), and requests that are
scheduled together have seeds of their own. Else one request's drafts tell of another's, or of its own next ones, beforehand.
"""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax.typing import Float, Int

Schedule = Callable[[Float["B L"]], Int["B"]]  # conditional confidence, probabilities → lengths


def invalid(confidence: Float["B L"]) -> Int[""]:
  """How many confidences are no probabilities."""
  return (~((confidence >= 0) & (confidence <= 1))).sum()


def survival(confidence: Float["B L"]) -> Float["B L"]:
  """The probability that a draft and all before it are accepted."""
  return jnp.cumprod(jnp.where((confidence >= 0) & (confidence <= 1), confidence, 0.0), -1)


def fixed(confidence: Float["B L"], length: int) -> Int["B"]:
  """`length` drafts of every request."""
  return jnp.full(confidence.shape[:1], min(length, confidence.shape[1]), jnp.int32)


def by_threshold(confidence: Float["B L"], threshold: float) -> Int["B"]:
  """The longest prefix whose survival stays at or above `threshold`."""
  return (survival(confidence) >= threshold).sum(-1).astype(jnp.int32)


def causal(confidence: Float["B L"], sps: Float["n"]) -> Int["B"]:
  """Algorithm 1: drafts of all requests in the order of their survival, until one does not raise the expected tokens per second."""
  alive, best_first, theta = throughput(confidence, sps)
  return _first(alive, best_first, jnp.argmin(jnp.append(theta[1:] > theta[:-1], False)))


def unconstrained(confidence: Float["B L"], sps: Float["n"]) -> Int["B"]:
  """The prefix of that order with the most expected tokens per second, wherever it ends. Not lossless on the confidences of the
  drafts that it schedules (DSpark appendix A)."""
  alive, best_first, theta = throughput(confidence, sps)
  return _first(alive, best_first, jnp.argmax(theta))


def by_rank(confidence: Float["B L"], budget: Int[""] | int) -> Int["B"]:
  """The `budget` drafts of highest survival, over all requests; fewer where survival is 0."""
  alive = survival(confidence)
  return _first(alive, _best_first(alive), budget)


def asynchronous(confidence: Float["B L"], older: Float["B L"], sps: Float["n"]) -> Int["B"]:
  """As many drafts as `unconstrained` would have verified two rounds ago, on the confidences of then, admitted by rank of the
  survival of now: exact, whatever the shape of sps, and known to the host before this round begins."""
  return by_rank(confidence, unconstrained(older, sps).sum())


def expected_throughput(confidence: Float["B L"], lengths: Int["B"], sps: Float["n"]) -> Float[""]:
  """Θ, expected tokens per second of one step that verifies `lengths` drafts: Σ(1 + survivals) · SPS(Σ(1 + lengths))."""
  sps = _covering(sps, confidence)
  admitted = jnp.arange(confidence.shape[1]) < lengths[:, None]
  tokens = len(lengths) + lengths.sum()
  return (len(lengths) + (survival(confidence) * admitted).sum()) * sps[tokens - 1]


def _covering(sps, confidence) -> Float["n"]:
  """sps as an array. Raises ValueError where steps could be longer than its entries: tokens without a cost would be free."""
  sps = jnp.asarray(sps, jnp.float32)
  most = confidence.shape[0] * (1 + confidence.shape[1])
  if sps.ndim != 1 or len(sps) < most:
    raise ValueError(f"sps has {sps.size} entries for steps of up to {most} tokens: see CostTable.sps(most)")
  return sps


def _best_first(alive: Float["B L"]) -> Float["n"]:
  return -jnp.sort(-alive.reshape(-1), stable=False)


def _first(alive: Float["B L"], best_first: Float["n"], count) -> Int["B"]:
  """Lengths when the first `count` drafts in the order of admission are admitted, none whose survival is 0."""
  value = best_first[jnp.clip(count, 1, alive.size) - 1]  # Of the last one admitted; of its equals the first ones are.
  above, equal = alive > value, alive == value
  place = jnp.cumsum(equal.reshape(-1)).reshape(alive.shape)
  admitted = (above | (equal & (place <= count - above.sum()))) & (alive > 0)
  return jnp.where(count > 0, admitted.sum(-1), 0).astype(jnp.int32)


def throughput(confidence: Float["B L"], sps) -> tuple[Float["B L"], Float["n"], Float["n"]]:
  """(survivals, the same best first, Θ after the first 0, 1, … of them; −inf beyond the drafts that can survive)."""
  alive = survival(confidence)
  best_first = _best_first(alive)
  requests, count = confidence.shape[0], jnp.arange(confidence.size + 1)
  theta = (requests + jnp.pad(jnp.cumsum(best_first), (1, 0))) * _covering(sps, confidence)[requests + count - 1]
  return alive, best_first, jnp.where(count <= (alive > 0).sum(), theta, -jnp.inf)
