"""Load on an engine: closed loops, open loops, and when requests come."""

import random
import time

from specdec_jax.engine import Engine


def closed(engine: Engine, requests, concurrency: int, settings) -> tuple[list, float]:
  """(results in the order of `requests`, wall seconds) with so many requests in flight."""
  began, waiting, running, done = time.perf_counter(), list(enumerate(requests)), {}, {}
  while waiting or running:
    while waiting and len(running) < concurrency:
      i, (ids, new) = waiting.pop(0)
      running[engine.submit(ids, new, seed=i, **settings)] = i
    engine.step()
    for number in engine.ended():
      done[running.pop(number)] = engine.result(number)
  return [done[i] for i in sorted(done)], time.perf_counter() - began


def opened(engine: Engine, requests, arrivals, settings) -> tuple[list, float]:
  """The same with requests that come at `arrivals`, seconds from the start."""
  began, waiting, running, done = time.perf_counter(), list(enumerate(zip(requests, arrivals, strict=True))), {}, {}
  while waiting or running:
    while waiting and time.perf_counter() - began >= waiting[0][1][1]:
      i, ((ids, new), _) = waiting.pop(0)
      running[engine.submit(ids, new, seed=i, **settings)] = i
    if not running:
      time.sleep(max(0.0, waiting[0][1][1] - (time.perf_counter() - began)))
      continue
    engine.step()
    for number in engine.ended():
      done[running.pop(number)] = engine.result(number)
  return [done[i] for i in sorted(done)], time.perf_counter() - began


def arrivals(kind: str, rate: float, count: int, burst: int, seed: int) -> list[float]:
  """When requests come: one by one, exponential gaps of mean 1/rate seconds; or `burst` at a time, at the same mean rate."""
  rng, at, out = random.Random(seed), 0.0, []
  while len(out) < count:
    at += rng.expovariate(rate if kind == "poisson" else rate / burst)
    out += [at] * (1 if kind == "poisson" else burst)
  return out[:count]
