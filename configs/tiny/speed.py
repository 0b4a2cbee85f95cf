"""Speed of the embedded target alone, on this machine.

  python -m experiments.bench_decode --config=configs/tiny/speed.py --workdir=runs/tiny_speed

2 CPU cores, two minutes. Figures: README.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.variants = ml_collections.ConfigDict({
      "unrolled": {"stacked": False, "transposed": False}, "unrolled, transposed": {"stacked": False, "transposed": True},
      "scanned": {"stacked": True, "transposed": False}, "scanned, transposed": {"stacked": True, "transposed": True}})
  c.decode_variant = "scanned, transposed"
  c.batches = (1, 16)
  c.verify_batches = (1,)
  c.counts = (1, 2, 4, 8, 16)
  c.context = 200
  c.new_tokens = 128
  c.repeats = 5
  if variant == "smoke":
    c.batches, c.counts, c.new_tokens, c.repeats = (1,), (1, 2), 4, 1
    c.variants = ml_collections.ConfigDict({c.decode_variant: dict(c.variants[c.decode_variant])})
  return c
