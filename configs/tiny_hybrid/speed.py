"""Speed of the embedded hybrid alone: a verify call, with the rewinding of its recurrent states, against its number of tokens.

  python -m experiments.bench_decode --config=configs/tiny_hybrid/speed.py --workdir=runs/tiny_hybrid_speed

2 CPU cores, forty seconds. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import speed


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = speed.get_config(variant)
  c.target = "tiny_hybrid"
  c.decode_variant = "unrolled, transposed"  # Layers of two forms cannot be scanned.
  c.variants = ml_collections.ConfigDict({c.decode_variant: {"stacked": False, "transposed": True}})
  if variant != "smoke":
    c.batches, c.verify_batches, c.repeats = (1, 4), (1, 4), 40
  return c
