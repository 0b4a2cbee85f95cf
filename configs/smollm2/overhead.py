"""What heads, path selector and convolution cost beside SmolLM2-135M-Instruct, drafters of two layers (DSpark Figure 4, right).

  make smollm2 && .venv/bin/python -m experiments.bench_drafters --config=configs/smollm2/overhead.py --workdir=runs/smollm2_overhead

2 CPU cores, half an hour. The papers, on a GPU: 0.2 to 1.3 % of a round for a sequential head, about 1.3 % for selector and convolution
together. Ours: not measured.
"""

import ml_collections

from configs.tiny import overhead


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = overhead.get_config(variant)
  if variant == "full":
    c.target, c.mask_token, c.slots = "smollm2", "<|endoftext|>", (1, 8)
    c.backbone.taps = (1, 15, 28)
  return c
