"""Steps per second against verify tokens: the cost tables that schedules weigh (DSpark §5.1).

  python -m experiments.profile_sps --config=configs/tiny/sps.py --workdir=runs/tiny_sps

One table for each number of slots: rounds of the engine with every slot taken, drafting included where there are rows for drafts.
"""

import dataclasses
import os
import time

from absl import app
from rich import console as rich_console
from rich import table as rich_table

import specdec_jax
from experiments import common, plots
from experiments.load import buckets
from specdec_jax import presets, report
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine import Engine
from specdec_jax.models.target import Target


def models(config) -> tuple[Target, Drafter | None]:
  """Target and drafter by name, or of published size with random weights (config.random)."""
  if config.get("random"):
    r = config.random
    target = presets.random_target(r.target, r.dtype, r.layers)
    return target, presets.random_drafter(target, r.target, r.drafter) if r.drafter else None
  target = specdec_jax.load_target(config.target)
  return target, specdec_jax.load_drafter(config.drafter, target) if config.drafter else None


def main(argv):
  del argv
  config, workdir = common.settings()
  target, drafter = models(config)
  engine = Engine(
      target, drafter, slots=max(config.slots), max_length=config.context + 32, schedule="fixed", slot_buckets=config.slots,
      buckets=buckets(config.slots, config.rows_per_slot), needs=(config.need,))
  began = time.perf_counter()
  tables = engine.profile(config.context, config.repeats)
  records = []
  head = ("slots", "verify tokens: ms ± half the distance of the quartiles")
  shown, lines = rich_table.Table(*head), [target.name, "", "| " + " | ".join(head) + " |", "|---|---|"]
  for slots, table in tables.items():
    table = dataclasses.replace(table, made_from={**table.made_from, "load": round(os.getloadavg()[0], 1)})
    table.save(workdir / f"sps_{slots}.json")
    row = str(slots), "   ".join(f"{n}: {1e3 * s:.2f} ± {1e3 * w:.2f}" for n, s, w in zip(table.tokens, table.seconds, table.spread))
    shown.add_row(*row)
    lines.append("| " + " | ".join(row) + " |")
    records.append(common.record(
        "profile_sps", target, drafter and {"name": drafter.name, "hash": drafter.hash}, dataset="synthetic", concurrency=slots,
        schedule="fixed", rule="token", speculation={"on": drafter is not None, "why": None if drafter else "no drafter"},
        notes=f"median of {config.repeats}, load {os.getloadavg()[0]:.1f}", compile={"count": None, "seconds": time.perf_counter() - began},
        metrics={"tokens": list(table.tokens), "seconds": list(table.seconds), "spread": list(table.spread), "draft": list(table.draft),
            "alone": table.alone}))
    report.append(workdir / "results.jsonl", records[-1])
  (workdir / "sps.md").write_text("\n".join(lines) + "\n")
  plots.costs(records).savefig(workdir / "sps.png", dpi=120)
  screen = rich_console.Console()
  screen.width = max(screen.width, 160)
  screen.print(shown)
  screen.print(f"tables: {workdir}/sps_*.json   plot: {workdir / 'sps.png'}")


if __name__ == "__main__":
  common.define("configs/tiny/sps.py")
  app.run(main)
