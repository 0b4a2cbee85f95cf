"""Drafters side by side on the same prompts: accepted lengths with intervals, ratios to a baseline, acceptance by position.

  python -m experiments.compare_drafters --config=configs/tiny/compare.py --workdir=runs/tiny_compare
"""

import dataclasses

from absl import app
from rich import console as rich_console
from rich import progress
from rich import table as rich_table

import specdec_jax
from experiments import common, comparison
from experiments.measure import load_prompts, measure, result
from specdec_jax import report


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 200)
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  if unknown := set(config.baselines) - set(config.drafters):
    raise SystemExit(f"compare_drafters: the baselines {sorted(unknown)} are none of {', '.join(config.drafters)}")
  drafters = [None]
  for name, paths in config.drafters.items():
    for seed, path in enumerate(paths):
      called = f"{target.name}/{name}" + (f", training seed {seed}" if seed else "")
      drafters.append(dataclasses.replace(specdec_jax.load_drafter(path, target), name=called))
  prompts = load_prompts(config, target)
  records, text = [], []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    task = bar.add_task(target.name, total=len(prompts) * (1 + config.repeats) * sum(
        1 + (len(drafters) - 1) * (len(config.rules) if t else 1) for t in config.temperatures), note="")
    for temperature in config.temperatures:
      rules = config.rules if temperature else config.rules[:1]
      for dataset, ids in prompts.items():
        tick = lambda note, where=f"{dataset}, temperature {temperature:g}: ": bar.update(task, advance=1, note=where + note)
        measured = measure(config, target, drafters, ids, temperature, tick, rules)
        for run in measured:
          records.append(result("compare_drafters", config, target, dataset, ids, temperature, run, measured[0]))
          report.append(workdir / "results.jsonl", records[-1])
      tables = [
          comparison.accepted_lengths(records, config.baselines, temperature), comparison.conditional_acceptances(records, temperature),
          comparison.speeds(records, temperature),
          *(comparison.rules(records, temperature, r) for r in rules[1:])] if "token" in rules else []
      for header, rows in tables:
        shown = rich_table.Table(*header)
        for row in rows:
          shown.add_row(*row)
        screen.print(shown)
        text += [report.grid(header, rows), ""]
  report.write_report(records, workdir, f"Drafters for {target.name}", (*report.COLUMNS[:3], ("rule", "rule", ""), *report.COLUMNS[3:]))
  (workdir / "comparison.md").write_text("\n".join(text))
  screen.print(f"records: {workdir / 'results.jsonl'}   tables: {workdir / 'comparison.md'}, {workdir / 'report.md'}")
  if any(r["lossless"]["holds"] is False for r in records):
    raise SystemExit("not lossless: see the report")


if __name__ == "__main__":
  common.define("configs/tiny/compare.py")
  app.run(main)
