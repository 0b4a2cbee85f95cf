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
from specdec_jax import report
from specdec_jax.engine import Engine


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  drafter = specdec_jax.load_drafter(config.drafter, target) if config.drafter else None
  engine = Engine(
      target, drafter, slots=max(config.slots), max_length=config.context + 32, schedule="fixed", slot_buckets=config.slots,
      buckets=buckets(config.slots, config.rows_per_slot), needs=(config.need,))
  began = time.perf_counter()
  tables = engine.profile(config.context, config.repeats)
  records = []
  shown = rich_table.Table("slots", "verify tokens: ms ± half the distance of the quartiles")
  for slots, table in tables.items():
    table = dataclasses.replace(table, made_from={**table.made_from, "load": round(os.getloadavg()[0], 1)})
    table.save(workdir / f"sps_{slots}.json")
    shown.add_row(str(slots), "   ".join(f"{n}: {1e3 * s:.2f} ± {1e3 * w:.2f}" for n, s, w in zip(table.tokens, table.seconds, table.spread)))
    records.append(common.record(
        "profile_sps", target, drafter and {"name": drafter.name, "hash": drafter.hash}, dataset="synthetic", concurrency=slots, schedule="fixed",
        rule="token", speculation={"on": drafter is not None, "why": None if drafter else "no drafter"},
        notes=f"median of {config.repeats}, load {os.getloadavg()[0]:.1f}", compile={"count": None, "seconds": time.perf_counter() - began},
        metrics={"tokens": list(table.tokens), "seconds": list(table.seconds), "spread": list(table.spread)}))
    report.append(workdir / "results.jsonl", records[-1])
  plots.costs(records).savefig(workdir / "sps.png", dpi=120)
  screen = rich_console.Console()
  screen.width = max(screen.width, 160)
  screen.print(shown)
  screen.print(f"tables: {workdir}/sps_*.json   plot: {workdir / 'sps.png'}")


if __name__ == "__main__":
  common.define("configs/tiny/sps.py")
  app.run(main)
