"""DFlash 2's ablation at tiny scale: backbone, with the convolution, with the path selector, with both.

  python -m experiments.compare_drafters --config=configs/tiny/ablation_compare.py --workdir=runs/tiny_ablation

2 CPU cores, fifteen minutes. DFlash 2 over DFlash in the paper, temperature 1, Qwen3.5-4B: GSM8K 6.20 / 4.99, MATH-500 6.76 / 5.42.
Ours: not measured.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    c.drafters = ml_collections.ConfigDict(dict(
        backbone=("tiny/dflash",), conv=("runs/tiny_conv/conv",), selector=("runs/tiny_selector/selector",), both=("tiny/dflash2",)))
    c.baselines, c.rules = ("backbone",), ("token",)
  return c
