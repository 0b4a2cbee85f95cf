"""Cost tables of the embedded target with DSpark's drafter.

  python -m experiments.profile_sps --config=configs/tiny/sps.py --workdir=runs/tiny_sps

2 CPU cores, five minutes, most of them compilation. Figures: docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.drafter = "tiny/dspark"  # "" for the target alone
  c.slots = (1, 4, 16, 64)
  c.rows_per_slot = (1.5, 2, 3, 4, 5, 6)  # buckets of a verify call, between one row a slot and all
  c.context = 200
  c.need = "plain"  # sampling code: see specdec_jax.engine.NEEDS
  c.repeats = 20
  if variant == "smoke":
    c.slots, c.rows_per_slot, c.context, c.repeats = (2,), (2,), 16, 2
  return c
