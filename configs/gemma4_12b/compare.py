"""Gemma 4 12B with the published drafters on nine evaluation sets (DSpark Table 1 and Figure 2).

  python -m experiments.compare_drafters --config=configs/gemma4_12b/compare.py --workdir=runs/gemma4_12b_compare

One accelerator of 80 GB or more; hours. Weights: gemma-4-12b and deepseek-ai/{eagle3_gemma4_12b_ttt7, dflash_gemma4_12b_block7,
dspark_gemma4_12b_block7}; folders and prompts as configs/published.py says. The paper's accepted lengths, GSM8K, MATH, AIME25, MBPP,
HumanEval, LiveCodeBench, MT-Bench, Alpaca, Arena-Hard; ours: not measured.

  Eagle3 5.87 5.46 4.83 4.72 5.37 4.16 3.19 3.06 2.72
  DFlash 5.45 5.04 4.22 4.39 4.95 3.70 2.98 2.84 2.59
  DSpark 6.05 5.78 5.12 5.11 5.64 4.51 3.49 3.35 2.92
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.compare("gemma-4-12b", "gemma4_12b", variant)
