"""Qwen3-8B with the published drafters on nine evaluation sets (DSpark Table 1 and Figure 2).

  python -m experiments.compare_drafters --config=configs/qwen3_8b/compare.py --workdir=runs/qwen3_8b_compare

One accelerator of 80 GB or more; hours. Weights: Qwen/Qwen3-8B and deepseek-ai/{eagle3_qwen3_8b_ttt7, dflash_qwen3_8b_block7,
dspark_qwen3_8b_block7}; folders and prompts as configs/published.py says. The paper's accepted lengths, GSM8K, MATH, AIME25, MBPP,
HumanEval, LiveCodeBench, MT-Bench, Alpaca, Arena-Hard; ours: not measured.

  Eagle3 5.30 4.77 3.91 3.96 4.33 4.17 2.66 2.54 2.54
  DFlash 5.33 4.91 4.07 4.36 4.64 4.39 3.11 2.98 2.81
  DSpark 6.17 5.78 5.01 5.16 5.52 5.17 3.72 3.58 3.21
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.compare("Qwen/Qwen3-8B", "qwen3_8b", variant)
