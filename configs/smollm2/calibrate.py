"""Calibration of SmolLM2-135M-Instruct's DSpark drafter (DSpark Figures 5 and 6).

  make smollm2 && .venv/bin/python -m experiments.calibrate --config=configs/smollm2/calibrate.py --workdir=runs/smollm2_calibrate

2 CPU cores, an hour. Drafter and prompts as in configs/smollm2/compare.py. The paper: ECE 3 to 8 % before, about 1 % after, AUC 0.81 to
0.90; acceptance 45.7 to 95.7 % over the thresholds on chat. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import calibrate


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = calibrate.get_config(variant)
  if variant == "full":
    c.target, c.system = "smollm2", smollm2.SYSTEM
    c.drafters = (smollm2.folder("dspark"),)
    c.prompts = ml_collections.ConfigDict({k: v for k, v in smollm2.prompts().items() if k in ("gsm8k", "mbpp", "mt-bench")})
    c.prompts_per_dataset, c.samples = 60, 2
  return c
