"""One part of DFlash 2 at a time on the block backbone of configs/tiny/dflash.py: its ablation at tiny scale.

  python -m experiments.train_drafter --config=configs/tiny/ablation.py:conv --workdir=runs/tiny_conv
  python -m experiments.train_drafter --config=configs/tiny/ablation.py:selector --workdir=runs/tiny_selector

Data, steps and optimizer are those of configs/tiny/dspark.py; the backbone alone is tiny/dflash, both parts are tiny/dflash2.
"""

import ml_collections

from configs.tiny import dflash2

PARTS = {"conv": {"head": "none", "rank": 0, "candidates": 0}, "selector": {"conv": 0}}


def get_config(variant: str = "conv") -> ml_collections.ConfigDict:
  name, _, smoke = variant.partition("_")
  c = dflash2.get_config(smoke or "full")
  c.name = name
  c.drafter.update(PARTS[name])
  if name == "conv":
    c.loss.selector = 0.0
  return c
