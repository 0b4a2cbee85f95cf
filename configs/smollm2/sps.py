"""Cost tables of SmolLM2-135M-Instruct alone, float32.

  make smollm2 && .venv/bin/python -m experiments.profile_sps --config=configs/smollm2/sps.py --workdir=runs/smollm2_sps

2 CPU cores, half an hour. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import sps


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = sps.get_config(variant)
  c.target, c.drafter = "smollm2", ""
  c.slots = (1, 2, 4, 8, 16, 32) if variant == "full" else (1,)
  return c
