"""The whole evaluation of a serving set-up: checklist, load by concurrency, length and task, boundary inputs, soak with faults.

  python -m experiments.protocol --config=configs/tiny/protocol.py --workdir=runs/tiny_protocol

Greedy throughout, so that every text can be held against its solo run by the target alone, also under faults. The baseline is an
engine without a drafter, in the same process, in turn. One report: protocol.md.
"""

import itertools
import os
import random
import time

import jax
from absl import app
from rich import console as rich_console

import specdec_jax
from experiments import common
from experiments.load import buckets, closed, figures
from experiments.measure import load_prompts
from specdec_jax import facts, metrics, report
from specdec_jax.data import prompts as prompts_lib
from specdec_jax.engine import Engine
from specdec_jax.requests import QueueFull

COLUMNS = (
    ("task", "dataset", ""), ("length", "metrics.length", ""), ("at once", "concurrency", ""),
    ("drafts", lambda r: "on" if r["speculation"]["on"] else "off", ""),
    ("tokens/s", "metrics.tokens_per_s", ".0f"), ("speedup", "metrics.speedup", ".2f"), ("ttft p50 (s)", "metrics.ttft.p50", ".3f"),
    ("latency p50 (s)", "metrics.request_latency.p50", ".2f"), ("p90", "metrics.request_latency.p90", ".2f"),
    ("p99", "metrics.request_latency.p99", ".2f"), ("accepted length", "metrics.accepted_length", ".2f"),
    ("cost a token", "metrics.cost_per_token", ".2e"), ("equal", lambda r: f"{r['lossless']['identical']}/{r['lossless']['n']}", ""))


def make_engine(config, target, drafter, schedule=None, **options) -> Engine:
  sizes = tuple(config.concurrencies)
  return Engine(
      target, drafter, slots=max(sizes), max_length=config.max_length, schedule=schedule or config.schedule, slot_buckets=sizes,
      needs=("greedy",), buckets=buckets(sizes, config.rows_per_slot), **options)


def solo(target, prompts, new) -> dict[tuple, list[int]]:
  """The target's own greedy text of every prompt, by its ids."""
  done = specdec_jax.generate(target, None, prompts, new)
  return {tuple(p): c.tokens for p, c in zip(prompts, done, strict=True)}


def grid(config, engine: Engine, alone: Engine, prompts, expected, workdir) -> list[dict]:
  """Every task, length and concurrency, by the engine and by one without a drafter in turn; the median run of each."""
  records = []
  for (task, ids), (length, new), concurrency in itertools.product(prompts.items(), config.new_tokens.items(), config.concurrencies):
    requests = [(p, new) for p in itertools.islice(itertools.cycle(ids), max(len(ids), concurrency))]
    runs = {alone: [], engine: []}
    for repeat in range(config.repeats):
      for one in (alone, engine) if repeat % 2 == 0 else (engine, alone):
        before = one.compiled
        run = closed(one, requests, concurrency, temperature=0.0)
        same = sum(s.tokens == expected[tuple(p)][:new] for s, (p, _) in zip(run.served, requests, strict=True))
        runs[one].append({**figures(run), "same": same, "compiled": one.compiled - before})
    base = None
    for one, found in runs.items():
      middle = sorted(found, key=lambda f: f["tokens_per_s"])[len(found) // 2]
      same, base = min(f.pop("same") for f in found), base or middle["tokens_per_s"]
      records.append(common.record(
          "protocol", one.target, one.drafter and {"name": one.drafter.name, "hash": one.drafter.hash}, seed=config.seed, dataset=task,
          temperature=0.0, concurrency=concurrency, schedule=one.schedule, rule="token", n_requests=len(requests),
          n_rounds=middle["rounds"], speculation={"on": one.drafter is not None, "why": one.why_off},
          lossless={"contract": 1, "identical": same, "n": len(requests), "holds": same == len(requests)},
          compile={"count": max(f.pop("compiled") for f in found), "seconds": None},
          notes=f"median of {config.repeats}, load {os.getloadavg()[0]:.1f}",
          metrics={**middle, "length": length, "speedup": middle["tokens_per_s"] / base, "drafter_bytes": one.plan["drafter_bytes"],
                   "cost_per_token": config.device_cost * jax.device_count() / middle["tokens_per_s"]}))
      report.append(workdir / "results.jsonl", records[-1])
  return records


def checklist(config, engine: Engine, target, prompts, expected) -> list[tuple[str, bool]]:
  """What a serving set-up must do, each line tried."""
  ids = next(iter(prompts.values()))[0]
  new = min(config.new_tokens.values())
  want = expected[tuple(ids)][:new]
  submit = lambda **kw: engine.submit(ids, new, **kw)

  def refused(error, call):
    try:
      call()
    except error:
      return True
    return False

  engine.set_speculation(True)
  streamed = sum(engine.stream(submit()), [])
  numbers = [submit() for _ in range(3)]
  engine.step()
  engine.cancel(numbers[1])
  engine.run()
  three = [engine.result(n) for n in numbers]
  off = engine.result(submit(speculation=False))
  late = engine.result(submit(deadline=0.0))
  number = submit()
  engine.step()
  engine.set_speculation(False)
  engine.step()
  engine.set_speculation(True)
  switched = engine.result(number)
  fallen = make_engine(config, target, "no/such/drafter", fallback=True)
  number = fallen.submit(ids, new)
  alone = fallen.result(number)
  small = Engine(target, None, slots=2, max_length=config.max_length, queue=1, needs=("greedy",))
  small.submit(ids, new)
  return [
      ("streams what it returns", streamed == want), ("a cancelled request ends, its mates are unharmed",
       three[1].finish_reason == "cancelled" and three[0].tokens == three[2].tokens == want),
      ("speculation off by request: no drafts, the same text", off.tokens == want and not any(d for d, _, _ in off.rounds)),
      ("a deadline ends a request", late.finish_reason == "deadline"),
      ("speculation off and on for all while running", switched.tokens == want and any(not d for d, _, _ in switched.rounds)),
      ("a drafter that is missing is refused", refused((OSError, ValueError), lambda: make_engine(config, target, "no/such/drafter"))),
      ("or gone without, if that was asked for, and the result says so",
       alone.tokens == want and "cannot be loaded" in alone.speculation["why"]),
      ("a full queue refuses", refused(QueueFull, lambda: small.submit(ids, new))),
      ("a prompt that fits no slot is refused", refused(ValueError, lambda: engine.submit(ids * config.max_length, new))),
      ("memory for less than a slot is refused", refused(ValueError, lambda: make_engine(config, target, None, memory=1)))]


def boundaries(engine: Engine, target, new: int) -> list[tuple[str, bool]]:
  """Inputs at the edge: each is served like its solo run, or refused by name."""
  vocab, room = target.vocab, engine.max_length - new
  text = lambda s: target.tokenizer.encode(prompts_lib.chat_prompt(target.tokenizer, s))
  cases = {
      "one token": [1], "as long as a slot allows": [5 + i % 50 for i in range(room)],
      "special characters": text("\u2028\t\\n\0 \"'<|im_end|>` é ñ 漢字 🙂"), "one token over and over": [7] * min(200, room),
      "the last id of the vocabulary": [vocab - 1] * 3, "empty user turn": text("")}
  out = []
  for name, ids in cases.items():
    want = specdec_jax.generate(target, None, [ids], new)[0].tokens
    out.append((name, engine.result(engine.submit(ids, new)).tokens == want))
  try:
    engine.submit([], new)
    out.append(("no token at all is refused", False))
  except ValueError as e:
    out.append(("no token at all is refused", "empty" in str(e)))
  return out


def soak(config, target, drafter, prompts, expected) -> tuple[dict, list[tuple[str, bool]]]:
  """Random traffic with cancels, switches and failures of the device for `soak_seconds`; then a drafter that raises."""
  rng, launches = random.Random(config.seed), itertools.count(1)

  def fail(program):
    if next(launches) % config.fault_every == 0:
      raise jax.errors.JaxRuntimeError("INTERNAL: injected failure")

  engine = make_engine(config, target, drafter, fallback=True, queue=64)
  engine.warm_up()
  if engine.asynchronous:
    engine.use_costs(engine.profile(config.context, config.profile_repeats))
  engine._inject = fail
  pool, live = [p for ids in prompts.values() for p in ids], {}
  counts = dict.fromkeys(("served", "wrong", "cancelled", "lost", "refused"), 0)
  half, began, executables = None, time.perf_counter(), engine.compiled
  total_submitted = 0

  def take():
    for n in engine.ended():
      ids, new, cancelled = live.pop(n)
      s = engine.result(n)
      want = expected[tuple(ids)][:new]
      whole = s.tokens == want if s.finish_reason in ("stop", "length") else cancelled and s.tokens == want[: len(s.tokens)]
      counts["cancelled" if cancelled else "served"] += 1
      counts["wrong"] += not whole

  def at_rest() -> int:
    """Bytes alive when every request has been served."""
    engine.run()
    take()
    return sum(x.nbytes for x in jax.live_arrays()) - sum(x.nbytes for x in jax.tree.leaves(engine._state))

  while time.perf_counter() - began < config.soak_seconds:
    if rng.random() < 0.3:
      ids, new = rng.choice(pool), rng.choice(list(config.new_tokens.values()))
      try:
        live[engine.submit(ids, new, speculation=rng.random() < 0.9)] = [ids, new, False]
        total_submitted += 1
      except QueueFull:
        counts["refused"] += 1
    if live and rng.random() < 0.01:
      n = rng.choice(list(live))
      live[n][2] = True
      engine.cancel(n)
    if rng.random() < 0.002:
      engine.set_speculation(rng.random() < 0.8)
    engine.step()
    take()
    if half is None and time.perf_counter() - began > config.soak_seconds / 2:
      half = at_rest()
  end = at_rest()
  counts["lost"] = len(live)
  compiled_since = engine.compiled - executables

  def broken(program):
    if program == "draft":
      raise RuntimeError("injected: the drafter is broken")

  failing = make_engine(config, target, drafter, "fixed", fallback=True, inject=broken)
  ids, new = pool[0], min(config.new_tokens.values())
  after = failing.result(failing.submit(ids, new))
  found = {
      **counts, "submitted": total_submitted, "seconds": config.soak_seconds, "failures": len(engine.restarts),
      "compiled": compiled_since, "live_bytes_half_way": half, "live_bytes_at_the_end": end, "peak_memory": metrics.peak_memory_bytes()}
  return found, [
      ("no request was lost", not live and counts["served"] + counts["cancelled"] == total_submitted),
      ("no text was altered", not counts["wrong"]), ("the device failed, and was survived", bool(engine.restarts)),
      ("nothing was compiled", compiled_since == 0),
      ("memory is flat from half way on", half is not None and end <= 1.01 * half),
      ("a drafter that raises is gone without, and the result says so",
       after.tokens == expected[tuple(ids)][:new] and "is broken" in (after.speculation["why"] or ""))]


def main(argv):
  del argv
  config, workdir = common.settings()
  config.unlock()
  target = specdec_jax.load_target(config.target)
  tasks = config.tasks if hasattr(config.tasks, "items") else {t: "tasks" for t in config.tasks}
  config.prompts, config.prompts_per_dataset, config.system = tasks, config.prompts_per_task, ""
  prompts = load_prompts(config, target)
  drafter = specdec_jax.load_drafter(config.drafter, target)
  screen = rich_console.Console()
  screen.width = max(screen.width, 180)
  expected = {}
  for ids in prompts.values():
    expected |= solo(target, ids, max(config.new_tokens.values()))
  engine = make_engine(config, target, drafter)
  screen.print(f"planned: {engine.plan}")
  screen.print(f"warm-up: {engine.warm_up()} programs")
  if engine.asynchronous:
    engine.use_costs(engine.profile(config.context, config.profile_repeats))
  alone = make_engine(config, target, None)
  alone.warm_up()
  manifest = {k: v for k, v in engine.manifest().items() if k != "costs"} | {"buckets": engine.buckets}  # Costs are measured anew.
  facts.claim(workdir / "manifest.json", manifest, (workdir / "results.jsonl").exists())
  records = grid(config, engine, alone, prompts, expected, workdir)
  sections = {
      "Checklist": checklist(config, engine, target, prompts, expected),
      "Boundary inputs": boundaries(engine, target, min(config.new_tokens.values()))}
  decay = metrics.acceptance([
      r for ids in prompts.values()
      for r in (engine.result(engine.submit(p, max(config.new_tokens.values()))).rounds for p in ids)])
  soaked, sections["Soak"] = soak(config, target, drafter, prompts, expected)
  report.append(workdir / "results.jsonl", common.record(
      "protocol", target, {"name": drafter.name, "hash": drafter.hash}, dataset="soak", temperature=0.0,
      concurrency=max(config.concurrencies), schedule=config.schedule, rule="token", n_requests=soaked["submitted"],
      speculation={"on": True, "why": None}, metrics=soaked,
      lossless={"contract": 1, "identical": soaked["submitted"] - soaked["wrong"], "n": soaked["submitted"],
                "holds": not soaked["wrong"] and not soaked["lost"]},
      notes="injected failures of the device and of the drafter, cancels, switches"))
  equal = all(r["lossless"]["holds"] for r in records)
  sections["Losslessness"] = [(f"every request's text is that of its solo run, {sum(r['n_requests'] for r in records)} requests", equal)]
  lines = [
      f"# {target.name} with {drafter.name}, {config.schedule}", "",
      "Manifest: " + ", ".join(f"{k} {v}" for k, v in manifest.items() if k != "calibration"), ""]
  for name, rows in sections.items():
    lines += [f"## {name}", *(f"- {'yes' if ok else 'NO'}: {what}" for what, ok in rows), ""]
  lines += [
      f"Soak: {soaked}", "",
      "Acceptance by position: " + " ".join("n/a" if x is None else f"{x:.2f}" for x in decay["position_acceptance"]), "",
      f"Planned memory: {engine.plan}", "", report.markdown(records, COLUMNS)]
  (workdir / "protocol.md").write_text("\n".join(lines) + "\n")
  screen.print(report.table(records, COLUMNS))
  for name, rows in sections.items():
    for what, ok in rows:
      screen.print(f"{name}: {'yes' if ok else 'NO'}: {what}")
  screen.print(f"soak: {soaked}\nrecords: {workdir / 'results.jsonl'}   report: {workdir / 'protocol.md'}")
  if not equal or not all(ok for rows in sections.values() for _, ok in rows):
    raise SystemExit("protocol: something above says NO, or a text is not that of its solo run")


if __name__ == "__main__":
  common.define("configs/tiny/protocol.py")
  app.run(main)
