"""DFlash 2 for the embedded hybrid, in the form of the published pair: sliding attention in every layer of the drafter.

  python -m experiments.train_drafter --config=configs/tiny_hybrid/dflash2.py --workdir=runs/tiny_hybrid_dflash2

One CPU core, 7 minutes. Data, steps and optimizer are those of configs/tiny_hybrid/dspark.py.
"""

import ml_collections

from configs.tiny_hybrid import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name = "dflash2"
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, window=128, block=8, taps=(0, 1, 2), anchor_predicts=False, own_embedding=False, conv=2, conv_group=16,
      head="selector", rank=32, candidates=16))
  c.loss.update(ce=1.0, tv=0.0, selector=1.0)
  c.anchor_rule = "whole_block"
  return c
