"""Drafters side by side on the same prompts: accepted lengths with intervals, ratios to a baseline, acceptance by position.

  python -m experiments.compare_drafters --config=configs/tiny/compare.py --workdir=runs/tiny_compare
"""

import numpy as np
from absl import app
from rich import console as rich_console
from rich import progress
from rich import table as rich_table

import specdec_jax
from experiments import common
from experiments.measure import load_prompts, measure, record
from specdec_jax import metrics, report

common.define("configs/tiny/compare.py")


def comparison(runs: dict[str, dict[str, list]], baseline: str, title: str) -> tuple[list[str], list[list[str]]]:
  """Header and rows of one temperature's table. runs: the rounds of every request, by drafter and data set.

  Intervals are 95 % by document. `macro` is the mean over data sets, `ratio` the mean over data sets of the ratio to the
  baseline: the first is ruled by the data set of lowest entropy, the second is not.
  """
  datasets = list(runs[baseline])
  header = [title, *datasets, "macro", f"macro / {baseline}", f"ratio to {baseline}", *(f"{d} / {baseline}" for d in datasets)]
  rows = []
  length = lambda requests: metrics.acceptance(requests)["accepted_length"]
  macro = lambda by_set: float(np.mean([length(r) for r in by_set.values()]))
  for name, by_set in runs.items():
    cells = [name]
    for d in datasets:
      low, high = metrics.bootstrap(length, by_set[d], resamples=200)
      cells.append(f"{length(by_set[d]):.2f} ({low:.2f}–{high:.2f})")
    ratios = {d: metrics.accepted_length_ratio(by_set[d], runs[baseline][d]) for d in datasets}
    cells += [f"{macro(by_set):.2f}", f"{macro(by_set) / macro(runs[baseline]):.3f}", f"{np.mean(list(ratios.values())):.3f}"]
    for d in datasets:
      low, high = metrics.bootstrap(metrics.accepted_length_ratio, by_set[d], runs[baseline][d], resamples=200)
      cells.append(f"{ratios[d]:.3f} ({low:.3f}–{high:.3f})")
    rows.append(cells)
  return header, rows


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 200)
  target = specdec_jax.load_target(config.target)
  drafters = [None, *(specdec_jax.load_drafter(name, target) for name in config.drafters)]
  prompts = load_prompts(config, target)
  records, text = [], []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    task = bar.add_task(target.name, total=len(prompts) * len(config.temperatures) * len(drafters) * (1 + config.repeats), note="")
    for temperature in config.temperatures:
      runs = {}
      for dataset, ids in prompts.items():
        tick = lambda note, where=f"{dataset}, temperature {temperature:g}: ": bar.update(task, advance=1, note=where + note)
        measured = measure(config, target, drafters, ids, temperature, tick)
        for run in measured:
          records.append(record("compare_drafters", config, target, dataset, ids, temperature, run, measured[0]))
          report.append(workdir / "results.jsonl", records[-1])
          if run.drafter:
            runs.setdefault(run.drafter.name, {})[dataset] = [c.rounds for c in run.done]
      header, rows = comparison(runs, config.baseline, f"temperature {temperature:g}")
      shown = rich_table.Table(*header)
      for row in rows:
        shown.add_row(*row)
      screen.print(shown)
      text += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in rows), ""]
  report.write_report(records, workdir, f"Drafters for {target.name}")
  (workdir / "comparison.md").write_text("\n".join(text) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   tables: {workdir / 'comparison.md'}, {workdir / 'report.md'}")
  if any(r["lossless"]["holds"] is False for r in records):
    raise SystemExit("not lossless: see the report")


if __name__ == "__main__":
  app.run(main)
