"""Ahead-of-time compilation of the kernels for one chip of TPU v5e and v6e and for an H200.

  make aot        (python -m experiments.aot --config=configs/kernels/aot.py --workdir=runs/aot in an environment with the compilers)

2 CPU cores, no accelerator; the table is kernels/aot.json.
"""

import pathlib

import ml_collections

H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.table = "kernels/aot.json"
  c.targets = ml_collections.ConfigDict({"v5e": ("tpu", "v5e:1x1"), "v6e": ("tpu", "v6e:1x1"), "h200": ("gpu", H200)})
  c.cases = 2  # of every operation; 0: all
  c.processes = 2
  if variant == "smoke":
    c.targets = ml_collections.ConfigDict({"v5e": ("tpu", "v5e:1x1")})
  return c
