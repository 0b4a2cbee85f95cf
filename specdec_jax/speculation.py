"""How much an engine drafts: by what drafts are worth to each request, and by what rounds cost. The host's own, seen while it serves."""

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax.cost import CostTable, ServedCosts
from specdec_jax.typing import Float

SMOOTHING = 0.7  # Weight of the past in running means of confidences and acceptance.
MARGIN = 1.1  # Times the tokens per second without drafts that drafts must promise: catching up and reading prompts cost the drafter, too.
CONTEXT_MARGIN = 1.2  # The same, for a context to be kept up: first drafts, of which nothing is known, and the last ones are in vain.
PROBE_EVERY, LEAST_PROBES = 64, 1024  # Rounds without any draft after which some are made, to see; doubled every time.
ENDED = 64  # Requests that ended last, which those to come are taken to be like; drafts are worth their while until an eighth have ended.
WEIGHED_EVERY = 16  # Times that the same is said of the same requests, or at the same load: weighing takes the host a tenth of a round.
PACE_EVERY = 8  # Rounds without a drafter's context, of which one is counted.
PROBE_REQUESTS = 64  # Turns of all slots, in which one request is given a drafter's context although drafts would not pay.
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
  """How many drafts `schedule.unconstrained` would verify, on the host, and the expected tokens per second then: survival of
  the drafts of each request that may have some, of `running` requests in all. A round with drafts takes more tokens than
  there are `slots`, real or not."""
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
    self._undrafted, self._probe = 0, PROBE_EVERY
    self._ended: collections.deque[np.ndarray] = collections.deque(maxlen=ENDED)  # Survival.
    self._refused, self._weighed = 0, {}
    self._unkept = 0  # Rounds in a row without a context.
    self._unpaid, self._unweighed = None, 0  # What no drafts paid for when it was weighed last; rounds since.

  def use_costs(self, tables: Mapping[int, CostTable]) -> None:
    """A table for each number of slots; what was seen before is forgotten."""
    self.costs, self._weighed, self._unpaid = {size: ServedCosts(table, self.buckets[size]) for size, table in tables.items()}, {}, None

  def most(self, worth: Worth) -> int:
    """Drafts that a request may have in this round; asked once a round."""
    if worth.paused:
      worth.paused -= 1
      return 0
    return self.draft_length

  def plan(self, worths: Sequence[Worth], running: int, size: int, passes: Sequence[int]) -> tuple[int, list[int]]:
    """(how many drafts to verify, which requests to draft for), on the confidences of rounds before: of the requests that may have
    drafts, among `running` in `size` slots. passes: how many slots the drafter's pass may be cut to, rising to `size`. Those whose drafts
    are worth most are drafted for, in a cut pass one of the others too (instead, now and then, where it is over one): the one that has
    waited longest, so that all are seen again."""
    for w in worths:
      w.waited += 1
    everyone = list(range(len(worths)))
    known = [self.survival if w.survival is None else w.survival for w in worths]
    if any(k is None for k in known):
      return len(worths) * self.draft_length, everyone
    waited = [w.waited for w in worths]
    asked, self._unweighed = (running, size, *map(id, worths)), self._unweighed + 1
    if asked == self._unpaid and self._unweighed < WEIGHED_EVERY:
      best = 0, []
    else:
      best = self._best(np.stack(known), waited, running, size, passes)[:2]
      self._unpaid, self._unweighed = None if best[0] else asked, 0
    if best[0]:
      self._probe = PROBE_EVERY
      if len(best[1]) == 1 and max(waited) >= PROBE_EVERY:  # A pass over one has no place for another: it is given up for a round.
        return min(best[0], self.draft_length), [waited.index(max(waited))]
    elif self._undrafted >= self._probe:
      self._probe = min(2 * self._probe, LEAST_PROBES)
      return len(worths), everyone
    return best

  def _best(
      self, known: Float["n L"], waited: Sequence[int], running: int, size: int, passes: Sequence[int],
  ) -> tuple[int, list[int], float]:
    """As `plan`, of requests of known survival, and how many times the tokens per second without drafts that promises; no drafts, and
    once, where none promise MARGIN."""
    best_first = np.argsort(-known.sum(1), kind="stable").tolist()
    alone, best = running * self.costs[size].sps()[size - 1], (0, [], MARGIN)
    for n in passes[: bisect.bisect_left(passes, len(known)) + 1]:
      chosen = best_first[:n]
      if 1 < n < len(known):
        chosen[-1] = max(best_first[n - 1 :], key=waited.__getitem__)
      wanted, theta = best_budget(known[chosen], running, self.costs[size].sps(n), size)
      best = max(best, (wanted, chosen, theta / alone), key=lambda x: x[2])
    return best if best[0] else (0, [], 1.0)

  def ended(self, worth: Worth) -> None:
    """A request is over."""
    if worth.survival is not None:
      self._ended.append(worth.survival)

  def pays(self, running: int, size: int, passes: Sequence[int]) -> bool:
    """Whether drafts would pay for `running` requests at once like those that ended last, on the whole."""
    if not self.adaptive or size not in self.costs or len(self._ended) < ENDED // 8:
      return True
    asked, found = self._weighed.get((running, size), (0, False))
    if asked % WEIGHED_EVERY == 0:
      known, times = np.stack(self._ended), []  # Times: for as many tokens, over that of rounds without drafts but with a context.
      for first in range(0, len(known), running):
        some = np.take(known, range(first, first + running), 0, mode="wrap")
        times.append(1 / self._best(some, [0] * running, running, size, passes)[2])
      found = bool(CONTEXT_MARGIN * np.mean(times) < self.costs[size].alone)
    self._weighed[running, size] = asked + 1, found
    return found

  def keeps(self, running: int, size: int, passes: Sequence[int]) -> bool:
    """Whether to give a new request a drafter's context, which costs in every round; without, it is not drafted for. It gets one where
    drafts would pay, and some get one all the same, to see."""
    self._refused = 0 if self.pays(running, size, passes) else self._refused + 1
    return self._refused % (PROBE_REQUESTS * running) == 0  # Rounds cost more for all while there is one: a share of the time.

  def launched(self, drafting: bool) -> None:
    """A round is under way, with drafts or without."""
    self._undrafted = 0 if drafting else self._undrafted + 1

  def observe(self, size: int, bucket: int, seconds: float, drafted: int | None = None, kept: bool = True) -> None:
    """What a round of `size` slots took that followed another one at once; drafted: the slots that its drafter's pass was cut to; kept:
    whether it kept a drafter's context up: where not, some of many tell the pace."""
    self._unkept = 0 if kept else self._unkept + 1
    if self.adaptive and size in self.costs and self._unkept % PACE_EVERY == 0:
      self.costs[size].observe(bucket, seconds, drafted, kept)

  def learn(self, worth: Worth, drafted: int, accepted: int, survival: Float["L"] | None, running: int, size: int) -> None:
    """From a request's round: the survival of its drafts (None: not known), and how many were verified and accepted."""
    mean = lambda old, new: new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new
    if survival is not None:
      worth.waited = 0
      worth.survival, self._unpaid = mean(worth.survival, survival), None
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
