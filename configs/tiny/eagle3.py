"""Eagle3 for the embedded target: one layer, five taps, seven steps of training-time test.

  python -m experiments.train_drafter --config=configs/tiny/eagle3.py --workdir=runs/tiny_eagle3

One CPU core, 15 minutes. Data, steps and anchors are those of configs/tiny/dspark.py; the rate is higher, as 400 steps of both rates
chose it. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name, c.soft = "eagle3", True
  c.drafter = ml_collections.ConfigDict(dict(
      kind="eagle3", taps=(0, 1, 3, 4, 6), steps=7, own_embedding=False))
  if variant == "full":
    c.learning_rate = 3e-3
  return c
