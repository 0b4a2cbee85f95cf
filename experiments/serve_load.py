"""The engine under load: throughput against speed per user, and how much is verified as load rises (DSpark Figures 7 and 8).

  python -m experiments.serve_load --config=configs/tiny/serve.py --workdir=runs/tiny_serve

Closed loop: so many requests at once, each replaced as it ends, in an engine of as many slots; tokens/s up to the last replacement. Open
loop: requests come by themselves, evenly at random (Poisson) or in bursts, whether or not the engine keeps up. Engines take turns, short
ones, as a machine's pace changes: all serve the same requests in a turn, and others in the next. Before them comes a long one that is not
counted, in which costs are learned that no profile shows.
"""

import os
import random
from collections.abc import Sequence

import jax
from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common, plots
from experiments.load import Load, arrivals, buckets, closed, figures, opened, together
from experiments.measure import load_prompts
from specdec_jax import facts, report
from specdec_jax.engine import Engine

COLUMNS = (
    ("load", "metrics.load", ""), ("method", "metrics.method", ""), ("requests at once", "concurrency", ""),
    ("tokens/s", "metrics.held_tokens_per_s", ".0f"), ("user tokens/s p50", "metrics.user_tps", ".0f"),
    ("ttft p50 (s)", "metrics.ttft.p50", ".3f"), ("p90", "metrics.ttft.p90", ".3f"), ("p99", "metrics.ttft.p99", ".3f"),
    ("latency p50 (s)", "metrics.request_latency.p50", ".2f"), ("p90", "metrics.request_latency.p90", ".2f"),
    ("p99", "metrics.request_latency.p99", ".2f"), ("accepted length", "metrics.accepted_length", ".2f"),
    ("verify length", "metrics.verify_length", ".2f"), ("batch use", "metrics.batch_use", ".2f"), ("equal", "lossless.identical", ""))


def make_engines(config, target, slots: Sequence[int]) -> dict[str, Engine]:
  """A warm engine of these numbers of slots for each method, with cost tables where its schedule weighs them."""
  engines = {}
  for name, m in config.methods.items():
    drafter = specdec_jax.load_drafter(m.drafter, target) if m.drafter else None
    engine = Engine(
        target, drafter, slots=max(slots), max_length=config.max_length, schedule=m.schedule, draft_length=m.get("draft_length"),
        slot_buckets=slots, buckets=buckets(slots, config.rows_per_slot if m.schedule != "fixed" else ()),
        needs=config.needs, reaches=config.reaches, adaptive=m.schedule != "fixed")
    engine.warm_up()
    if m.schedule == "asynchronous":
      engine.use_costs(engine.profile(config.context, config.profile_repeats))
    engines[name] = engine
  return engines


def record(config, engine: Engine, name: str, load: str, concurrency, turns: Sequence[Load], expected, executables):
  """The results record of all turns; `expected`: the target's own texts, where they must be equal."""
  run = together(turns)
  stats, served = engine.stats(), run.served
  same = None if expected is None else sum(s.tokens == e for s, e in zip(served, expected, strict=True))
  found = {
      **figures(run), "each": [figures(turn)["held_tokens_per_s"] for turn in turns], "load": load, "method": name,
      "batch_use": stats["batch_use"],
      "buckets": {str(k): v for k, v in stats["buckets"].items()}, "queue": {str(k): v for k, v in stats["queue"].items()},
      "verify_tokens": {str(k): v for k, v in stats["verify_tokens"].items()}, **engine.plan}
  return common.record(
      "serve_load", engine.target, engine.drafter and {"name": engine.drafter.name, "hash": engine.drafter.hash}, seed=config.seed,
      dataset="all", temperature=config.temperature, concurrency=concurrency,
      schedule=engine.manifest()["schedule"], rule="token", n_requests=len(served),
      n_rounds=found["rounds"], speculation={"on": any(s.speculation["on"] for s in served), "why": engine.why_off},
      lossless={"contract": None if expected is None else 1, "identical": same, "n": len(served),
                "holds": None if same is None else same == len(served)},
      compile={"count": executables, "seconds": None}, metrics=found,
      notes="; ".join([f"{len(turns)} turns, load {os.getloadavg()[0]:.1f}", *stats["health"]]))


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  by_domain = load_prompts(config, target)
  rng = random.Random(config.seed)
  requests = [(ids, new) for ids in sum(by_domain.values(), []) for new in [rng.choice(config.max_new_tokens)]]
  rng.shuffle(requests)
  expected = None
  if config.temperature == 0:
    done = specdec_jax.generate(target, None, [ids for ids, _ in requests], [new for _, new in requests])
    expected = [c.tokens for c in done]
  screen = rich_console.Console()
  screen.width = max(screen.width, 200)
  records = []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    loads = [("closed", c, config.repeats) for c in config.concurrencies]
    loads += [(kind, rate, config.open_repeats) for kind in config.open_loops for rate in config.rates]
    task = bar.add_task(target.name, total=sum(1 + n for _, _, n in loads) * len(config.methods), note="")
    started, engines = (workdir / "results.jsonl").exists(), {}
    for load, level, repeats in loads:
      slots = (level,) if load == "closed" else config.open_slots
      if not engines or set(slots) != set(next(iter(engines.values())).slot_buckets):
        bar.update(task, note=f"warm-up of {max(slots)} slots")
        engines.clear()
        jax.clear_caches()  # Six engines' programs of every size take more memory maps than a process may have.
        engines |= make_engines(config, target, slots)
        for name, engine in engines.items():
          pinned = {k: v for k, v in engine.manifest().items() if k != "costs"}  # Which are measured anew.
          facts.claim(workdir / f"manifest_{name.replace(' ', '_')}_{max(slots)}.json", pinned | {"buckets": engine.buckets}, started)
      turns, asked, before = {name: [] for name in engines}, [], {}
      count = max(config.requests_each * level, config.least_requests) if load == "closed" else config.open_requests
      for repeat in range(-1, repeats):
        which = [(repeat * count + i) % len(requests) for i in range(count if repeat >= 0 else config.warm_up * count)]
        for name, engine in engines.items() if repeat % 2 else reversed(engines.items()):
          bar.update(task, advance=1, note=f"{load} {level:g}: {name}")
          if repeat == 0:
            engine.forget()
            before[name] = engine.compiled
          chosen = [requests[i] for i in which]
          if load == "closed":
            run = closed(engine, chosen, level, temperature=config.temperature)
          else:
            run = opened(
                engine, chosen, arrivals(load, level, len(chosen), config.burst, config.seed + repeat), temperature=config.temperature)
          if repeat >= 0:
            turns[name].append(run)
        asked += which if repeat >= 0 else []
      for name, engine in engines.items():
        records.append(record(
            config, engine, name, load, level if load == "closed" else max(engine.slot_buckets), turns[name],
            expected and [expected[i] for i in asked], engine.compiled - before[name]))
        if load != "closed":
          records[-1]["metrics"]["rate"] = level
        report.append(workdir / "results.jsonl", records[-1])
  screen.print(report.table(records, COLUMNS))
  (workdir / "load.md").write_text(report.markdown(records, COLUMNS) + "\n")
  plots.load_curves(records).savefig(workdir / "load.png", dpi=120)
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'load.md'}   plot: {workdir / 'load.png'}")
  if any(r["lossless"]["holds"] is False for r in records):
    raise SystemExit("not lossless: a request's text is not that of its solo run")


if __name__ == "__main__":
  common.define("configs/tiny/serve.py")
  app.run(main)
