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
from specdec_jax.decode import Completion, compiled
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.target import Target

LEAST_P = 1e-4  # Right samples are less probable than this once in ten thousand runs, or less often.


@dataclasses.dataclass
class Run:
  """One method on one data set at one temperature: its outputs and the wall times of its repeats, in seconds."""

  drafter: Drafter | None
  rule: str
  done: list[Completion]
  warm_up: float
  executables: int
  walls: list[float]

  @property
  def tokens_per_s(self) -> float:
    return sum(len(c.tokens) for c in self.done) / min(self.walls)


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
  """All methods on the same prompts: one warm-up each, then the repeats in turn, so that drift hits all alike.

  Every drafter runs under each of the acceptance rules; they are one rule at temperature 0, and without a drafter."""
  seeds = range(config.seed, config.seed + len(prompts))
  decode = lambda drafter, rule: decode_all(
      target, drafter, prompts, config.batch, config.max_new_tokens, seeds, temperature=temperature, rule=rule)
  runs = []
  for drafter, rule in ((d, r) for r in rules for d in drafters if r == rules[0] or (d and temperature)):
    tick(f"warm-up {drafter.name if drafter else 'autoregressive'}")
    before, began = compiled(), time.perf_counter()
    done = decode(drafter, rule)
    runs.append(Run(drafter, rule, done, time.perf_counter() - began, compiled() - before, []))
  for _ in range(config.repeats):
    for run in runs:
      tick(run.drafter.name if run.drafter else "autoregressive")
      began = time.perf_counter()
      again = decode(run.drafter, run.rule)
      run.walls.append(time.perf_counter() - began)
      if [c.tokens for c in again] != [c.tokens for c in run.done]:
        raise RuntimeError("two runs with the same seeds gave different tokens")
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
      compile={"count": run.executables, "seconds": max(run.warm_up - min(run.walls), 0.0)}, metrics=found,
      notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}")
