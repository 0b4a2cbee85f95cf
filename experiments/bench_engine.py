"""What the engine adds: time of a round under way over the sum of its parts (draft, verify, commit) run alone at the same bucket.

  python -m experiments.bench_engine --config=configs/tiny/engine.py --workdir=runs/tiny_engine
"""

import os
import statistics
import time

import jax
import numpy as np
from absl import app
from rich import console as rich_console

import specdec_jax
from experiments import common
from experiments.recipes import drafter_config
from specdec_jax import report
from specdec_jax.drafters import drafter_model
from specdec_jax.drafters.base import Drafter
from specdec_jax.engine import Engine

COLUMNS = (
    ("slots", "concurrency", ""), ("drafts", "metrics.drafts", ""), ("draft (ms)", "metrics.draft", ".2f"),
    ("verify", "metrics.verify", ".2f"), ("accept and commit", "metrics.commit", ".2f"),
    ("round", "metrics.round", ".2f"), ("round / parts", "metrics.ratio", ".3f"))


def load_drafter(config, target) -> Drafter:
  """The configured drafter: by name, or with random weights of a given form (time does not depend on weights)."""
  if config.drafter:
    return specdec_jax.load_drafter(config.drafter, target)
  model = drafter_model(drafter_config(config.recipe, target))
  params = model.init_params(jax.random.key(0)) | specdec_jax.hub.target_tables(target)
  return Drafter("random", model.config, model, params, "random")


def under_way(engine: Engine, slots: int, context: int, rounds: int) -> float:
  """Seconds of a round with all slots busy and the host a round ahead, at about `context` tokens."""
  prompt = np.random.default_rng(0).integers(5, engine.target.vocab - 5, context).tolist()
  numbers = [engine.submit(prompt, engine.max_length - context, ignore_eos=True) for _ in range(slots)]
  while len(engine._live()) < slots or engine._filling or engine._queue:
    engine.step()
  began = time.perf_counter()
  for _ in range(rounds):
    engine.step()
  jax.block_until_ready(engine._state)
  seconds = (time.perf_counter() - began) / rounds
  for n in numbers:
    engine.cancel(n)
  engine.run()
  for n in numbers:
    engine.result(n)
  return seconds


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  drafter = load_drafter(config, target)
  records = []
  for slots in config.slots:
    engine = Engine(
        target, drafter, slots=slots, max_length=config.max_length, schedule="fixed", slot_buckets=(slots,), buckets={slots: ()},
        needs=(config.need,), reaches=(config.max_length,), adaptive=False)
    engine.warm_up()
    turns = [  # In turn, so that drift hits both alike.
        engine.parts(slots, config.context, config.repeats, config.need)
        | {"round": under_way(engine, slots, config.context, config.rounds)}
        for _ in range(config.turns)]
    alone = {k: 1e3 * statistics.median(t[k] for t in turns) for k in turns[0]}
    whole = alone.pop("round")
    records.append(common.record(
        "bench_engine", target, {"name": drafter.name, "hash": drafter.hash}, dataset="synthetic", concurrency=slots,
        schedule="fixed", rule="token", speculation={"on": True, "why": None},
        notes=f"medians of {config.turns} turns, load {os.getloadavg()[0]:.1f}", metrics={
            "drafts": engine.method.draft_length, **alone, "round": whole, "ratio": whole / sum(alone.values())}))
    report.append(workdir / "results.jsonl", records[-1])
  screen = rich_console.Console()
  screen.print(report.table(records, COLUMNS))
  (workdir / "engine.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'engine.md'}")


if __name__ == "__main__":
  common.define("configs/tiny/engine.py")
  app.run(main)
