"""What heads, path selector and convolution cost beside Qwen3-4B, drafters of the published form (DSpark Figure 4, right; DFlash 2).

  python -m experiments.bench_drafters --config=configs/qwen3_4b/overhead.py --workdir=runs/qwen3_4b_overhead

One accelerator of 80 GB or more; minutes. Weights: Qwen/Qwen3-4B as configs/published.py says; the drafters' are random. The papers: 0.2 to
1.3 % of a round for a sequential head, about 1.3 % for selector and convolution together. Ours: not measured.
"""

import ml_collections

from configs.tiny import overhead


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = overhead.get_config(variant)
  if variant == "full":
    c.target, c.dtype, c.mask_token = "Qwen/Qwen3-4B", "bfloat16", "<|endoftext|>"
    c.backbone.update(layers=5, taps=(1, 9, 17, 25, 33))
    for form in c.forms.values():
      if "rank" in form:
        form.rank = 256
    c.slots, c.context, c.max_length = (1, 32), 1000, 1536
  return c
