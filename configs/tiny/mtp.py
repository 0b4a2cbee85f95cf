"""MTP-1 for the embedded target: one extra layer on the last hidden state, one draft a round.

  python -m experiments.train_drafter --config=configs/tiny/mtp.py --workdir=runs/tiny_mtp

One CPU core, 20 minutes. Data, steps and optimizer are those of configs/tiny/dspark.py; every column counts. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name, c.soft = "mtp", True
  c.drafter = ml_collections.ConfigDict(dict(
      kind="mtp", taps=(7,), steps=1, own_embedding=False))
  c.anchors = 0
  return c
