"""Every method trained on one loss, cross-entropy on the true token, with as many anchors, steps and tokens.

  python -m experiments.compare_drafters --config=configs/tiny/common_loss_compare.py --workdir=runs/tiny_common_loss

2 CPU cores, fifteen minutes. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    c.drafters = ml_collections.ConfigDict(dict(
        mtp=("runs/tiny_common_mtp/mtp",), eagle3=("runs/tiny_common_eagle3/eagle3",), dflash=("tiny/dflash",),
        dspark=("runs/tiny_markov/markov",), dflash2=("tiny/dflash2",), hybrid=("runs/tiny_common_hybrid/hybrid",)))
    c.rules = ("token",)
  return c
