"""The feature cache of the published DSpark recipe for Qwen3-4B: five taps and the last hidden state (38 TB published).

  python -m experiments.plan_cache --config=configs/qwen3_4b/cache.py --workdir=runs/qwen3_4b_cache

Seconds; nothing is written.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  del variant  # Arithmetic only.
  c = ml_collections.ConfigDict()
  c.target = "Qwen3-4B"
  c.width = 2560
  c.taps = 5
  c.target_parameters = 4.0e9
  c.samples = 1.3e6  # training conversations, regenerated
  c.tokens_a_sample = 950.0  # an assumption: no published source gives it; with it the published 38 TB come out
  c.tokens = c.samples * c.tokens_a_sample
  c.epochs = 10
  c.accelerators = 8
  c.flops = 989e12  # of one, dense bfloat16 (H100, H200 data sheets)
  c.utilisation = 0.4  # an assumption
  c.disk_bytes_per_s = 2e9  # an assumption: one shared file system
  return c
