"""Qwen3-4B with the published drafters on nine evaluation sets (DSpark Table 1 and Figure 2).

  python -m experiments.compare_drafters --config=configs/qwen3_4b/compare.py --workdir=runs/qwen3_4b_compare

One accelerator of 80 GB or more; hours. Weights: Qwen/Qwen3-4B and deepseek-ai/{eagle3_qwen3_4b_ttt7, dflash_qwen3_4b_block7,
dspark_qwen3_4b_block7}; folders and prompts as configs/published.py says. The paper's accepted lengths, GSM8K, MATH, AIME25, MBPP,
HumanEval, LiveCodeBench, MT-Bench, Alpaca, Arena-Hard; ours: not measured.

  Eagle3 5.14 4.62 3.92 3.69 4.16 3.77 2.39 2.26 2.55
  DFlash 5.40 4.85 4.15 4.40 4.74 4.18 3.07 2.96 2.83
  DSpark 6.11 5.70 4.89 5.13 5.38 4.86 3.64 3.54 3.29
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.compare("Qwen/Qwen3-4B", "qwen3_4b", variant)
