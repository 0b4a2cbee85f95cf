"""Qwen3.8-27B with the published DFlash 2 drafter (second seed: 2.7 to 3.4 times the autoregressive speed at concurrency 1).

  python -m experiments.compare_drafters --config=configs/qwen3_8_27b/compare.py --workdir=runs/qwen3_8_27b_compare

One accelerator of 80 GB or more; hours. Weights: Qwen3.8-27B, whose layers are three quarters gated delta nets, and
z-lab/Qwen3.8-27B-DFlash2; folders and prompts as configs/published.py says. Ours: not measured.
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = published.compare("Qwen3.8-27B", "", variant)
  if variant == "full":
    c.drafters, c.baselines = ml_collections.ConfigDict(dict(dflash2=("z-lab/Qwen3.8-27B-DFlash2",))), ("dflash2",)
    c.temperatures = (0.0, 1.0)
  return c
