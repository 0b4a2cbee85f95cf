"""DFlash 2's ablation at tiny scale: backbone, with the convolution, with the path selector, with both, with both and a confidence head;
beside them the backbone with DSpark's Markov head.

  python -m experiments.compare_drafters --config=configs/tiny/ablation_compare.py --workdir=runs/tiny_ablation

2 CPU cores, fifteen minutes. DFlash 2 over DFlash in the paper, temperature 1, Qwen3.5-4B: GSM8K 6.20 / 4.99, MATH-500 6.76 / 5.42.
Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    c.drafters = ml_collections.ConfigDict(dict(
        backbone=("tiny/dflash",), conv=("runs/tiny_conv/conv",), selector=("runs/tiny_selector/selector",), both=("tiny/dflash2",),
        markov=("runs/tiny_markov/markov",), both_confidence=("runs/tiny_both_confidence/both_confidence",)))
    c.baselines, c.rules = ("backbone",), ("token",)
  return c
