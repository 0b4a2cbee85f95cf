"""What a run under load shows: tokens while the load is held apart from those behind it, when slots run empty."""

from experiments import load
from specdec_jax.requests import Served


class OneTokenAStep:
  """An engine that gives every request a token a step, and a clock of its steps."""

  def __init__(self):
    self.clock, self.left, self.got, self.began, self.numbers = 0.0, {}, {}, {}, 0

  def submit(self, ids, new, seed):
    self.numbers += 1
    self.left[self.numbers], self.got[self.numbers], self.began[self.numbers] = new, [], self.clock
    return self.numbers

  def step(self):
    self.clock += 1
    for n, left in self.left.items():
      if left:
        self.left[n] -= 1
        self.got[n].append((self.clock - self.began[n], 1))

  def ended(self):
    return [n for n, left in self.left.items() if not left]

  def result(self, n):
    del self.left[n]
    return Served(
        [7] * len(self.got[n]), None, "length", [], deliveries=tuple(self.got[n]), ttft=1.0, latency=1.0,
        speculation={"on": False, "why": None})


def test_throughput_while_the_load_is_held(monkeypatch):
  """Two at once of 2, 4, 3 and 8 tokens: the last comes after 4 steps, which gave 8 tokens; 8 more steps give the rest."""
  engine = OneTokenAStep()
  monkeypatch.setattr(load.time, "perf_counter", lambda: engine.clock)
  run = load.closed(engine, [([1], 2), ([1], 4), ([1], 3), ([1], 8)], 2)
  assert [len(s.tokens) for s in run.served] == [2, 4, 3, 8]
  assert (run.wall, run.held, run.held_tokens) == (12.0, 4.0, 8)
  found = load.figures(run)
  assert found["tokens_per_s"] == 17 / 12 and found["held_tokens_per_s"] == 2.0
  assert load.throughput({"metrics": found}) == 2.0 and load.throughput({"metrics": {"tokens_per_s": 5.0}}) == 5.0


def test_all_at_once_are_counted_to_the_end(monkeypatch):
  engine = OneTokenAStep()
  monkeypatch.setattr(load.time, "perf_counter", lambda: engine.clock)
  found = load.figures(load.closed(engine, [([1], 2), ([1], 4)], 2))
  assert found["held_tokens_per_s"] == found["tokens_per_s"] == 6 / 4
