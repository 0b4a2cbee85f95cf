"""Drafters side by side on the same prompts: accepted lengths with intervals, ratios to a baseline, acceptance by position.

  python -m experiments.compare_drafters --config=configs/tiny/compare.py --workdir=runs/tiny_compare
"""

from absl import app
from rich import console as rich_console
from rich import progress
from rich import table as rich_table

import specdec_jax
from experiments import common, comparison
from experiments.measure import load_prompts, measure, result
from specdec_jax import report

common.define("configs/tiny/compare.py")


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 200)
  target = specdec_jax.load_target(config.target)
  if config.baseline not in config.drafters:
    raise SystemExit(f"compare_drafters: the baseline {config.baseline!r} is none of {', '.join(config.drafters)}")
  trained = [(name, seed, path) for name, paths in config.drafters.items() for seed, path in enumerate(paths)]
  drafters = [None, *(specdec_jax.load_drafter(path, target) for _, _, path in trained)]
  prompts = load_prompts(config, target)
  records, text = [], []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    task = bar.add_task(target.name, total=len(prompts) * len(config.temperatures) * len(drafters) * (1 + config.repeats), note="")
    for temperature in config.temperatures:
      rounds, rates = ({name: [{} for _ in paths] for name, paths in config.drafters.items()} for _ in range(2))
      for dataset, ids in prompts.items():
        tick = lambda note, where=f"{dataset}, temperature {temperature:g}: ": bar.update(task, advance=1, note=where + note)
        measured = measure(config, target, drafters, ids, temperature, tick)
        for run in measured:
          records.append(result("compare_drafters", config, target, dataset, ids, temperature, run, measured[0]))
          report.append(workdir / "results.jsonl", records[-1])
        for (name, seed, _), run in zip(trained, measured[1:], strict=True):
          rounds[name][seed][dataset], rates[name][seed][dataset] = [c.rounds for c in run.done], run.tokens_per_s
      title = f"temperature {temperature:g}"
      for header, rows in (
          comparison.accepted_lengths(rounds, config.baseline, title), comparison.conditional_acceptances(rounds, title), comparison.speeds(rates, config.baseline, title)):
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
