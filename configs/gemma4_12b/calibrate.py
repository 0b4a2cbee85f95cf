"""Calibration of the published DSpark drafter of Gemma 4 12B (DSpark Figures 5 and 6).

  python -m experiments.calibrate --config=configs/gemma4_12b/calibrate.py --workdir=runs/gemma4_12b_calibrate

One accelerator of 80 GB or more; an hour. Weights: gemma-4-12b and deepseek-ai/dspark_gemma4_12b_block7; folders and prompts as
configs/published.py says. The paper: ECE 3 to 8 % before, about 1 % after, AUC 0.81 to 0.90; acceptance 45.7 to 95.7 % over the
thresholds on chat. Ours: not measured.
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.calibrate("gemma-4-12b", "gemma4_12b", variant)
