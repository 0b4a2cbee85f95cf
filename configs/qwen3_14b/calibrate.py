"""Calibration of the published DSpark drafter of Qwen3-14B (DSpark Figures 5 and 6).

  python -m experiments.calibrate --config=configs/qwen3_14b/calibrate.py --workdir=runs/qwen3_14b_calibrate

One accelerator of 80 GB or more; an hour. Weights: Qwen/Qwen3-14B and deepseek-ai/dspark_qwen3_14b_block7; folders and prompts as
configs/published.py says. The paper: ECE 3 to 8 % before, about 1 % after, AUC 0.81 to 0.90; acceptance 45.7 to 95.7 % over the
thresholds on chat. Ours: not measured.
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.calibrate("Qwen/Qwen3-14B", "qwen3_14b", variant)
