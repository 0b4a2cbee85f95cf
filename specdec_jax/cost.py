"""The cost table of verification: steps per second against verify tokens (SPS, DSpark §5.1), measured, stored, looked up.

A table belongs to a target, a drafter, a mesh, a context length and a grid of buckets on one device; what was measured is kept as
it is, stairs and all. A step holds everything that a round does: draft, verify, accept, commit.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.typing import Float

FORMAT = 1
OBSERVED = 0.02, 0.1  # Least weight of a new round without and with drafts in what such rounds take: the mean of all until then.
OUTLIER = 2.0  # Times the estimate that one round can say at most.
STALE = 1024  # Rounds without one of a bucket, after which what it took says nothing any more.


class CostTableMissing(ValueError):
  """A schedule that weighs costs was asked for without a cost table."""


@dataclasses.dataclass(frozen=True)
class CostTable:
  """tokens: the buckets, rising; seconds: the median time of a step at each, spread: half the distance of its quartiles.

  made_from: target, drafter (names and hashes), mesh, context, device, versions, date. draft: (requests, seconds) of the drafter's pass
  alone, rising, the last one for as many as the steps drafted for; empty where it was not measured. alone: seconds of a step of
  tokens[0] that keeps no drafter's context up; None where it was not measured.
  """

  tokens: tuple[int, ...]
  seconds: tuple[float, ...]
  spread: tuple[float, ...]
  made_from: Mapping[str, Any]
  draft: tuple[tuple[int, float], ...] = ()
  alone: float | None = None

  def __post_init__(self):
    if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
      raise ValueError(f"a cost table needs rising buckets from 1 token, not {list(self.tokens)}")
    if len(self.spread) != len(self.tokens):
      raise ValueError(f"a cost table needs one spread a bucket, not {list(self.spread)} for {list(self.tokens)}")
    if len(self.seconds) != len(self.tokens) or not all(math.isfinite(s) and s > 0 for s in self.seconds):
      raise ValueError(f"a cost table needs one positive time a bucket, not {list(self.seconds)} for {list(self.tokens)}")
    if self.alone is not None and not (math.isfinite(self.alone) and self.alone > 0):
      raise ValueError(f"a cost table needs a positive time of a step that keeps no context, or None, not {self.alone!r}")

  def bucket(self, tokens: int) -> int:
    """The smallest bucket that holds a step of so many tokens. Raises ValueError beyond the last one."""
    index = int(np.searchsorted(self.tokens, tokens))
    if tokens < 1 or index == len(self.tokens):
      raise ValueError(f"a step of {tokens} tokens does not fit the buckets 1 … {self.tokens[-1]}")
    return self.tokens[index]

  def sps(self, most: int | None = None) -> Float["n"]:
    """Steps per second for 1, 2, … `most` tokens (to the last bucket): each by the bucket that holds it. Beyond the last bucket a
    step takes as many of the last one's as it fills: never less than what was measured, and never free."""
    most = most or self.tokens[-1]
    out = np.empty(most)
    for n in range(1, most + 1):
      whole, rest = divmod(n, self.tokens[-1])
      seconds = whole * self.seconds[-1]
      if rest:
        seconds += self.seconds[int(np.searchsorted(self.tokens, rest))] if not whole else rest / self.tokens[-1] * self.seconds[-1]
      out[n - 1] = 1 / seconds
    return out

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the table as JSON."""
    pathlib.Path(path).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n")


class ServedCosts:
  """What rounds cost while they are served: a table's seconds by bucket, corrected by those that rounds took.

  A table is measured with nothing else going on, and with drafts for every slot. Rounds with drafts are counted in rounds without: what
  slows all of them down then says nothing for the one or the other, and the few with drafts need not be seen again. A bucket that was not
  seen for STALE rounds counts as never seen: what held its rounds up once, or the pace of then, does not shut it out for good.
  """

  def __init__(self, table: CostTable, grid: Sequence[int]):
    """grid: the buckets that are served, rising; the first is that of rounds without drafts."""
    self._grid, self._table = list(grid), (1 / table.sps(grid[-1])[np.array(grid) - 1]).tolist()
    self._base, self._served = self._table[0], [None] * len(grid)  # Seconds without drafts; of each bucket, in units of that.
    self._rounds, self._unseen = [0] * len(grid), [0] * len(grid)
    self._fit: tuple[list[float], list[float]] | None = None  # `_fitted`, until the next round.
    self._bucket = np.searchsorted(grid, np.arange(1, grid[-1] + 1))
    self._saved = {n: max(table.draft[-1][1] - seconds, 0.0) for n, seconds in table.draft}
    # A round's share of its seconds without drafts where no context is kept up; the table may be another number of slots'.
    self.alone = 1.0 if table.alone is None else min(table.alone / table.seconds[0], 1.0)

  @property
  def served(self) -> dict[int, float]:
    """Seconds by bucket, of those that rounds were seen of."""
    return {n: s * self._base for n, s in zip(self._grid, self._served) if s is not None}

  def sps(self, drafted: int | None = None) -> Float["n"]:
    """Rounds per second for 1, 2, … tokens of the largest bucket, where `drafted` slots of all are drafted for (None: all)."""
    seconds = np.array(self._fitted()[0])
    seconds[1:] = np.maximum(seconds[1:] - self._saved.get(drafted, 0.0), 0.1 * seconds[1:])
    return 1 / seconds[self._bucket]

  def observe(self, bucket: int, seconds: float, drafted: int | None = None, kept: bool = True) -> None:
    """Takes in a round in which `drafted` slots of all were drafted for; kept: whether a drafter's context was kept up. A single
    one that was held up counts little. Called once a round, so in plain numbers: arrays this small take longer."""
    i = self._grid.index(bucket)
    seconds = seconds + self._saved.get(drafted, 0.0) if i else seconds if kept else seconds / self.alone
    known = self._served[i]
    least, most = (x[i] for x in self._fitted()) if known is None else (known * self._base,) * 2
    seconds = min(max(seconds, least / OUTLIER), most * OUTLIER)
    for j, unseen in enumerate(self._unseen):
      self._unseen[j] = unseen + 1 if j != i else 0
      if self._unseen[j] > STALE:
        self._rounds[j], self._served[j] = 0, None
    self._rounds[i] += 1
    weight = max(1 / self._rounds[i], OBSERVED[i > 0])
    mean = lambda old, new: new if weight == 1 else weight * new + (1 - weight) * old
    if i:
      self._served[i] = mean(self._served[i], seconds / self._base)
    else:
      before, self._base, self._served[0] = self._base, mean(self._base, seconds), 1.0
      if weight == 1:  # Rounds with drafts were counted in the table's, or in those of long ago.
        self._served[1:] = [s and s * before / self._base for s in self._served[1:]]
    self._fit = None

  def _fitted(self) -> tuple[list[float], list[float]]:
    """(seconds by bucket, the most that they may be). Buckets that were not seen differ from the table as the nearest one does that was,
    with drafts as with drafts. Without drafts they are not dearer for that: they are tried where they seem to pay, and seen then; what they
    take may be as much dearer."""
    if self._fit is not None:
      return self._fit
    ratio = {i: self._base * s / t for i, (s, t) in enumerate(zip(self._served, self._table)) if s is not None}
    drafted = [i for i in ratio if i]
    seconds, most = list(self._table), list(self._table)
    for i in range(len(self._grid)):
      like = drafted if i and drafted else ratio
      if like:
        nearest = ratio[min(like, key=lambda j: abs(j - i))]
        most[i] *= nearest
        seconds[i] *= nearest if i or 0 in ratio else min(nearest, 1.0)
    self._fit = seconds, most
    return self._fit


def load(path: str | pathlib.Path, expected: Mapping[str, Any] | None = None) -> CostTable:
  """A stored table. Raises ValueError naming the first fact of `expected` (keys of made_from) that it was not made from."""
  path = pathlib.Path(path)
  if not path.exists():
    raise CostTableMissing(f"{path}: no cost table there; experiments/profile_sps.py measures one")
  found = json.loads(path.read_text())
  if found.pop("format", None) != FORMAT:
    raise ValueError(f"{path} is no cost table of format {FORMAT}")
  table = CostTable(
      *(tuple(found[k]) for k in ("tokens", "seconds", "spread")), found["made_from"], tuple(map(tuple, found.get("draft", ()))),
      found.get("alone"))
  for key, value in (expected or {}).items():
    if table.made_from.get(key) != value:
      raise ValueError(f"{path} was measured with {key} {table.made_from.get(key)!r}, not {value!r}")
  return table


def measure(steps: Mapping[int, Callable[[], float]], repeats: int, made_from: Mapping[str, Any]) -> CostTable:
  """Medians of the seconds that `steps[tokens]()` returns: one warm-up each, then in turn, so that drift hits all alike."""
  times = {n: [] for n in sorted(steps)}
  for n in times:
    steps[n]()
  for _ in range(repeats):
    for n, taken in times.items():
      taken.append(steps[n]())
  quartiles = [statistics.quantiles(t, n=4) if len(t) > 1 else [t[0]] * 3 for t in times.values()]
  return CostTable(
      tuple(times), tuple(statistics.median(t) for t in times.values()), tuple((q[2] - q[0]) / 2 for q in quartiles), dict(made_from))


def buckets(most: int, exact: int = 16, step: float = 0.08) -> tuple[int, ...]:
  """Every size up to `exact` tokens, then about 8 % steps up to `most`."""
  out = list(range(1, min(exact, most) + 1))
  while out[-1] < most:
    out.append(min(most, max(out[-1] + 1, int(out[-1] * (1 + step)))))
  return tuple(out)


def roofline(
    parameters: float, bytes_per_parameter: float, flops: float, bandwidth: float, tokens: Sequence[int], kv_bytes: float = 0.0,
    draft_seconds: float = 0.0, overhead: float = 0.0, made_from: Mapping[str, Any] | None = None,
) -> CostTable:
  """A table from stated constants, for targets that are too large to measure: a step reads all weights and `kv_bytes` of cache
  once, and computes 2 · parameters operations a token, whichever takes longer, beside drafting and a fixed overhead (seconds)."""
  seconds = tuple(
      max((parameters * bytes_per_parameter + kv_bytes) / bandwidth, 2 * parameters * n / flops) + draft_seconds + overhead for n in tokens)
  facts = {"kind": "roofline", "parameters": parameters, "bytes_per_parameter": bytes_per_parameter, "flops": flops, "bandwidth": bandwidth,
           "kv_bytes": kv_bytes, "draft_seconds": draft_seconds, "overhead": overhead}
  return CostTable(tuple(tokens), seconds, (0.0,) * len(seconds), {**facts, **(made_from or {})})
