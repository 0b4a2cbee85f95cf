"""Which way to decode, at which load: expected throughput and speed per user from recorded acceptance and a cost table.

  python -m experiments.advise --config=configs/tiny/advise.py --workdir=runs/tiny_advise
  python -m experiments.advise --config=configs/tiny/advise.py:h200 --workdir=runs/h200_advise

Target alone, one draft of the serial drafter (MTP-1), fixed lengths, and the asynchronous schedule, at every concurrency; with
costs measured here, or of a roofline with stated constants for targets that are too large to measure.
"""

import matplotlib
import numpy as np
from absl import app
from matplotlib.figure import Figure
from rich import console as rich_console
from rich import table as rich_table

import specdec_jax
from experiments import common
from experiments.load import buckets
from experiments.measure import load_prompts, recorded
from specdec_jax import advise, calibrate, cost, report
from specdec_jax.engine import Engine


def blocks(config, target, drafter, prompts):
  """(calibrated confidences, accepted, data set) of recorded full blocks; calibrated on every other prompt, kept from the rest."""
  parts = [[recorded(config, target, drafter, ids[half::2]) for ids in prompts.values()] for half in (0, 1)]
  (logits, accepted, observed), (kept, kept_accepted, _) = ([np.concatenate(x) for x in zip(*part)] for part in parts)
  temperatures = calibrate.fit(logits, accepted, observed)
  group = np.repeat(np.arange(len(prompts)), [len(p[0]) for p in parts[1]])
  return 1 / (1 + np.exp(-np.clip(kept / temperatures, -50, 50))), kept_accepted, group


def measured(config, target, drafter) -> dict[int, cost.CostTable]:
  engine = Engine(
      target, drafter, slots=max(config.concurrencies), max_length=config.context + 32, schedule="fixed", slot_buckets=config.concurrencies,
      buckets=buckets(config.concurrencies, config.rows_per_slot), needs=("plain",))
  return engine.profile(config.context, config.repeats)


def roofline(config, concurrency: int, draft_length: int) -> cost.CostTable:
  r = config.roofline
  return cost.roofline(
      r.parameters, r.bytes_per_parameter, r.flops, r.bandwidth, tuple(range(1, concurrency * (1 + draft_length) + 1)),
      concurrency * config.context * r.kv_bytes_per_token, overhead=r.overhead)


def curves(config, target, drafters, prompts):
  """{concurrency: {way: Outlook}}."""
  found = {name: blocks(config, target, d, prompts) for name, d in drafters.items()}
  tables = {name: measured(config, target, d) for name, d in {"": None, **drafters}.items()} if not config.get("roofline") else None
  out = {}
  for c in config.concurrencies:
    def sps(name, length, c=c):
      if tables is not None:
        return tables[name][c].sps(c * (1 + length))
      seconds = config.roofline.drafter_bytes.get(name.rpartition("/")[2], 0.0) / config.roofline.bandwidth
      return advise.with_drafting(roofline(config, c, length).sps(), c, seconds)

    ways = {"target alone": advise.alone(sps("", 0), c)}
    for name, (confidence, accepted, group) in found.items():
      length = confidence.shape[1]
      lengths = {"1 draft": advise.fixed(1)} if length == 1 else {
          **{f"{n} drafts": advise.fixed(n) for n in config.draft_lengths if n <= length}, "scheduled": specdec_jax.schedule.asynchronous}
      for way, f in lengths.items():
        ways[f"{name}, {way}"] = advise.replay(confidence, accepted, sps(name, length), c, f, group, config.steps, config.seed)
    out[c] = ways
  return out


def words(config, found, main: str, serial: str) -> list[str]:
  """What follows, in plain words, with what it rests on."""
  scheduled, one = f"{main}, scheduled", f"{serial}, 1 draft"
  fixed = [w for w in next(iter(found.values())) if w.startswith(f"{main}, ") and w != scheduled]
  out = []
  for way in (one, *fixed, scheduled):
    last = advise.pays_until(found, way, "target alone")
    out.append(f"- {way}: " + ("pays at no concurrency looked at" if last is None else f"pays up to concurrency {last}" + (
        ", the largest looked at" if last == max(found) else "")))
  best = {c: max(ways, key=lambda w, ways=ways: ways[w].throughput) for c, ways in found.items()}
  out += [
      f"- concurrency {c}: most throughput with {w} "
      f"({found[c][w].throughput / found[c]['target alone'].throughput:.2f} times the target alone)" for c, w in best.items()]
  worst = min(ways[scheduled].throughput / max(ways[w].throughput for w in fixed) for ways in found.values())
  out.append(f"- the schedule has at least {worst:.3f} times the throughput of the best fixed length in hindsight, at every concurrency")
  held = "costs measured on this machine" if not config.get("roofline") else f"costs of a roofline: {dict(config.roofline.items())}"
  out.append(
      f"- assumed: {held}; a context of {config.context} tokens; temperature {config.temperature:g}; requests of "
      f"{', '.join(config.prompts)} in equal shares, all slots taken; acceptance recorded with the embedded target")
  return out


def main(argv):
  del argv
  matplotlib.use("agg")
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  drafters = {name: specdec_jax.load_drafter(name, target) for name in (config.serial, config.drafter)}
  if drafters[config.drafter].model.draft_length < 2:
    raise SystemExit(f"advise: {config.drafter} makes one draft a round: there is nothing to schedule")
  found = curves(config, target, drafters, load_prompts(config, target))
  ways = list(next(iter(found.values())))
  shown = rich_table.Table("tokens/s (a user's)", *map(str, found))
  lines = ["| tokens/s (a user's) | " + " | ".join(map(str, found)) + " |", "|" + "---|" * (len(found) + 1)]
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  for way in ways:
    cells = [f"{o[way].throughput:.0f} ({o[way].user_tps:.0f})" for o in found.values()]
    shown.add_row(way, *cells)
    lines.append(f"| {way} | " + " | ".join(cells) + " |")
    axes.plot([o[way].user_tps for o in found.values()], [o[way].throughput for o in found.values()], ".-", label=way)
    for c, o in found.items():
      report.append(workdir / "results.jsonl", common.record(
          "advise", target, next(({"name": d.name, "hash": d.hash} for name, d in drafters.items() if way.startswith(f"{name}, ")), None),
          dataset="all", temperature=config.temperature, concurrency=c, schedule=way, rule="token", seed=config.seed,
          speculation={"on": way != "target alone", "why": None if way != "target alone" else "baseline"},
          notes="roofline" if config.get("roofline") else "measured costs", metrics={
              "throughput": o[way].throughput, "user_tps": o[way].user_tps, **{
                  "accepted_length": o[way].accepted_length, "verify_length": o[way].verify_length}}))
  axes.set(xlabel="tokens per second of a user", ylabel="tokens per second of all", xscale="log", yscale="log")
  axes.legend(fontsize=6)
  figure.savefig(workdir / "throughput.png", dpi=120)
  text = words(config, found, config.drafter, config.serial)
  screen = rich_console.Console()
  screen.width = max(screen.width, 160)
  screen.print(shown)
  screen.print("\n".join(text))
  (workdir / "advice.md").write_text("\n".join([*lines, "", *text]) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   advice: {workdir / 'advice.md'}")


if __name__ == "__main__":
  common.define("configs/tiny/advise.py")
  app.run(main)
