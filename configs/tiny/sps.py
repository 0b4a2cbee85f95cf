"""Cost tables of the embedded target with DSpark's drafter.

  python -m experiments.profile_sps --config=configs/tiny/sps.py --workdir=runs/tiny_sps
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.drafter = "tiny/dspark"
  c.concurrencies = (1, 2, 4, 8, 16, 32, 64)
  c.draft_lengths = tuple(range(8))
  c.context = 200
  c.max_new_tokens = 64
  c.temperature = 1.0
  c.repeats = 20
  if variant == "smoke":
    c.concurrencies, c.draft_lengths, c.context, c.repeats = (2,), (0, 3), 16, 2
  return c
