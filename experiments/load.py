"""Load on an engine: closed loops, open loops, when requests come, and what a run of them shows."""

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence

from specdec_jax import metrics
from specdec_jax.engine import Engine, Served


def buckets(slots: Sequence[int], per_slot: Sequence[float]) -> dict[int, list[int]]:
  """Buckets of a verify call for each number of slots, from tokens for each slot."""
  return {s: [round(s * x) for x in per_slot] for s in slots}


def closed(engine: Engine, requests, concurrency: int, **settings) -> tuple[list[Served], float]:
  """(results in the order of `requests`, wall seconds) with so many requests in flight; requests: (prompt ids, new tokens)."""
  began, waiting, running, done = time.perf_counter(), list(enumerate(requests)), {}, {}
  while waiting or running:
    while waiting and len(running) < concurrency:
      i, (ids, new) = waiting.pop(0)
      running[engine.submit(ids, new, seed=i, **settings)] = i
    engine.step()
    for number in engine.ended():
      done[running.pop(number)] = engine.result(number)
  return [done[i] for i in sorted(done)], time.perf_counter() - began


def opened(engine: Engine, requests, arrivals: Sequence[float], **settings) -> tuple[list[Served], float]:
  """The same with requests that come at `arrivals`, seconds from the start, from which their times count."""
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
  return [done[i] for i in sorted(done)], now()


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


def figures(served: Sequence[Served], wall: float) -> dict:
  """Acceptance of the requests that could be drafted for; throughput and times of all (METRICS.md)."""
  tpot = [s.tpot for s in served if s.tpot]
  return {
      **metrics.acceptance([s.rounds for s in served if s.speculation["on"]]), "tokens_per_s": sum(len(s.tokens) for s in served) / wall,
      "user_tps": 1 / statistics.median(tpot) if tpot else None, "ttft": metrics.percentiles(s.ttft for s in served if s.ttft is not None),
      "tpot": metrics.percentiles(tpot), "request_latency": metrics.percentiles(s.latency for s in served),
      "peak_memory": metrics.peak_memory_bytes(), "longest_repeat": max(metrics.longest_repeat(s.tokens) for s in served)}
