"""Every method trained for the same core-time, 17 core-minutes, on its published loss.

  python -m experiments.compare_drafters --config=configs/tiny/core_time_compare.py --workdir=runs/tiny_core_time

2 CPU cores, fifteen minutes. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    longer = {name: (f"runs/tiny_core_time_{name}/{name}",) for name in ("mtp", "eagle3", "dflash")}
    c.drafters = ml_collections.ConfigDict({**longer, **{name: (f"tiny/{name}",) for name in ("dspark", "dflash2", "hybrid")}})
    c.rules = ("token",)
  return c
