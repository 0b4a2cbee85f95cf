"""DFlash 2 for the embedded target: two-tap dynamic convolution and a path selector over 16 candidates.

  python -m experiments.train_drafter --config=configs/tiny/dflash2.py --workdir=runs/tiny_dflash2

One CPU core, 20 minutes. Data, steps and optimizer are those of configs/tiny/dspark.py. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name = "dflash2"
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, block=8, taps=(1, 4, 6), anchor_predicts=False, own_embedding=False, conv=2, conv_group=16,
      head="selector", rank=64, candidates=16))
  c.loss.update(ce=1.0, tv=0.0, selector=1.0)
  c.anchor_rule = "whole_block"
  return c
