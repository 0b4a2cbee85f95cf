"""How much an engine drafts: by what drafts are worth to each request, and by what rounds cost. The host's own, seen while it serves."""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax.cost import CostTable, ServedCosts
from specdec_jax.typing import Float

SMOOTHING = 0.7  # Weight of the past in running means of confidences and acceptance.
MARGIN = 1.1  # Times the tokens per second without drafts that drafts must promise: catching up and reading prompts cost the drafter, too.
PROBE_EVERY = 64  # Rounds without any draft after which one is made, to see whether it would pay again.
JUDGED_AFTER = 8  # Rounds with drafts before a request's drafts are judged.
PAUSE, LONGEST_PAUSE = 16, 256  # Rounds that a request goes without drafts that do not pay; doubled every time.


@dataclasses.dataclass
class Worth:
  """What drafts are worth to one request: running means over its rounds of their survival [L] and of accepted drafts a verified one;
  rounds since it was judged, that it goes without drafts still, and that it will next time; rounds since it was drafted for."""

  survival: np.ndarray | None = None
  gain: float | None = None
  judged: int = 0
  paused: int = 0
  pause: int = PAUSE
  waited: int = 0


def best_budget(survival: Float["B L"], running: int, sps: Float["n"], slots: int = 1) -> tuple[int, float]:
  """How many drafts `schedule.unconstrained` would verify, on the host, and the expected tokens per second then: survival of the drafts of
  each request that may have some, of `running` requests in all. A round with drafts takes more tokens than there are `slots`, real or not."""
  best = -np.sort(-survival[survival > 0])
  tokens = np.maximum(running + np.arange(len(best) + 1), slots + 1)
  tokens[0] = max(running, slots)
  theta = (running + np.concatenate([[0.0], np.cumsum(best)])) * sps[tokens - 1]
  return int(np.argmax(theta)), float(theta.max())


class Speculation:
  """draft_length: of a request with drafts; buckets: rows of a verify call by number of slots, the first without drafts. adaptive: costs
  are corrected by the rounds that were served, and a request that drafts do not pay for goes without for a while."""

  def __init__(self, draft_length: int, buckets: Mapping[int, Sequence[int]], adaptive: bool):
    self.draft_length, self.buckets, self.adaptive = draft_length, buckets, adaptive
    self.costs: dict[int, ServedCosts] = {}
    self.survival: np.ndarray | None = None  # Of all requests, for those that have had no round.
    self._undrafted = 0

  def use_costs(self, tables: Mapping[int, CostTable]) -> None:
    """A table for each number of slots; what was seen before is forgotten."""
    self.costs = {size: ServedCosts(table, self.buckets[size]) for size, table in tables.items()}

  def most(self, worth: Worth) -> int:
    """Drafts that a request may have in this round; asked once a round."""
    if worth.paused:
      worth.paused -= 1
      return 0
    return self.draft_length

  def plan(self, worths: Sequence[Worth], running: int, size: int, passes: Sequence[int]) -> tuple[int, list[int]]:
    """(how many drafts to verify, which requests to draft for), on the confidences of rounds before: of the requests that may have
    drafts, among `running` in `size` slots. passes: how many slots the drafter's pass may be cut to, rising to `size`. Those whose drafts
    are worth most are drafted for, in a cut pass one of the others too: the one that has waited longest, so that all are seen again."""
    for w in worths:
      w.waited += 1
    everyone = list(range(len(worths)))
    known = [self.survival if w.survival is None else w.survival for w in worths]
    if any(k is None for k in known):
      return len(worths) * self.draft_length, everyone
    known = np.stack(known)
    best_first = np.argsort(-known.sum(1), kind="stable").tolist()
    best = (0, [], MARGIN * running * self.costs[size].sps()[size - 1])
    for n in passes[: bisect.bisect_left(passes, len(worths)) + 1]:
      chosen = best_first[:n]
      if 1 < n < len(worths):
        chosen[-1] = max(best_first[n - 1 :], key=lambda i: worths[i].waited)
      wanted, theta = best_budget(known[chosen], running, self.costs[size].sps(n), size)
      best = max(best, (wanted, chosen, theta), key=lambda x: x[2])
    if not best[0] and self._undrafted >= PROBE_EVERY:
      return len(worths), everyone
    return best[:2]

  def launched(self, drafting: bool) -> None:
    """A round is under way, with drafts or without."""
    self._undrafted = 0 if drafting else self._undrafted + 1

  def observe(self, size: int, bucket: int, seconds: float, drafted: int | None = None) -> None:
    """What a round of `size` slots took that followed another one at once; drafted: the slots that its drafter's pass was cut to."""
    if self.adaptive and size in self.costs:
      self.costs[size].observe(bucket, seconds, drafted)

  def learn(self, worth: Worth, drafted: int, accepted: int, survival: Float["L"] | None, running: int, size: int) -> None:
    """From a request's round: the survival of its drafts (None: not known), and how many were verified and accepted."""
    mean = lambda old, new: new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new
    if survival is not None:
      worth.waited = 0
      worth.survival = mean(worth.survival, survival)
      self.survival = survival if self.survival is None else 0.98 * self.survival + 0.02 * survival
    if not drafted:
      return
    worth.gain = mean(worth.gain, accepted / drafted)
    worth.judged += 1
    if worth.judged < JUDGED_AFTER:
      return
    price = self.price(running, size)
    if self.adaptive and price is not None and worth.gain < price:
      worth.paused, worth.pause, worth.judged = worth.pause, min(2 * worth.pause, LONGEST_PAUSE), 0
    else:
      worth.pause = PAUSE

  def price(self, running: int, size: int) -> float | None:
    """What verifying one draft more costs, in tokens that the target alone would have made meanwhile; None without a cost table."""
    if size not in self.costs or not running:
      return None
    seconds, drafts = 1 / self.costs[size].sps(), running * self.draft_length
    alone, together = seconds[size - 1], seconds[max(running + drafts, size + 1) - 1]
    return float((together - alone) / drafts * running / alone)
