"""What the engine adds to its parts, for the embedded target with DSpark's drafter.

  python -m experiments.bench_engine --config=configs/tiny/engine.py --workdir=runs/tiny_engine

2 CPU cores, five minutes. Figures: docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target, c.drafter = "tiny", "tiny/dspark"
  c.slots = (1, 4, 16)
  c.context = 64
  c.max_length = 384
  c.need = "greedy"
  c.rounds = 25  # of full slots, timed
  c.repeats = 7  # of the parts alone, in every turn
  c.turns = 7
  if variant == "smoke":
    c.slots, c.rounds, c.repeats, c.turns = (2,), 3, 2, 1
  return c
