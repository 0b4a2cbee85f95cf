"""DSpark for the embedded hybrid.

  python -m experiments.train_drafter --config=configs/tiny_hybrid/dspark.py --workdir=runs/tiny_hybrid_dspark

One CPU core, 7 minutes. Fewer prompts and steps than configs/tiny/dspark.py: these weights are
there so that recurrent targets are exercised.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = dspark.get_config(variant)
  c.target = "tiny_hybrid"
  c.drafter.update(taps=(0, 1, 2), rank=32)
  if variant == "full":
    c.documents, c.steps, c.anchors, c.save_every, c.evaluation_prompts = 250, 600, 32, 300, 2
  return c
