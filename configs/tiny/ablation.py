"""One part of DFlash 2 at a time on the block backbone of configs/tiny/dflash.py: the trainings of its ablation at tiny scale;
configs/tiny/ablation_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/ablation.py:conv --workdir=runs/tiny_conv
  python -m experiments.train_drafter --config=configs/tiny/ablation.py:selector --workdir=runs/tiny_selector

One CPU core, 20 minutes each. Data, steps and optimizer are those of configs/tiny/dspark.py; the backbone alone is tiny/dflash, both
parts are tiny/dflash2. Ours: not measured.
"""

import ml_collections

from configs.tiny import dflash2

PARTS = {"conv": {"head": "none", "rank": 0, "candidates": 0}, "selector": {"conv": 0}}


def get_config(variant: str = "conv") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  name = "conv" if smoke else variant
  c = dflash2.get_config("smoke" if smoke else "full")
  c.name = name
  c.drafter.update(PARTS[name])
  if name == "conv":
    c.loss.selector = 0.0
  return c
