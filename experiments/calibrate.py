"""Sequential temperature scaling of drafters' confidences, and what it is worth (DSpark §3.2.1, Figures 5 and 6).

  python -m experiments.calibrate --config=configs/tiny/calibrate.py --workdir=runs/tiny_calibrate

Fits on one half of the prompts, full blocks, and reports on the other half. With config.store the temperatures are written
beside each drafter's weights, where `load_drafter` finds them.
"""

import dataclasses
import datetime

import matplotlib
import numpy as np
from absl import app
from matplotlib.figure import Figure
from rich import console as rich_console

import specdec_jax
from experiments import common
from experiments.measure import load_prompts, recorded
from specdec_jax import calibrate, report
from specdec_jax.hub import find

common.define("configs/tiny/calibrate.py")
COLUMNS = (
    ("drafter", "drafter.name", ""), ("data set", "dataset", ""), ("confidences", "metrics.kind", ""), ("blocks", "n_rounds", ""),
    ("ece, raw", "metrics.raw.mean_ece", ".4f"), ("ece", "metrics.calibrated.mean_ece", ".4f"), ("auc, raw", "metrics.raw.mean_auc", ".3f"),
    ("auc", "metrics.calibrated.mean_auc", ".3f"), ("brier, raw", "metrics.raw.mean_brier", ".4f"), ("brier", "metrics.calibrated.mean_brier", ".4f"),
    ("ece by position", lambda r: " ".join("n/a" if x is None else f"{x:.3f}" for x in r["metrics"]["calibrated"]["ece"]), ""))


def reliability_diagram(found, path) -> None:
  """Mean outcome against mean prediction in every bin, raw and calibrated, a panel a position (Figure 6)."""
  raw, calibrated = found
  positions = len(raw["ece"])
  figure = Figure(figsize=(2.2 * positions, 2.6), layout="constrained")
  for k, axes in enumerate(np.atleast_1d(figure.subplots(1, positions, sharey=True))):
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for result, colour, name in ((raw, report.PALETTE[1], "raw"), (calibrated, report.PALETTE[0], "calibrated")):
      count, predicted, happened = result["bins"][k]
      some = count > 0
      axes.plot(predicted[some] / count[some], happened[some] / count[some], ".-", color=colour, label=name, markersize=4)
    axes.set_title(f"position {k + 1}", fontsize=8)
    axes.set_xlabel("survival", fontsize=8)
  figure.axes[0].set_ylabel("accepted")
  figure.axes[0].legend(fontsize=7)
  figure.savefig(path, format="png", dpi=120)


def sweep_plot(sweeps, path) -> None:
  """Accepted and rejected drafts a round, and the acceptance rate, against the threshold (Figure 5)."""
  figure = Figure(figsize=(4 * len(sweeps), 3.2), layout="constrained")
  for axes, (dataset, rows) in zip(np.atleast_1d(figure.subplots(1, len(sweeps))), sweeps.items()):
    at = [r["threshold"] for r in rows]
    axes.stackplot(
        at, [r["accepted_drafts"] for r in rows], [r["rejected_drafts"] for r in rows], colors=(report.PALETTE[2], report.PALETTE[1]),
        labels=("accepted", "rejected"))
    axes.set(title=dataset, xlabel="threshold on survival", ylabel="drafts a round")
    rate = axes.twinx()
    rate.plot(at, [np.nan if r["draft_acceptance_rate"] is None else r["draft_acceptance_rate"] for r in rows], color="black", label="acceptance rate")
    rate.set_ylim(0, 1)
  figure.axes[0].legend(fontsize=7)
  figure.savefig(path, format="png", dpi=120)


def main(argv):
  del argv
  matplotlib.use("agg")
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  prompts = load_prompts(config, target)
  records = []
  for name in config.drafters:
    drafter = dataclasses.replace(specdec_jax.load_drafter(name, target), calibration=None)
    fitting, held_out = ({d: recorded(config, target, drafter, ids[half::2]) for d, ids in prompts.items()} for half in (0, 1))
    together = lambda parts: tuple(np.concatenate(x) for x in zip(*parts.values()))
    notes: list[str] = []
    logits, accepted, observed = together(fitting)
    temperatures = calibrate.fit(logits, accepted, observed, notes)
    made = calibrate.Calibration(
        tuple(map(float, temperatures)), f"{target.name}: {', '.join(prompts)}, temperature {config.temperature:g}", len(logits),
        datetime.date.today().isoformat(), drafter.hash, tuple(notes))
    folder = workdir / name.replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(find(name) if config.store else folder)
    sweeps = {}
    for dataset, part in {**held_out, "all": together(held_out)}.items():
      logits, accepted, observed = part
      found = [calibrate.assess(calibrate.survivals(logits, t), accepted, observed) for t in (None, temperatures)]
      sweeps[dataset] = calibrate.threshold_sweep(calibrate.survivals(logits, temperatures), accepted, config.thresholds)
      if dataset == "all":
        reliability_diagram(found, folder / "reliability.png")
      raw, calibrated = map(calibrate.describe, found)
      records.append(common.record(
          "calibrate", target, {"name": drafter.name, "hash": drafter.hash}, seed=config.seed, dataset=dataset, temperature=config.temperature,
          concurrency=config.batch, schedule="fixed", rule="token", n_requests=config.samples * sum(len(ids[1::2]) for d, ids in prompts.items() if dataset in (d, "all")),
          n_rounds=len(logits), speculation={"on": True, "why": None}, notes="; ".join(notes), metrics={
              "kind": "trained head" if drafter.config.confidence else "probability of the best token", "temperatures": list(made.temperatures),
              "raw": raw, "calibrated": calibrated, "threshold_sweep": sweeps[dataset]}))
      report.append(workdir / "results.jsonl", records[-1])
    sweep_plot(sweeps, folder / "threshold_sweep.png")
  screen = rich_console.Console()
  screen.width = max(screen.width, 180)
  screen.print(report.table(records, COLUMNS))
  (workdir / "calibration.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'calibration.md'}")


if __name__ == "__main__":
  app.run(main)
