"""What to serve with: expected throughput and speed per user of every way to decode, from recorded blocks and cost tables.

Recorded blocks say how many drafts of a full block were accepted and how sure the drafter was; a cost table says what a step of so
many tokens takes. Putting blocks of as many requests as are served at once into one step, over and over, gives what a schedule
would have made of them (DSpark §5, Figures 7 and 8).
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from specdec_jax import schedule
from specdec_jax.typing import Float, Int

Lengths = Callable[[Float["B L"], Float["B L"], Float["n"]], Int["B"]]  # confidences, those of older rounds, sps → lengths


@dataclasses.dataclass(frozen=True)
class Outlook:
  """Of one way to decode at one concurrency: throughput, tokens per second of all requests; user_tps, of one of them; mean
  accepted_length and verify_length of a round."""

  throughput: float
  user_tps: float
  accepted_length: float
  verify_length: float


def alone(sps: Float["n"], concurrency: int) -> Outlook:
  """The target without a drafter."""
  return Outlook(concurrency * float(sps[concurrency - 1]), float(sps[concurrency - 1]), 1.0, 1.0)


def fixed(length: int) -> Lengths:
  """The same drafts of every request."""
  return lambda confidence, older, sps: schedule.fixed(confidence, length)


def replay(
    confidence: Float["n L"], accepted: Int["n"], sps: Float["n"], concurrency: int, lengths: Lengths = schedule.asynchronous,
    group: Int["n"] | None = None, steps: int = 256, seed: int = 0,
) -> Outlook:
  """Steps over `concurrency` recorded blocks each, drawn anew for every step, as a schedule cuts them.

  confidence [n,L]: calibrated, conditional; accepted [n]: drafts of each full block that were accepted; sps: as of `schedule`, for
  all drafts of all requests; group [n]: what blocks come from (a data set): the older confidences of a request are those of another
  block of its group. All that is particular to one request is lost. Raises ValueError for shapes that do not fit.
  """
  confidence, accepted = np.asarray(confidence, np.float32), np.asarray(accepted)
  group = np.zeros(len(accepted), int) if group is None else np.asarray(group)
  if confidence.ndim != 2 or accepted.shape != confidence.shape[:1] or group.shape != accepted.shape or not len(accepted):
    raise ValueError(
        "expected confidences [n,L], accepted [n] and groups [n] of a block or more, "
        f"not {confidence.shape}, {accepted.shape}, {group.shape}")
  rng = np.random.default_rng(seed)
  members = [np.flatnonzero(group == g) for g in np.unique(group)]
  whose = rng.integers(0, len(members), (steps, concurrency))
  sizes, order = np.array([len(m) for m in members]), np.concatenate(members)
  first = np.cumsum(sizes) - sizes
  now, older = (order[first[whose] + rng.integers(0, sizes[whose])] for _ in range(2))
  sps = np.asarray(sps, np.float32)
  chosen = np.asarray(jax.jit(jax.vmap(lengths, (0, 0, None)))(confidence[now], confidence[older], sps))
  emitted = 1 + np.minimum(accepted[now], chosen)
  seconds = float((1 / sps[concurrency + chosen.sum(1) - 1].astype(np.float64)).sum())
  return Outlook(
      float(emitted.sum()) / seconds, float(emitted.sum()) / concurrency / seconds, float(emitted.mean()), float(1 + chosen.mean()))


def with_drafting(sps: Float["n"], concurrency: int, seconds: float) -> Float["n"]:
  """Steps per second where every step that verifies a draft takes `seconds` longer, to make it."""
  return np.where(np.arange(1, len(sps) + 1) > concurrency, 1 / (1 / np.asarray(sps) + seconds), sps)


def pays_until(outlooks: Mapping[int, Mapping[str, Outlook]], way: str, baseline: str, gain: float = 1.0) -> int | None:
  """The largest concurrency up to which `way` has more than `gain` times the throughput of the baseline throughout; None where it
  has not even at the smallest."""
  last = None
  for concurrency in sorted(outlooks):
    if outlooks[concurrency][way].throughput <= gain * outlooks[concurrency][baseline].throughput:
      break
    last = concurrency
  return last
