"""One part at a time on the block backbone of configs/tiny/dflash.py: the trainings of DFlash 2's ablation at tiny scale, and DSpark's
Markov head under the same loss; configs/tiny/ablation_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/ablation.py:conv --workdir=runs/tiny_conv
  python -m experiments.train_drafter --config=configs/tiny/ablation.py:selector --workdir=runs/tiny_selector
  python -m experiments.train_drafter --config=configs/tiny/ablation.py:markov --workdir=runs/tiny_markov
  python -m experiments.train_drafter --config=configs/tiny/ablation.py:both_confidence --workdir=runs/tiny_both_confidence

One CPU core, 20 minutes each. Data, steps, optimizer and learning rate are those of configs/tiny/dspark.py, the loss is cross-entropy for
all; the backbone alone is tiny/dflash, conv and selector are tiny/dflash2. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import dflash2

PARTS = {
    "conv": {"head": "none", "rank": 0, "candidates": 0}, "selector": {"conv": 0}, "markov": {"conv": 0, "head": "markov", "candidates": 0},
    "both_confidence": {"confidence": True, "confidence_with_head": True}}


def get_config(variant: str = "conv") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  name = "conv" if smoke else variant
  c = dflash2.get_config("smoke" if smoke else "full")
  c.name = name
  c.drafter.update(PARTS[name])
  if c.drafter.head != "selector":
    c.loss.selector = 0.0
  return c
