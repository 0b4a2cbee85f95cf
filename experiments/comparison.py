"""Tables of drafters side by side: accepted lengths with intervals and ratios, acceptance by position, tokens/s."""

import numpy as np

from specdec_jax import metrics

Runs = dict[str, list[dict[str, list]]]  # By drafter, training seed and data set: the rounds of every request.


def with_all_seeds(by_seed: list[dict[str, list]], dataset: str) -> list[list]:
  """The rounds of every request with all training seeds together: documents stay what is drawn for an interval."""
  return [[r for rounds in same for r in rounds] for same in zip(*(seed[dataset] for seed in by_seed), strict=True)]


def accepted_lengths(runs: Runs, baseline: str, title: str) -> tuple[list[str], list[list[str]]]:
  """Header and rows of one temperature's table of accepted lengths.

  Intervals are 95 % by document; how far training seeds scatter is in the columns by seed. `macro` is the mean over data sets,
  `ratio` the mean over data sets of the ratio to the baseline: the first is ruled by the data set of lowest entropy, the
  second is not.
  """
  def mean_ratio(*requests):
    mine, theirs = requests[: len(datasets)], requests[len(datasets) :]
    return float(np.mean([metrics.accepted_length_ratio(m, t) for m, t in zip(mine, theirs, strict=True)]))

  length = lambda requests: metrics.acceptance(requests)["accepted_length"]
  within = lambda value, interval, digits: f"{value:.{digits}f} ({interval[0]:.{digits}f}–{interval[1]:.{digits}f})"
  datasets = list(runs[baseline][0])
  base = {d: with_all_seeds(runs[baseline], d) for d in datasets}
  header = [title, *datasets, "macro", "macro by seed", f"macro / {baseline}", f"ratio to {baseline}", "ratio by seed", *(f"{d} / {baseline}" for d in datasets)]
  rows = []
  for name, by_seed in runs.items():
    own = {d: with_all_seeds(by_seed, d) for d in datasets}
    ratios = {d: metrics.accepted_length_ratio(own[d], base[d]) for d in datasets}
    macro, seeds = metrics.macro_accepted_length(own), [metrics.macro_accepted_length(seed) for seed in by_seed]
    both = *own.values(), *base.values()
    by_training = (mean_ratio(*seed.values(), *base.values()) for seed in by_seed)
    rows.append([
        name, *(within(length(own[d]), metrics.bootstrap(length, own[d], resamples=200), 2) for d in datasets), f"{macro:.2f}",
        ", ".join(f"{m:.2f}" for m in seeds), f"{macro / metrics.macro_accepted_length(base):.3f}",
        within(mean_ratio(*both), metrics.bootstrap(mean_ratio, *both, resamples=200), 3), ", ".join(f"{r:.3f}" for r in by_training),
        *(within(ratios[d], metrics.bootstrap(metrics.accepted_length_ratio, own[d], base[d], resamples=200), 3) for d in datasets)])
  return header, rows


def conditional_acceptances(runs: Runs, title: str) -> tuple[list[str], list[list[str]]]:
  """Header and rows of one temperature's acceptance at each position of those rounds that came so far (DSpark Figure 2)."""
  found = {(n, d): metrics.acceptance(with_all_seeds(by_seed, d))["conditional_acceptance"] for n, by_seed in runs.items() for d in by_seed[0]}
  positions = max(map(len, found.values()))
  cells = lambda values: [*("n/a" if v is None else f"{v:.3f}" for v in values), *("",) * (positions - len(values))]
  return [title, "data set", *map(str, range(1, positions + 1))], [[n, d, *cells(values)] for (n, d), values in found.items()]


def rules(base: Runs, other: Runs, title: str, name: str) -> tuple[list[str], list[list[str]]]:
  """Header and rows of the accepted lengths under another acceptance rule and their ratios to those under rule `name`, with 95 %
  intervals by document."""
  datasets = list(next(iter(base.values()))[0])
  rows = []
  for drafter, by_seed in other.items():
    own, before = ({d: with_all_seeds(x, d) for d in datasets} for x in (by_seed, base[drafter]))
    cells = []
    for d in datasets:
      low, high = metrics.bootstrap(metrics.accepted_length_ratio, own[d], before[d], resamples=200)
      cells += [f"{metrics.acceptance(own[d])['accepted_length']:.2f}", f"{metrics.accepted_length_ratio(own[d], before[d]):.3f} ({low:.3f}–{high:.3f})"]
    rows.append([drafter, *cells, f"{metrics.macro_accepted_length(own) / metrics.macro_accepted_length(before):.3f}"])
  return [title, *(text for d in datasets for text in (d, f"{d} / {name}")), f"macro / {name}"], rows


def speeds(rates: dict[str, list[dict[str, float]]], baseline: str, title: str) -> tuple[list[str], list[list[str]]]:
  """Header and rows of one temperature's tokens/s, means over training seeds. rates: as `Runs`, tokens/s for rounds."""
  mean = lambda by_seed, d: float(np.mean([seed[d] for seed in by_seed]))
  datasets = list(rates[baseline][0])
  ratio = lambda by_seed: np.mean([mean(by_seed, d) / mean(rates[baseline], d) for d in datasets])
  rows = [[n, *(f"{mean(by_seed, d):.0f}" for d in datasets), f"{ratio(by_seed):.3f}"] for n, by_seed in rates.items()]
  return [f"tokens/s, {title}", *datasets, f"ratio to {baseline}"], rows
