"""A hybrid for the embedded target: dynamic convolution, RNN head, confidence head, the three-term loss.

  python -m experiments.train_drafter --config=configs/tiny/hybrid.py --workdir=runs/tiny_hybrid

Data, steps and optimizer are those of configs/tiny/dspark.py. Accepted lengths: README.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.name = "hybrid"
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, block=7, taps=(1, 4, 6), own_embedding=False, conv=2, conv_group=16, head="rnn", rank=64,
      confidence=True, confidence_with_head=True))
  return c
