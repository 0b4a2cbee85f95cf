"""The best hybrid for the embedded target: DFlash 2's convolution and selector, DSpark's loss and confidence head, cross-entropies on the
target's distribution as Eagle3 has them, and a fourth tap on the target's last layer.

  python -m experiments.train_drafter --config=configs/tiny/hybrid.py --workdir=runs/tiny_hybrid

One CPU core, 20 minutes. Data, steps and optimizer are those of configs/tiny/dspark.py. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name, c.soft = "hybrid", True
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, block=7, taps=(1, 4, 6, 7), own_embedding=False, conv=2, conv_group=16, head="selector", rank=64,
      candidates=16, confidence=True, confidence_with_head=True))
  c.loss.update(ce=0.5, tv=0.9, selector=0.5)
  return c
