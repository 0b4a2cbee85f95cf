"""Kernels against XLA on the default device.

  python -m experiments.bench_kernels --config=configs/kernels/bench.py --workdir=runs/bench_kernels

On a CPU (--config=configs/kernels/bench.py:smoke) the references alone are timed, at the small cases.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.large = True  # the large cases of every shapes.py, or the small ones
  c.copy_bytes = 2**30
  c.matmul_size = 8192
  c.calls = 20  # in one program
  c.repeats = 5
  if variant == "smoke":
    c.large, c.copy_bytes, c.matmul_size, c.calls, c.repeats = False, 2**22, 256, 2, 1
  return c
