"""Speed of a target alone: tokens a second, and the time of a verify call against its number of tokens.

  python -m experiments.bench_decode --config=configs/smollm2/speed.py --workdir=runs/smollm2_speed
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from rich import console as rich_console
from rich import table as rich_table

import specdec_jax
from experiments import common
from specdec_jax import report
from specdec_jax.decode import round_up
from specdec_jax.models.target import Target


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def _verify(decoder, params, tokens, cache, taps):
  """One verify call: hidden states, logits of every row, the argmax; the cache is not committed."""
  hidden, _, cache = decoder.apply({"params": params}, tokens, cache, taps=taps)
  return jnp.argmax(decoder.apply({"params": params}, hidden, method="logits"), -1), cache.commit(jnp.zeros_like(cache.lengths))


def verify_times(targets: dict[str, Target], counts, batch: int, context: int, repeats: int) -> dict[str, dict[int, float]]:
  """Best seconds of a verify call of n tokens a slot behind `context` rows, for every variant, all in turn."""
  caches, best = {}, {}
  for name, target in targets.items():
    cache = target.init_cache(batch, round_up(context + max(counts), 128))
    caches[name] = cache.replace(lengths=cache.lengths + context)
  for turn in range(repeats + 1):  # The first turn compiles.
    for name, target in targets.items():
      cache = caches[name]
      for n in counts:
        tokens = jnp.ones((batch, n), jnp.int32)
        for _ in range(3 if turn else 1):
          began = time.perf_counter()
          out, cache = _verify(target.decoder, target.params, tokens, cache, ())
          out.block_until_ready()
          seconds = time.perf_counter() - began
          if turn:
            best[name, n] = min(best.get((name, n), np.inf), seconds)
      caches[name] = cache
  return {name: {n: best[name, n] for n in counts} for name in targets}


def decode_speed(target: Target, batch: int, new: int, repeats: int) -> float:
  """Best tokens a second of greedy target-only decoding, prompts of 16 tokens, prefill included."""
  prompts = [[(7 * i + j) % 200 + 5 for j in range(16)] for i in range(batch)]
  walls = []
  for _ in range(repeats + 1):
    began = time.perf_counter()
    specdec_jax.generate(target, None, prompts, new, ignore_eos=True)
    walls.append(time.perf_counter() - began)
  return batch * new / min(walls[1:])


def main(argv):
  del argv
  config, workdir = common.settings()
  try:
    targets = {name: specdec_jax.load_target(config.target, **dict(options)) for name, options in config.variants.items()}
  except FileNotFoundError as e:
    raise SystemExit(f"bench_decode: {e}") from e
  speeds = {b: decode_speed(targets[config.decode_variant], b, config.new_tokens, config.repeats) for b in config.batches}
  verify = {b: verify_times(targets, tuple(config.counts), b, config.context, config.repeats) for b in config.verify_batches}
  screen = rich_console.Console()
  shown = rich_table.Table(title=f"{config.target}: best of {config.repeats}, load {os.getloadavg()[0]:.1f}")
  for title in ("batch", "variant", *(f"{n} tokens (ms)" for n in config.counts)):
    shown.add_column(title)
  for b, variants in verify.items():
    for name, times in variants.items():
      shown.add_row(str(b), name, *(f"{1e3 * times[n]:.1f} ({times[n] / times[config.counts[0]]:.2f}x)" for n in config.counts))
  screen.print(shown)
  screen.print({f"batch {b}: tokens/s ({config.decode_variant})": round(s, 1) for b, s in speeds.items()})
  target = targets[config.decode_variant]
  for b in sorted({*speeds, *verify}):
    times = {name: {str(n): s for n, s in found.items()} for name, found in verify.get(b, {}).items()}
    report.append(workdir / "results.jsonl", common.record(
        "bench_decode", target, dataset="synthetic", temperature=0.0, concurrency=b,
        metrics={"tokens_per_s": speeds.get(b), "verify_seconds": times},
        notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}"))


if __name__ == "__main__":
  common.define("configs/tiny/speed.py")
  app.run(main)
