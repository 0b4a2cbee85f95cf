"""Load on an engine: closed loops, open loops, when requests come, and what a run of them shows."""

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence

from specdec_jax import metrics
from specdec_jax.engine import Engine
from specdec_jax.requests import Served


def buckets(slots: Sequence[int], per_slot: Sequence[float]) -> dict[int, list[int]]:
  """Buckets of a verify call for each number of slots, from tokens for each slot."""
  return {s: [round(s * x) for x in per_slot] for s in slots}


@dataclasses.dataclass(frozen=True)
class Load:
  """What a run of requests gave: results in their order, wall seconds; tokens delivered and seconds up to `held`, when the last request
  was submitted: from then on the load falls, and fewer and fewer of the slots are taken."""

  served: list[Served]
  wall: float
  held_tokens: int
  held: float


def together(runs: Sequence[Load]) -> Load:
  """Runs one after the other as one."""
  return Load([s for r in runs for s in r.served], *(sum(getattr(r, name) for r in runs) for name in ("wall", "held_tokens", "held")))


def closed(engine: Engine, requests, concurrency: int, **settings) -> Load:
  """So many requests in flight, each replaced as it ends; requests: (prompt ids, new tokens)."""
  began, waiting, running, done, submitted = time.perf_counter(), list(enumerate(requests)), {}, {}, []
  now = lambda: time.perf_counter() - began
  while waiting or running:
    while waiting and len(running) < concurrency:
      i, (ids, new) = waiting.pop(0)
      submitted.append(now())
      running[engine.submit(ids, new, seed=i, **settings)] = i
    engine.step()
    for number in engine.ended():
      done[running.pop(number)] = engine.result(number)
  served, held = [done[i] for i in sorted(done)], submitted[-1]
  in_time = sum(n for s, start in zip(served, submitted) for at, n in s.deliveries if start + at <= held)
  return Load(served, now(), in_time, held)


def opened(engine: Engine, requests, arrivals: Sequence[float], **settings) -> Load:
  """The same with requests that come at `arrivals`, seconds from the start, from which their times count; held to the end."""
  began, waiting, running, done = time.perf_counter(), list(enumerate(zip(requests, arrivals, strict=True))), {}, {}
  now = lambda: time.perf_counter() - began
  while waiting or running:
    while waiting and now() >= waiting[0][1][1]:
      i, ((ids, new), due) = waiting.pop(0)
      running[engine.submit(ids, new, seed=i, **settings)] = i, now() - due
    if not running:
      time.sleep(max(0.0, waiting[0][1][1] - now()))
      continue
    engine.step()
    for number in engine.ended():
      i, late = running.pop(number)
      served = engine.result(number)
      done[i] = dataclasses.replace(served, ttft=None if served.ttft is None else served.ttft + late, latency=served.latency + late)
  served, wall = [done[i] for i in sorted(done)], now()
  return Load(served, wall, sum(len(s.tokens) for s in served), wall)


def arrivals(kind: str, rate: float, count: int, burst: int, seed: int) -> list[float]:
  """When requests come: "poisson", one by one with exponential gaps of mean 1/rate seconds; "bursts", `burst` at a time at the
  same mean rate. Raises ValueError for another kind."""
  if kind not in ("poisson", "bursts"):
    raise ValueError(f"unknown load {kind!r}: poisson or bursts")
  together = burst if kind == "bursts" else 1
  rng, at, out = random.Random(seed), 0.0, []
  while len(out) < count:
    at += rng.expovariate(rate / together)
    out += [at] * together
  return out[:count]


def figures(run: Load) -> dict:
  """Acceptance of the requests that could be drafted for; throughput and times of all (METRICS.md), and throughput while the load was held
  (of all, where every request was submitted at once): behind that the last requests leave slots empty."""
  served, whole = run.served, sum(len(s.tokens) for s in run.served) / run.wall
  tpot = [s.tpot for s in served if s.tpot]
  return {
      **metrics.acceptance([s.rounds for s in served if s.speculation["on"]]),
      "tokens_per_s": whole, "held_tokens_per_s": run.held_tokens / run.held if run.held_tokens else whole,
      "user_tps": 1 / statistics.median(tpot) if tpot else None, "ttft": metrics.percentiles(s.ttft for s in served if s.ttft is not None),
      "tpot": metrics.percentiles(tpot), "request_latency": metrics.percentiles(s.latency for s in served),
      "peak_memory": metrics.peak_memory_bytes(), "longest_repeat": max(metrics.longest_repeat(s.tokens) for s in served)}


def throughput(record: dict) -> float:
  """Tokens per second of a record, while the load was held where it says so."""
  return record["metrics"].get("held_tokens_per_s", record["metrics"]["tokens_per_s"])
