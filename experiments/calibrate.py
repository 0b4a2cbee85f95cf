"""Sequential temperature scaling of drafters' confidences, and what it is worth (DSpark §3.2.1, Figures 5 and 6).

  python -m experiments.calibrate --config=configs/tiny/calibrate.py --workdir=runs/tiny_calibrate

Fits on one half of the prompts, full blocks, and reports on the other half. With config.store the temperatures are written
beside each drafter's weights, where `load_drafter` finds them.
"""

import dataclasses
import datetime

import numpy as np
from absl import app
from rich import console as rich_console

import specdec_jax
from experiments import common, plots
from experiments.measure import load_prompts, recorded
from specdec_jax import calibrate, report
from specdec_jax.hub import find

COLUMNS = (
    ("drafter", "drafter.name", ""), ("data set", "dataset", ""), ("confidences", "metrics.kind", ""), ("blocks", "n_rounds", ""),
    ("ece, raw", "metrics.raw.mean_ece", ".4f"), ("ece", "metrics.calibrated.mean_ece", ".4f"), ("auc, raw", "metrics.raw.mean_auc", ".3f"),
    ("auc", "metrics.calibrated.mean_auc", ".3f"),
    ("brier, raw", "metrics.raw.mean_brier", ".4f"), ("brier", "metrics.calibrated.mean_brier", ".4f"),
    ("ece by position", lambda r: " ".join("n/a" if x is None else f"{x:.3f}" for x in r["metrics"]["calibrated"]["ece"]), ""))


def calibrated(config, target, drafter, prompts) -> tuple[calibrate.Calibration, list[dict]]:
  """A drafter's calibration, fitted on every other prompt, and the records of what it is worth on the rest, by data set and of all.

  config: samples, batch, max_new_tokens, temperature, seed, thresholds.
  """
  drafter = dataclasses.replace(drafter, calibration=None)
  fitting, held_out = ({d: recorded(config, target, drafter, ids[half::2]) for d, ids in prompts.items()} for half in (0, 1))
  together = lambda parts: tuple(np.concatenate(x) for x in zip(*parts.values()))
  notes: list[str] = []
  logits, accepted, observed = together(fitting)
  temperatures = calibrate.fit(logits, accepted, observed, notes)
  made = calibrate.Calibration(
      tuple(map(float, temperatures)), f"{target.name}: {', '.join(prompts)}, temperature {config.temperature:g}", len(logits),
      datetime.date.today().isoformat(), drafter.hash, tuple(notes))
  records = []
  for dataset, (logits, accepted, observed) in {**held_out, "all": together(held_out)}.items():
    raw, scaled = (calibrate.assess(calibrate.survivals(logits, t), accepted, observed) for t in (None, temperatures))
    bins = lambda found, dataset=dataset: {"bins": found["bins"].round(3)} if dataset == "all" else {}
    asked = sum(len(ids[1::2]) for d, ids in prompts.items() if dataset in (d, "all"))
    records.append(common.record(
        "calibrate", target, {"name": drafter.name, "hash": drafter.hash}, seed=config.seed, dataset=dataset,
        temperature=config.temperature, concurrency=config.batch, schedule="fixed", rule="token", n_requests=config.samples * asked,
        n_rounds=len(logits), speculation={"on": True, "why": None}, notes="; ".join(notes), metrics={
            "kind": "trained head" if drafter.config.confidence else "probability of the best token",
            "temperatures": list(made.temperatures),
            "raw": calibrate.describe(raw) | bins(raw), "calibrated": calibrate.describe(scaled) | bins(scaled),
            "threshold_sweep": calibrate.threshold_sweep(calibrate.survivals(logits, temperatures), accepted, config.thresholds)}))
  return made, records


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  prompts = load_prompts(config, target)
  records = []
  for name in config.drafters:
    made, found = calibrated(config, target, specdec_jax.load_drafter(name, target), prompts)
    folder = workdir / name.replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(find(name) if config.store else folder)
    for r in found:
      report.append(workdir / "results.jsonl", r)
    records += found
    plots.reliability(found[-1]).savefig(folder / "reliability.png", dpi=120)
    plots.threshold_sweeps(found).savefig(folder / "threshold_sweep.png", dpi=120)
  screen = rich_console.Console()
  screen.width = max(screen.width, 180)
  screen.print(report.table(records, COLUMNS))
  (workdir / "calibration.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'calibration.md'}")


if __name__ == "__main__":
  common.define("configs/tiny/calibrate.py")
  app.run(main)
