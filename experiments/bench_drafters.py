"""What the parts of a block drafter cost: milliseconds of drafting and of the whole round, against the first form of the list
(DSpark Figure 4, right; DFlash 2's latency overhead).

  python -m experiments.bench_drafters --config=configs/tiny/overhead.py --workdir=runs/tiny_overhead

Random weights: time does not depend on them. The forms take turns.
"""

import os

import numpy as np
from absl import app
from ml_collections import ConfigDict
from rich import console as rich_console

import specdec_jax
from experiments import common
from experiments.bench_engine import load_drafter
from specdec_jax import report
from specdec_jax.engine import Engine

COLUMNS = (
    ("slots", "concurrency", ""), ("form", "drafter.name", ""), ("drafts", "metrics.drafts", ""), ("draft (ms)", "metrics.draft", ".3f"),
    ("round (ms)", "metrics.round", ".3f"), ("draft over the first", "metrics.draft_overhead", "+.1%"),
    ("round over the first", "metrics.overhead", "+.1%"))


def make_engine(config, target, form, slots: int) -> Engine:
  """An engine of one size with a drafter of this form."""
  recipe = ConfigDict(dict(anchors=0, mask_token=config.mask_token, drafter={**config.backbone, **form}))
  drafter = load_drafter(ConfigDict(dict(drafter="", recipe=recipe)), target)
  return Engine(
      target, drafter, slots=slots, max_length=config.max_length, schedule="fixed", slot_buckets=(slots,), buckets={slots: ()},
      needs=(config.need,), reaches=(config.max_length,), adaptive=False)


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  records = []
  for slots in config.slots:
    engines = {name: make_engine(config, target, form, slots) for name, form in config.forms.items()}
    parts = {name: {"draft": [], "verify": [], "commit": []} for name in engines}
    for _ in range(config.turns):
      for name, engine in engines.items():
        for part, seconds in engine.parts(slots, config.context, config.repeats, config.need).items():
          parts[name][part].append(1e3 * seconds)
    first = None
    for name, engine in engines.items():
      found = {part: float(np.median(times)) for part, times in parts[name].items()}
      found["round"] = sum(found.values())
      first = first or found
      records.append(common.record(
          "bench_drafters", target, {"name": name, "hash": None}, dataset="synthetic", concurrency=slots, schedule="fixed", rule="token",
          speculation={"on": True, "why": None}, notes=f"medians of {config.turns} turns, load {os.getloadavg()[0]:.1f}", metrics={
              "drafts": engine.method.draft_length, **found, "draft_overhead": found["draft"] / first["draft"] - 1,
              "overhead": found["round"] / first["round"] - 1}))
      report.append(workdir / "results.jsonl", records[-1])
  screen = rich_console.Console()
  screen.print(report.table(records, COLUMNS))
  (workdir / "overhead.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'overhead.md'}")


if __name__ == "__main__":
  common.define("configs/tiny/overhead.py")
  app.run(main)
