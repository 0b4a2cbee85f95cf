"""The main job: a target alone and with drafters, on real prompts, measured and checked for losslessness.

  python -m experiments.quickstart
  python -m experiments.quickstart --config=configs/smollm2/quickstart.py --workdir=runs/smollm2
"""

from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common
from experiments.measure import load_prompts, measure, result
from specdec_jax import report


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 110)  # Room for the table, also where the output is a file.
  try:
    target = specdec_jax.load_target(config.target, dtype=config.dtype)
    drafters = [None, *(specdec_jax.load_drafter(name, target) for name in config.drafters)]
  except FileNotFoundError as e:
    raise SystemExit(f"quickstart: {e}") from e
  prompts = load_prompts(config, target)
  results = workdir / "results.jsonl"
  steps = len(prompts) * len(config.temperatures) * len(drafters) * (1 + config.repeats)
  records = []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    task = bar.add_task(f"{target.name}", total=steps, note="")
    for dataset, ids in prompts.items():
      for temperature in config.temperatures:
        tick = lambda note, where=f"{dataset}, temperature {temperature:g}: ": bar.update(task, advance=1, note=where + note)
        runs = measure(config, target, drafters, ids, temperature, tick, (config.rule,))
        for run in runs:
          records.append(result("quickstart", config, target, dataset, ids, temperature, run, runs[0]))
          report.append(results, records[-1])
  screen.print(report.table(records, report.COLUMNS))
  path = report.write_report(records, workdir, f"Quickstart: {target.name}")
  screen.print(f"records: {results}   report: {path}")
  broken = [r for r in records if r["lossless"]["holds"] is False]
  if broken:
    raise SystemExit("not lossless: " + ", ".join(f"{r['dataset']} at temperature {r['temperature']:g}" for r in broken))


if __name__ == "__main__":
  common.define("configs/tiny/quickstart.py")
  app.run(main)
