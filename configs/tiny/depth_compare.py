"""Accepted length against the number of draft layers (DSpark Figure 3), for the trainings of configs/tiny/depth.py.

  python -m experiments.compare_drafters --config=configs/tiny/depth_compare.py --workdir=runs/tiny_depth

2 CPU cores, half an hour. The paper: a DSpark of 2 layers beats a DFlash of 5. Ours: not measured.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    trained = {f"{method}_{n}": (f"runs/tiny_depth_{method}_{n}/{method}_{n}",) for method in ("dflash", "dspark") for n in (1, 3, 5)}
    c.drafters = ml_collections.ConfigDict({**trained, "dflash_2": ("tiny/dflash",), "dspark_2": ("tiny/dspark",)})
    c.baselines, c.temperatures, c.rules = ("dflash_5",), (1.0,), ("token",)
  return c
