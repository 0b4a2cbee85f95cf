"""Qwen3-4B under load with the published DSpark drafter (DSpark Figures 7 and 8).

  python -m experiments.serve_load --config=configs/qwen3_4b/serve.py --workdir=runs/qwen3_4b_serve

One accelerator of 80 GB or more; an hour. Weights: Qwen/Qwen3-4B and deepseek-ai/{eagle3_qwen3_4b_ttt7, dspark_qwen3_4b_block7}; folders
and prompts as configs/published.py says. The paper, on its own models: 57 to 85 % faster per user than MTP-1 at the same throughput.
Ours: not measured.
"""

import ml_collections

from configs import published


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return published.serve("Qwen/Qwen3-4B", "qwen3_4b", variant)
