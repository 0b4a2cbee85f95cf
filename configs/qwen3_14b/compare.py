"""Qwen3-14B with the published drafters on nine evaluation sets (DSpark Table 1 and Figure 2).

  python -m experiments.compare_drafters --config=configs/qwen3_14b/compare.py --workdir=runs/qwen3_14b_compare

One accelerator of 80 GB or more; hours. Weights: Qwen/Qwen3-14B and deepseek-ai/{eagle3_qwen3_14b_ttt7, dflash_qwen3_14b_block7,
dspark_qwen3_14b_block7}; folders and prompts as configs/published.py says. The paper's accepted lengths, GSM8K, MATH, AIME25, MBPP,
HumanEval, LiveCodeBench, MT-Bench, Alpaca, Arena-Hard; ours: not measured.

  Eagle3 5.24 4.60 3.71 3.81 4.14 4.01 2.62 2.47 2.48
  DFlash 5.41 4.84 3.98 4.44 4.59 4.33 3.10 2.94 2.72
  DSpark 6.21 5.74 4.94 5.26 5.43 5.02 3.70 3.58 3.13
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.compare("Qwen/Qwen3-14B", "qwen3_14b", variant)
