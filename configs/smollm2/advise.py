"""Advice for SmolLM2-135M-Instruct on this machine.

  make smollm2 && .venv/bin/python -m experiments.advise --config=configs/smollm2/advise.py --workdir=runs/smollm2_advise

2 CPU cores, an hour. Drafters and prompts as in configs/smollm2/compare.py. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import advise


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = advise.get_config(variant)
  if variant == "full":
    c.target, c.system = "smollm2", smollm2.SYSTEM
    c.drafter, c.serial = smollm2.folder("dspark"), smollm2.folder("mtp")
    c.prompts = ml_collections.ConfigDict({k: v for k, v in smollm2.prompts().items() if k in ("gsm8k", "mbpp", "mt-bench")})
    c.prompts_per_dataset, c.samples, c.concurrencies = 30, 1, (1, 4, 16)
  return c
