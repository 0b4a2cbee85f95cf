"""Gemma 4 12B under load with the published DSpark drafter (DSpark Figures 7 and 8).

  python -m experiments.serve_load --config=configs/gemma4_12b/serve.py --workdir=runs/gemma4_12b_serve

One accelerator of 80 GB or more; an hour. Weights: gemma-4-12b and deepseek-ai/{eagle3_gemma4_12b_ttt7, dspark_gemma4_12b_block7};
folders and prompts as configs/published.py says. The paper, on its own models: 57 to 85 % faster per user than MTP-1 at the same
throughput. Ours: not measured.
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.serve("gemma-4-12b", "gemma4_12b", variant)
