"""The main job: a target alone and with drafters, on real prompts, measured and checked for losslessness.

  python -m experiments.quickstart
  python -m experiments.quickstart --config=configs/smollm2/quickstart.py --workdir=runs/smollm2
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence

from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common
from specdec_jax import lossless, metrics, report
from specdec_jax.data import prompts as prompts_lib
from specdec_jax.decode import Completion, compiled
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.target import Target

common.define("configs/tiny/quickstart.py")
Z_FAULT = 4.0


@dataclasses.dataclass
class Run:
  """One method on one data set at one temperature: its outputs and the wall times of its repeats, in seconds."""

  drafter: Drafter | None
  done: list[Completion]
  warm_up: float
  executables: int
  walls: list[float]

  @property
  def tokens_per_s(self) -> float:
    return sum(len(c.tokens) for c in self.done) / min(self.walls)


def load_prompts(config, target: Target) -> dict[str, list[list[int]]]:
  """Token ids by data set, sorted by length so that batches are even."""
  out = {}
  for name, source in config.prompts.items():
    texts = prompts_lib.shipped_prompts(source, name, config.prompts_per_dataset)
    ids = [target.tokenizer.encode(prompts_lib.chat_prompt(target.tokenizer, t, config.system or None)) for t in texts]
    out[name] = sorted(ids, key=len)
  return out


def decode_all(config, target: Target, drafter: Drafter | None, prompts: Sequence[list[int]], temperature: float) -> list[Completion]:
  """Every prompt, in batches of one size; request i has the seed config.seed + i."""
  done = []
  for start in range(0, len(prompts), config.batch):
    part = prompts[start : start + config.batch]
    filled = [*part, *part[:1] * (config.batch - len(part))]
    seeds = [config.seed + start + i for i in range(config.batch)]
    done += specdec_jax.generate(target, drafter, filled, config.max_new_tokens, temperature=temperature, seed=seeds)[: len(part)]
  return done


def measure(config, target: Target, drafters: Sequence[Drafter | None], prompts, temperature: float, tick: Callable[[str], None]) -> list[Run]:
  """All methods on the same prompts: one warm-up each, then the repeats in turn, so that drift hits all alike."""
  runs = []
  for drafter in drafters:
    tick(f"warm-up {drafter.name if drafter else 'autoregressive'}")
    before, began = compiled(), time.perf_counter()
    done = decode_all(config, target, drafter, prompts, temperature)
    runs.append(Run(drafter, done, time.perf_counter() - began, compiled() - before, []))
  for _ in range(config.repeats):
    for run in runs:
      tick(run.drafter.name if run.drafter else "autoregressive")
      began = time.perf_counter()
      again = decode_all(config, target, run.drafter, prompts, temperature)
      run.walls.append(time.perf_counter() - began)
      if [c.tokens for c in again] != [c.tokens for c in run.done]:
        raise RuntimeError("two runs with the same seeds gave different tokens")
  return runs


def check(target: Target, prompts, run: Run, plain: Run, temperature: float) -> dict:
  """The losslessness contract that applies, and whether it holds; of the baseline itself nothing is claimed."""
  if run.drafter is None:
    return {"contract": None, "identical": None, "n": len(run.done), "holds": None}
  if temperature == 0:
    same = lossless.identical(run.done, plain.done)
    return {"contract": 1, "identical": same, "n": len(run.done), "holds": same == len(run.done)}
  z = lossless.surprisal_z(target, prompts, run.done, temperature)
  return {"contract": 3, "identical": None, "n": len(run.done), "z": z if math.isfinite(z) else None, "holds": abs(z) <= Z_FAULT}


def record(config, target: Target, dataset: str, prompts, temperature: float, run: Run, plain: Run) -> dict:
  """The results record of one run."""
  rounds = [c.rounds for c in run.done]
  found = metrics.acceptance(rounds) if run.drafter else {}
  found |= {
      "tokens_per_s": run.tokens_per_s, "delivered_tokens": sum(len(c.tokens) for c in run.done),
      "peak_memory": metrics.peak_memory_bytes(), "longest_repeat": max(metrics.longest_repeat(c.tokens) for c in run.done)}
  if run.drafter:
    found["speedup"] = metrics.speedup(run.tokens_per_s, plain.tokens_per_s)
  return {
      **common.record_base("quickstart"), "seed": config.seed, "target": {"name": target.name, "hash": target.hash},
      "drafter": {"name": run.drafter.name, "hash": run.drafter.hash} if run.drafter else None, "dataset": dataset,
      "temperature": temperature, "concurrency": config.batch, "schedule": "fixed", "rule": "token", "n_requests": len(run.done),
      "n_rounds": sum(map(len, rounds)), "speculation": {"on": run.drafter is not None, "why": None if run.drafter else "baseline"},
      "lossless": check(target, prompts, run, plain, temperature),
      "compile": {"count": run.executables, "seconds": max(run.warm_up - min(run.walls), 0.0)}, "metrics": found,
      "notes": f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}"}


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 110)  # Room for the table, also where the output is a file.
  try:
    target = specdec_jax.load_target(config.target)
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
        runs = measure(config, target, drafters, ids, temperature, tick)
        for run in runs:
          records.append(record(config, target, dataset, ids, temperature, run, runs[0]))
          report.append(results, records[-1])
  screen.print(report.table(records, report.COLUMNS))
  path = report.write_report(records, workdir, f"Quickstart: {target.name}")
  screen.print(f"records: {results}   report: {path}")
  broken = [r for r in records if r["lossless"]["holds"] is False]
  if broken:
    raise SystemExit("not lossless: " + ", ".join(f"{r['dataset']} at temperature {r['temperature']:g}" for r in broken))


if __name__ == "__main__":
  app.run(main)
