"""Training throughput of the embedded target's drafters, by part of the step.

  python -m experiments.bench_training --config=configs/tiny/training_speed.py --workdir=runs/tiny_training_speed

2 CPU cores, three minutes. Figures: docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.recipes = ("tiny/mtp", "tiny/eagle3", "tiny/dflash", "tiny/dspark", "tiny/dflash2", "tiny/hybrid")
  c.batch = 0  # rows a step; 0: as each recipe says
  c.repeats = 5
  if variant == "smoke":
    c.recipes, c.batch, c.repeats = ("tiny/dflash",), 1, 1
  return c
