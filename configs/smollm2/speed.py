"""Speed of SmolLM2-135M-Instruct alone, float32, on this machine.

  make smollm2 && .venv/bin/python -m experiments.bench_decode --config=configs/smollm2/speed.py --workdir=runs/smollm2_speed

2 CPU cores, five minutes. Figures: README.
"""

import ml_collections

from configs.tiny import speed


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = speed.get_config(variant)
  c.target = "smollm2"
  c.decode_variant = "unrolled, transposed"
  c.new_tokens = 64 if variant == "full" else 4
  return c
