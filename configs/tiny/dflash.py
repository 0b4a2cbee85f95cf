"""DFlash for the embedded target: block backbone alone, slot 0 silent, cross-entropy.

  python -m experiments.train_drafter --config=configs/tiny/dflash.py --workdir=runs/tiny_dflash

One CPU core, 20 minutes. Data, steps and optimizer are those of configs/tiny/dspark.py. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name = "dflash"
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, block=8, taps=(1, 4, 6), anchor_predicts=False, own_embedding=False))
  c.loss.update(ce=1.0, tv=0.0)
  c.anchor_rule = "whole_block"
  return c
