"""Tables of drafters side by side, from results records alone: accepted lengths with intervals and ratios, acceptance by position,
tokens/s. Their records are named METHOD, TARGET/METHOD or, of a further training, "TARGET/METHOD, training seed N"."""

from collections.abc import Sequence

import numpy as np

from specdec_jax import metrics
from specdec_jax.report import Record

Group = dict[str, dict[str, list[Record]]]  # By drafter and data set: a record for each training seed.
Cells = tuple[list[str], list[list[str]]]  # Header and rows.


def method(record: Record) -> str:
  """dspark for "tiny/dspark, training seed 1"."""
  return record["drafter"]["name"].split(",")[0].rpartition("/")[2]


def grouped(records: Sequence[Record], temperature: float, rule: str = "token") -> Group:
  """The records with a drafter at one temperature and rule; ValueError where a drafter lacks a data set that another has."""
  out: Group = {}
  for r in records:
    if r["drafter"] and (r["temperature"], r["rule"]) == (temperature, rule):
      out.setdefault(method(r), {}).setdefault(r["dataset"], []).append(r)
  datasets = {d for found in out.values() for d in found}
  for name, found in out.items():
    if missing := datasets - set(found):
      raise ValueError(f"temperature {temperature:g}, rule {rule}: {name} has no record of {', '.join(sorted(missing))}")
  return out


def documents(records: Sequence[Record]) -> list[tuple[int, int]] | None:
  """(rounds, tokens) of every document, all training seeds together; None where a record keeps no counts by request."""
  counts = [r["metrics"].get("by_request") for r in records]
  return None if None in counts else [tuple(map(sum, zip(*same))) for same in zip(*counts, strict=True)]


def length(records: Sequence[Record]) -> float:
  """Accepted length of all training seeds together."""
  rounds = [r["metrics"]["rounds"] for r in records]
  return sum(n * r["metrics"]["accepted_length"] for n, r in zip(rounds, records)) / sum(rounds)


def with_interval(value: float, statistic, groups: Sequence, digits: int) -> str:
  """The value and, where every group has its documents, its 95 % interval by document."""
  if any(g is None for g in groups):
    return f"{value:.{digits}f}"
  low, high = metrics.bootstrap(statistic, *groups, resamples=200)
  return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _of_documents(counts) -> float:
  return sum(e for _, e in counts) / sum(n for n, _ in counts)


def _mean_ratio(*counts) -> float:
  half = len(counts) // 2
  return float(np.mean([_of_documents(m) / _of_documents(t) for m, t in zip(counts[:half], counts[half:], strict=True)]))


def accepted_lengths(
    records: Sequence[Record], baselines: Sequence[str], temperature: float, titles: dict[str, str] | None = None,
) -> Cells:
  """Accepted lengths at one temperature.

  Intervals are 95 % by document; how far training seeds scatter is in the column by seed. `macro` is the mean over data sets,
  the ratio to a baseline the mean over data sets of the ratios: the first is ruled by the data set of lowest entropy, the
  second is not.
  """
  title = lambda name: (titles or {}).get(name, name)
  group = grouped(records, temperature)
  datasets = list(next(iter(group.values())))
  rows = []
  for name, own in group.items():
    lengths = {d: length(own[d]) for d in datasets}
    by_seed = zip(*([r["metrics"]["accepted_length"] for r in own[d]] for d in datasets), strict=True)
    row = [
        title(name), *(with_interval(lengths[d], _of_documents, [documents(own[d])], 2) for d in datasets),
        f"{np.mean(list(lengths.values())):.2f}", ", ".join(f"{np.mean(seed):.2f}" for seed in by_seed)]
    for base in (group[b] for b in baselines):
      ratio = float(np.mean([lengths[d] / length(base[d]) for d in datasets]))
      row.append(with_interval(ratio, _mean_ratio, [documents(x[d]) for x in (own, base) for d in datasets], 2))
    rows.append(row)
  return [f"temperature {temperature:g}", *datasets, "macro", "macro by training seed", *(f"ratio to {title(b)}" for b in baselines)], rows


def conditional_acceptance(records: Sequence[Record]) -> list[float | None]:
  """Acceptance at each position of the rounds that came so far, all training seeds together."""
  positions = range(max(len(r["metrics"]["conditional_acceptance"]) for r in records))
  out = []
  for k in positions:
    reached = tried = 0.0
    for r in records:
      found = r["metrics"]["conditional_acceptance"]
      if k < len(found) and found[k] is not None:
        came = sum(r["metrics"]["accepted_histogram"][k:])  # Rounds with k drafts accepted or more; those cut there were not tried.
        accepted = sum(r["metrics"]["accepted_histogram"][k + 1 :])
        reached, tried = reached + accepted, tried + (accepted / found[k] if found[k] else came)
    out.append(reached / tried if tried else None)
  return out


def conditional_acceptances(records: Sequence[Record], temperature: float, titles: dict[str, str] | None = None) -> Cells:
  """Acceptance at each position of those rounds that came so far, in per cent (DSpark Figure 2)."""
  group = grouped(records, temperature)
  found = {(n, d): conditional_acceptance(by_seed) for n, own in group.items() for d, by_seed in own.items()}
  positions = max(map(len, found.values()))
  cells = lambda values: [*("n/a" if v is None else f"{100 * v:.0f}" for v in values), *("",) * (positions - len(values))]
  return [f"temperature {temperature:g}", "data set", *map(str, range(1, positions + 1))], [
      [(titles or {}).get(n, n), d, *cells(values)] for (n, d), values in found.items()]


def rules(records: Sequence[Record], temperature: float, other: str, titles: dict[str, str] | None = None) -> Cells:
  """Accepted lengths under another acceptance rule, and their ratios to those of the token rule, on the data sets that it has."""
  group = grouped(records, temperature, other)
  datasets = list(next(iter(group.values())))
  base = grouped([r for r in records if r["dataset"] in datasets], temperature)
  rows = []
  for name, own in group.items():
    cells = []
    for d in datasets:
      before = base[name][d][: len(own[d])]
      counts = [documents(own[d]), documents(before)]
      cells += [f"{length(own[d]):.2f}", with_interval(length(own[d]) / length(before), _mean_ratio, counts, 3)]
    rows.append([(titles or {}).get(name, name), *cells])
  return [f"temperature {temperature:g}, rule {other}", *(text for d in datasets for text in (d, f"{d}, ratio"))], rows


def speeds(records: Sequence[Record], temperature: float, titles: dict[str, str] | None = None) -> Cells:
  """Tokens/s of the first training seed, and the speedup over the target alone in the same process, the mean over data sets."""
  group = grouped(records, temperature)
  datasets = list(next(iter(group.values())))
  alone = {r["dataset"]: r["metrics"]["tokens_per_s"] for r in records if not r["drafter"] and r["temperature"] == temperature}
  rows = [["target alone", *(f"{alone[d]:.0f}" for d in datasets), "1.00"]] if set(datasets) <= set(alone) else []
  for name, own in group.items():
    found = [own[d][0]["metrics"] for d in datasets]
    speedup = np.mean([m["speedup"] for m in found])
    rows.append([(titles or {}).get(name, name), *(f"{m['tokens_per_s']:.0f}" for m in found), f"{speedup:.2f}"])
  return [f"tokens/s, temperature {temperature:g}", *datasets, "speedup"], rows
