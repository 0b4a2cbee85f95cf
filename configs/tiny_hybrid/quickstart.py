"""The embedded hybrid alone and with its drafters, on the shipped prompts of three domains.

  python -m experiments.quickstart --config=configs/tiny_hybrid/quickstart.py --workdir=runs/tiny_hybrid_quickstart

2 CPU cores, three minutes. Tables and plots: runs/tiny_hybrid_quickstart/report.md.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = quickstart.get_config(variant)
  c.target = "tiny_hybrid"
  c.drafters = ("tiny_hybrid/dspark",) if variant == "smoke" else ("tiny_hybrid/dspark", "tiny_hybrid/dflash2")
  return c
