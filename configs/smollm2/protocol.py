"""The whole evaluation of a serving set-up, for SmolLM2-135M-Instruct with its DSpark drafter.

  make smollm2 && .venv/bin/python -m experiments.protocol --config=configs/smollm2/protocol.py --workdir=runs/smollm2_protocol

2 CPU cores, hours. Drafter: runs/smollm2_dspark/dspark. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import protocol


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = protocol.get_config(variant)
  if variant == "full":
    c.target, c.drafter = "smollm2", smollm2.folder("dspark")
    c.prompts_per_task, c.concurrencies, c.repeats = 4, (1, 8), 1
  return c
