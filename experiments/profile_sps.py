"""Steps per second against verify tokens: the cost table that schedules weigh (DSpark §5.1).

  python -m experiments.profile_sps --config=configs/tiny/sps.py --workdir=runs/tiny_sps

One table a concurrency: a step of B requests with ℓ drafts each verifies B·(1+ℓ) tokens; ℓ = 0 is the target alone.
"""

import datetime
import functools
import os
import time

import jax
import jax.numpy as jnp
import matplotlib
from absl import app
from matplotlib.figure import Figure
from rich import console as rich_console
from rich import table as rich_table

import specdec_jax
from experiments import common
from specdec_jax import cost, decode, report
from specdec_jax.sampling import make_sampling

common.define("configs/tiny/sps.py")


def step(config, target, drafter, batch: int, length: int):
  """A function that runs one round of `batch` requests with `length` drafts behind `config.context` rows, and returns its seconds."""
  drafter = drafter if length else None
  method = decode.make_method(target, drafter, length or None, "fixed", "token", False)
  state = decode.init_state(target, method, batch, decode.room(config.context, config.max_new_tokens, method.draft_length))
  tokens = jnp.tile(jnp.arange(config.context) % target.vocab, (batch, 1)).astype(jnp.int32)
  sampling = make_sampling(batch, target.vocab, config.temperature, seed=list(range(batch)))
  limits = decode.Limits(jnp.full(batch, config.max_new_tokens, jnp.int32), jnp.full((batch, 4), -1, jnp.int32))
  weights = drafter.params if drafter else None
  state, _ = decode.prefill(method, target.params, weights, state, tokens, jnp.full(batch, config.context, jnp.int32), sampling, limits)
  one_round = jax.jit(functools.partial(decode.decode_round, method), donate_argnums=2)
  held = [state]

  def run() -> float:
    began = time.perf_counter()
    after, output, _ = one_round(target.params, weights, held[0], sampling=sampling, limits=limits)
    output.tokens.block_until_ready()
    seconds = time.perf_counter() - began
    # The same context again; the arrays stay where they are.
    held[0] = after.replace(
        cache=after.cache.replace(lengths=jnp.full(batch, config.context, jnp.int32)), emitted=jnp.ones(batch, jnp.int32),
        finish=jnp.full(batch, decode.RUNNING, jnp.int32))
    return seconds

  return run


def main(argv):
  del argv
  matplotlib.use("agg")
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  drafter = specdec_jax.load_drafter(config.drafter, target)
  lengths = [n for n in config.draft_lengths if n <= drafter.model.draft_length]
  screen, shown = rich_console.Console(), rich_table.Table("concurrency", *(f"{n} drafts (ms)" for n in lengths))
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  for batch in config.concurrencies:
    made_from = {
        "target": target.hash, "drafter": drafter.hash, "concurrency": batch, "context": config.context, "temperature": config.temperature,
        "mesh": None, "device": report.device(), "versions": report.versions(), "date": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    table = cost.measure({batch * (1 + n): step(config, target, drafter, batch, n) for n in lengths}, config.repeats, made_from)
    table.save(workdir / f"sps_{batch}.json")
    shown.add_row(str(batch), *(f"{1e3 * s:.2f} ± {1e3 * w:.2f}" for s, w in zip(table.seconds, table.spread)))
    axes.errorbar(table.tokens, [1 / s for s in table.seconds], fmt=".-", label=f"concurrency {batch}")
    report.append(workdir / "results.jsonl", common.record(
        "profile_sps", target, {"name": drafter.name, "hash": drafter.hash}, dataset="synthetic", temperature=config.temperature, concurrency=batch,
        schedule="fixed", rule="token", speculation={"on": True, "why": None}, notes=f"median of {config.repeats}, load {os.getloadavg()[0]:.1f}",
        metrics={"tokens": list(table.tokens), "seconds": list(table.seconds), "spread": list(table.spread)}))
  axes.set(xlabel="verify tokens of a step", ylabel="steps per second", xscale="log", yscale="log", title=f"{target.name} with {drafter.name}")
  axes.legend(fontsize=7)
  figure.savefig(workdir / "sps.png", dpi=120)
  screen.print(shown)
  screen.print(f"tables: {workdir}/sps_*.json   plot: {workdir / 'sps.png'}")


if __name__ == "__main__":
  app.run(main)
