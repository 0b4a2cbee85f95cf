"""Figures from results records alone; every function gives a matplotlib figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import comparison
from experiments.load import throughput
from specdec_jax.report import PALETTE, Record


def panels(count: int, width: float, height: float = 3.2, **options):
  """A figure with `count` panels side by side, and the panels."""
  figure = Figure(figsize=(width * count, height), layout="constrained")
  axes = np.atleast_1d(figure.subplots(1, count, **options))
  for a in axes:
    a.spines[["top", "right"]].set_visible(False)
  return figure, axes


def load_curves(records: Sequence[Record]) -> Figure:
  """Throughput against speed per user (DSpark Figure 7); throughput and mean verify length against concurrency (Figure 8)."""
  rows = [r for r in records if r["metrics"]["load"] == "closed"]
  figure, axes = panels(3, 4)
  for m, colour in zip(dict.fromkeys(r["metrics"]["method"] for r in rows), PALETTE * 2):
    mine = [r for r in rows if r["metrics"]["method"] == m]
    at = [r["concurrency"] for r in mine]
    axes[0].plot([r["metrics"]["user_tps"] for r in mine], [throughput(r) for r in mine], ".-", label=m, color=colour)
    axes[1].plot(at, [throughput(r) for r in mine], ".-", label=m, color=colour)
    axes[2].plot(at, [r["metrics"]["verify_length"] or 1.0 for r in mine], ".-", label=m, color=colour)
  axes[0].set(xlabel="tokens per second of a user", ylabel="tokens per second of all")
  axes[1].set(xlabel="requests at once", ylabel="tokens per second of all", xscale="log")
  axes[2].set(xlabel="requests at once", ylabel="verify tokens of a request and round", xscale="log")
  axes[0].legend(fontsize=7)
  return figure


def position_acceptance(records: Sequence[Record], temperature: float, titles: dict[str, str]) -> Figure:
  """Acceptance at each draft position of the rounds that came so far, a panel a data set (DSpark Figure 2)."""
  group = comparison.grouped(records, temperature)
  datasets = list(next(iter(group.values())))
  figure, axes = panels(len(datasets), 3.4, sharey=True)
  for a, dataset in zip(axes, datasets):
    for (name, own), colour in zip(group.items(), PALETTE * 2):
      heights = [np.nan if v is None else v for v in comparison.conditional_acceptance(own[dataset])]
      a.plot(range(1, len(heights) + 1), heights, ".-", color=colour, label=titles.get(name, name))
    a.set(title=dataset, xlabel="draft position", ylim=(0, 1.03))
  axes[0].set_ylabel("conditional acceptance")
  axes[0].legend(fontsize=7)
  return figure


def threshold_sweeps(records: Sequence[Record]) -> Figure:
  """Accepted and rejected drafts a round, and the acceptance rate, against the threshold, a panel a data set (DSpark Figure 5)."""
  figure, panes = panels(len(records), 4)
  for axes, record in zip(panes, records):
    rows = record["metrics"]["threshold_sweep"]
    at = [r["threshold"] for r in rows]
    drafts = ([r[name] for r in rows] for name in ("accepted_drafts", "rejected_drafts"))
    axes.stackplot(at, *drafts, colors=(PALETTE[2], PALETTE[1]), labels=("accepted", "rejected"))
    axes.set(title=record["dataset"], xlabel="threshold on survival", ylabel="drafts a round")
    rate = axes.twinx()
    shares = [r["draft_acceptance_rate"] for r in rows]
    rate.plot(at, [np.nan if s is None else s for s in shares], color="black", label="acceptance rate")
    rate.set_ylim(0, 1)
  panes[0].legend(fontsize=7)
  return figure


def reliability(record: Record) -> Figure:
  """Mean outcome against mean prediction in every bin, raw and calibrated, a panel a position (DSpark Figure 6)."""
  both = [np.array(record["metrics"][name]["bins"]) for name in ("raw", "calibrated")]
  figure, panes = panels(len(both[0]), 2.2, 2.6, sharey=True)
  for k, axes in enumerate(panes):
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for bins, colour, name in zip(both, (PALETTE[1], PALETTE[0]), ("raw", "calibrated")):
      count, predicted, happened = bins[k]
      some = count > 0
      axes.plot(predicted[some] / count[some], happened[some] / count[some], ".-", color=colour, label=name, markersize=4)
    axes.set_title(f"position {k + 1}", fontsize=8)
    axes.set_xlabel("survival", fontsize=8)
  panes[0].set_ylabel("accepted")
  panes[0].legend(fontsize=7)
  return figure


def costs(records: Sequence[Record]) -> Figure:
  """Steps per second against verify tokens, a line for each number of slots."""
  figure, (axes,) = panels(1, 6, 4)
  for r in records:
    axes.plot(r["metrics"]["tokens"], [1 / s for s in r["metrics"]["seconds"]], ".-", label=f"{r['concurrency']} slots")
  axes.set(xlabel="verify tokens of a step", ylabel="steps per second", xscale="log", yscale="log")
  axes.legend(fontsize=7)
  return figure
