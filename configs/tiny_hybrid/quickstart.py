"""The embedded hybrid, three layers in four of it recurrent, alone and with its drafters; or on the prompts of all three domains.

  python -m experiments.quickstart --config=configs/tiny_hybrid/quickstart.py --workdir=runs/tiny_hybrid_quickstart   (in make quickstart)
  python -m experiments.quickstart --config=configs/tiny_hybrid/quickstart.py:domains --workdir=runs/tiny_hybrid_domains

2 CPU cores, half a minute; two and a half for all domains. Tables and plots: runs/tiny_hybrid_quickstart/report.md.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = quickstart.get_config(variant)
  if variant == "full":
    c.prompts = ml_collections.ConfigDict(dict(maths="tiny"))
  c.target = "tiny_hybrid"
  c.drafters = ("tiny_hybrid/dspark",) if variant == "smoke" else ("tiny_hybrid/dspark", "tiny_hybrid/dflash2")
  return c
