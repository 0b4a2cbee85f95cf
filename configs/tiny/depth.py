"""Drafters of 1 to 5 layers for the embedded target (DSpark Figure 3): the trainings; configs/tiny/depth_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/depth.py:dspark_1 --workdir=runs/tiny_depth_dspark_1
  python -m experiments.train_drafter --config=configs/tiny/depth.py:dspark_3 --workdir=runs/tiny_depth_dspark_3
  python -m experiments.train_drafter --config=configs/tiny/depth.py:dspark_5 --workdir=runs/tiny_depth_dspark_5
  python -m experiments.train_drafter --config=configs/tiny/depth.py:dflash_1 --workdir=runs/tiny_depth_dflash_1
  python -m experiments.train_drafter --config=configs/tiny/depth.py:dflash_3 --workdir=runs/tiny_depth_dflash_3
  python -m experiments.train_drafter --config=configs/tiny/depth.py:dflash_5 --workdir=runs/tiny_depth_dflash_5

One CPU core, 10 to 40 minutes each; two layers are what ships. Share the responses: --config.responses=FILE. Steps, data and optimizer
are those of configs/tiny/dspark.py. The paper: a DSpark of 2 layers beats a DFlash of 5. Ours: not measured.
"""

import importlib

import ml_collections


def get_config(variant: str = "dspark_1") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  method, _, layers = "dspark_1".partition("_") if smoke else variant.partition("_")
  c = importlib.import_module(f"configs.tiny.{method}").get_config("smoke" if smoke else "full")
  c.name = f"{method}_{layers}"
  c.drafter.layers = int(layers)
  return c
