"""Every kernel against XLA's own code for its reference, over the cases of its shapes.py.

  python -m experiments.bench_kernels --config=configs/kernels/bench.py --workdir=runs/bench_kernels

Seconds of one call inside a compiled loop, best of several in turn; share of what this device reaches in a plain copy and in a bfloat16
matrix product, from counted bytes and operations. Where the default backend has no kernel (a CPU), the reference alone is timed.
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
from absl import app
from rich import console as rich_console

from experiments import common
from specdec_jax import report
from specdec_jax.kernels import OPS, default_implementation

COLUMNS = (
    ("kernel", "metrics.kernel", ""), ("case", "metrics.case", ""), ("pass", "metrics.way", ""), ("XLA (µs)", "metrics.reference", ".1f"),
    ("kernel (µs)", "metrics.time", ".1f"), ("XLA / kernel", "metrics.gain", ".2f"), ("of copy speed", "metrics.of_copy", ".0%"),
    ("of matmul speed", "metrics.of_matmul", ".0%"))


def repeated(f, count: int):
  """f(arguments) `count` times in a row in one program, each call waiting for the one before."""

  @jax.jit
  def run(arguments):
    def step(_, out):
      held, _ = jax.lax.optimization_barrier((arguments, out))
      return f(held)

    return jax.lax.fori_loop(1, count, step, f(arguments))

  return run


def best_seconds(programs: dict, arguments, count: int, repeats: int) -> dict[str, float]:
  """Best seconds of one of `count` calls, the programs in turn."""
  best = {}
  for turn in range(repeats + 1):  # The first turn compiles.
    for name, run in programs.items():
      began = time.perf_counter()
      jax.block_until_ready(run(arguments))
      if turn:
        best[name] = min(best.get(name, float("inf")), (time.perf_counter() - began) / count)
  return best


def ceilings(config) -> tuple[float, float]:
  """(bytes/s of a copy, read and written; operations/s of a bfloat16 product), measured."""
  x = jnp.zeros((config.copy_bytes // 4,), jnp.float32)
  a = jnp.zeros((config.matmul_size, config.matmul_size), jnp.bfloat16)
  copy = best_seconds({"": repeated(lambda x: x + 1, config.calls)}, x, config.calls, config.repeats)[""]
  product = best_seconds({"": repeated(lambda a: a @ a, config.calls)}, a, config.calls, config.repeats)[""]
  return 2 * x.nbytes / copy, 2 * config.matmul_size**3 / product


def passes(op, case):
  """{"forward" or "backward": function of (implementation, arguments)}."""
  def forward(implementation, a):
    if implementation == "reference":
      return op.reference(**a, **case.settings)
    return op.call(**a, **case.settings, implementation=implementation)

  def backward(implementation, a):
    loss = lambda some: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(forward(implementation, {**a, **some})))
    return jax.grad(loss)({k: a[k] for k in case.differentiable})

  return {"forward": forward} | ({"backward": backward} if case.differentiable else {})


def main(argv):
  del argv
  config, workdir = common.settings()
  kernel = default_implementation()
  copy, product = ceilings(config)
  screen = rich_console.Console()
  screen.width = max(screen.width, 150)
  screen.print(f"{report.device()}: copy {copy / 1e9:.0f} GB/s, bfloat16 product {product / 1e12:.2f} TFLOP/s")
  records = []
  for op in OPS.values():
    for case in op.cases:
      if case.large != config.large:
        continue
      arguments = case.make(jax.random.key(0))
      for way, f in passes(op, case).items():
        names = dict.fromkeys(("reference", kernel))
        programs = {n: repeated(functools.partial(f, n), config.calls) for n in names}
        best = best_seconds(programs, arguments, config.calls, config.repeats)
        work = 1 if way == "forward" else 0  # Only the forward pass is counted.
        records.append(common.record(
            "bench_kernels", None, notes=f"best of {config.repeats} x {config.calls} calls, load {os.getloadavg()[0]:.1f}", metrics={
                "kernel": op.name, "case": case.name, "way": way, "implementation": kernel, "reference": 1e6 * best["reference"],
                "time": 1e6 * best[kernel] if kernel != "reference" else None,
                "gain": best["reference"] / best[kernel] if kernel != "reference" else None,
                "of_copy": work * case.bytes / best[kernel] / copy or None, "of_matmul": work * case.flops / best[kernel] / product or None,
                "bytes": case.bytes, "flops": case.flops, "copy": copy, "matmul": product}))
        report.append(workdir / "results.jsonl", records[-1])
  screen.print(report.table(records, COLUMNS))
  (workdir / "kernels.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'kernels.md'}")


if __name__ == "__main__":
  common.define("configs/kernels/bench.py")
  app.run(main)
