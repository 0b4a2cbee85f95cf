"""Cost tables of Qwen3-4B with DSpark's published drafter, random weights in bfloat16: time does not depend on them.

  python -m experiments.profile_sps --config=configs/qwen3_4b/sps.py --workdir=runs/qwen3_4b_sps
  python -m experiments.profile_sps --config=configs/qwen3_4b/sps.py:wide --workdir=runs/wide_sps  (5 draft layers of width 5120, DFlash 2)

One GPU or TPU of 24 GB or more; two minutes, most of them compilation. Not measured.
"""

import ml_collections

from configs.tiny import sps


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = sps.get_config()
  del c.target, c.drafter
  c.random = ml_collections.ConfigDict(dict(target="qwen3-4b", drafter="dspark", dtype="bfloat16", layers=0))
  c.slots, c.rows_per_slot, c.context, c.need, c.repeats = (1, 16, 64), (2, 4), 512, "greedy", 10
  if variant == "wide":
    c.random.update(target="qwen3-14b", drafter="dflash2", layers=6)
    c.slots = (1, 16)
  if variant == "smoke":
    c.random.update(target="smollm2-135m", drafter="", layers=1)
    c.slots, c.rows_per_slot, c.context, c.repeats = (1,), (), 16, 2
  return c
