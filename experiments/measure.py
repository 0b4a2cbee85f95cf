"""Methods measured on the same prompts, as experiments share it: runs, their losslessness, their results records."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence

import specdec_jax
from experiments import common
from specdec_jax import calibrate, lossless, metrics
from specdec_jax.data import prompts as prompts_lib
from specdec_jax.decode import Completion, compiled, prompt_bucket
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.target import Target

LEAST_P = 1e-4  # Right samples are less probable than this once in ten thousand runs, or less often.


@dataclasses.dataclass
class Run:
  """One method on one data set at one temperature: its outputs, and the wall times of its repeats, in seconds; warmed: the outputs of its
  warm-up by prompt, with which what it ran was compiled, `executables` programs in `warm_up` seconds."""

  drafter: Drafter | None
  rule: str
  warmed: dict[int, Completion]
  warm_up: float
  executables: int
  done: list[Completion] = dataclasses.field(default_factory=list)
  walls: list[float] = dataclasses.field(default_factory=list)

  @property
  def tokens_per_s(self) -> float:
    return sum(len(c.tokens) for c in self.done) / min(self.walls)

  @property
  def compile_seconds(self) -> float:
    """What the warm-up took beyond its share of a later run."""
    return max(self.warm_up - min(self.walls) * len(self.warmed) / len(self.done), 0.0)


def load_prompts(config, target: Target) -> dict[str, list[list[int]]]:
  """Token ids by data set, sorted by length so that batches are even."""
  out = {}
  for name, source in config.prompts.items():
    texts = prompts_lib.shipped_prompts(source, name, config.prompts_per_dataset)
    write = lambda text: prompts_lib.chat_prompt(target.tokenizer, text, config.system or None, **config.get("chat", {}))
    ids = [target.tokenizer.encode(write(t)) for t in texts]
    out[name] = sorted(ids, key=len)
  return out


def decode_all(
    target: Target, drafter: Drafter | None, prompts: Sequence[list[int]], batch: int, new: int, seeds: Sequence[int], **settings,
) -> list[Completion]:
  """Every prompt, with its seed, in batches of one size: one shape to compile."""
  done = []
  for start in range(0, len(prompts), batch):
    rows = list(range(start, min(start + batch, len(prompts))))
    filled = rows + rows[:1] * (batch - len(rows))
    done += specdec_jax.generate(
        target, drafter, [prompts[i] for i in filled], new, seed=[seeds[i] for i in filled], **settings)[: len(rows)]
  return done


def recorded(config, target: Target, drafter: Drafter, prompts: Sequence[list[int]]):
  """Full blocks of `config.samples` answers to every prompt: (confidence logits [n,L], accepted [n], observed [n])."""
  prompts = [p for p in prompts for _ in range(config.samples)]
  seeds = range(config.seed, config.seed + len(prompts))
  done = decode_all(target, drafter, prompts, config.batch, config.max_new_tokens, seeds, temperature=config.temperature, record=True)
  return calibrate.blocks(done, target.config.eos, drafter.model.draft_length, config.max_new_tokens)


def measure(
    config, target: Target, drafters: Sequence[Drafter | None], prompts, temperature: float,
    tick: Callable[[str], None], rules: Sequence[str],
) -> list[Run]:
  """All methods on the same prompts: one warm-up each, with a batch of every shape, then the repeats in turn, so that drift hits all alike.

  Every drafter runs under each of the acceptance rules; they are one rule at temperature 0, and without a drafter. Raises RuntimeError
  where a prompt gives other tokens than it gave before."""
  decode = lambda drafter, rule, rows: decode_all(
      target, drafter, [prompts[i] for i in rows], config.batch, config.max_new_tokens, [config.seed + i for i in rows],
      temperature=temperature, rule=rule)
  every = range(len(prompts))
  batches = [every[i : i + config.batch] for i in every[:: config.batch]]
  shapes = {prompt_bucket(len(prompts[rows[-1]])): rows for rows in batches}
  runs = []
  for drafter, rule in ((d, r) for r in rules for d in drafters if r == rules[0] or (d and temperature)):
    tick(f"warm-up {drafter.name if drafter else 'autoregressive'}")
    before, began = compiled(), time.perf_counter()
    warmed = {i: c for rows in shapes.values() for i, c in zip(rows, decode(drafter, rule, rows), strict=True)}
    runs.append(Run(drafter, rule, warmed, time.perf_counter() - began, compiled() - before))
  for _ in range(config.repeats):
    for run in runs:
      tick(run.drafter.name if run.drafter else "autoregressive")
      began = time.perf_counter()
      done = decode(run.drafter, run.rule, every)
      run.walls.append(time.perf_counter() - began)
      if any(done[i].tokens != c.tokens for known in (run.warmed, dict(enumerate(run.done))) for i, c in known.items()):
        raise RuntimeError("two runs with the same seeds gave different tokens")
      run.done = done
  return runs


def check(target: Target, prompts, run: Run, plain: Run, temperature: float) -> dict:
  """The losslessness contract that applies, and whether it holds; of the baseline itself nothing is claimed."""
  if run.drafter is None:
    return {"contract": None, "identical": None, "n": len(run.done), "holds": None}
  if temperature == 0:
    same, apart = lossless.identical(run.done, plain.done), []
    if same < len(run.done) and target.dtype != "float32":
      apart = lossless.first_divergences(target, prompts, run.done, plain.done)
    holds = all(d.near_tie for d in apart) if apart else same == len(run.done)
    return {"contract": 1 if target.dtype == "float32" else 2, "identical": same, "n": len(run.done), "holds": holds}
  found = lossless.surprisal(target, prompts, run.done, temperature)
  return {"contract": 3, "identical": None, "n": len(run.done), "z": found.z if math.isfinite(found.z) else None, "p": found.p_value,
          "holds": found.p_value >= LEAST_P}


def result(experiment: str, config, target: Target, dataset: str, prompts, temperature: float, run: Run, plain: Run) -> dict:
  """The results record of one run."""
  rounds = [c.rounds for c in run.done]
  found = metrics.acceptance(rounds) if run.drafter else {}
  found |= {
      "tokens_per_s": run.tokens_per_s, "delivered_tokens": sum(len(c.tokens) for c in run.done),
      "peak_memory": metrics.peak_memory_bytes(), "longest_repeat": max(metrics.longest_repeat(c.tokens) for c in run.done)}
  if run.drafter:
    found["by_request"] = [(len(r), sum(e for _, _, e in r)) for r in rounds]
    found["speedup"] = metrics.speedup(run.tokens_per_s, plain.tokens_per_s)
  return common.record(
      experiment, target, {"name": run.drafter.name, "hash": run.drafter.hash} if run.drafter else None, seed=config.seed,
      dataset=dataset, temperature=temperature, concurrency=config.batch, schedule="fixed", rule=run.rule, n_requests=len(run.done),
      n_rounds=sum(map(len, rounds)), speculation={"on": run.drafter is not None, "why": None if run.drafter else "baseline"},
      lossless=check(target, prompts, run, plain, temperature),
      compile={"count": run.executables, "seconds": run.compile_seconds}, metrics=found,
      notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}")
