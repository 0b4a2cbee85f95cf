"""Advice for the embedded target on this machine, or for a target of 4 billion parameters on an accelerator.

  python -m experiments.advise --config=configs/tiny/advise.py --workdir=runs/tiny_advise
  python -m experiments.advise --config=configs/tiny/advise.py:h200 --workdir=runs/h200_advise
  python -m experiments.advise --config=configs/tiny/advise.py:v5e --workdir=runs/v5e_advise
  python -m experiments.advise --config=configs/tiny/advise.py:v6e --workdir=runs/v6e_advise

2 CPU cores, ten minutes each. Figures: docs/results.md.

The roofline's constants: 4.02e9 parameters in bfloat16 and 36 layers of 8 key/value heads of 128 (the published Qwen3-4B); peak dense
bfloat16 operations and memory bandwidth as the vendors' data sheets have them. Its acceptance is the embedded target's.
"""

import ml_collections

from configs.tiny import calibrate

ACCELERATORS = {"h200": (989e12, 4.8e12), "v5e": (197e12, 0.819e12), "v6e": (918e12, 1.64e12)}  # operations/s, bytes/s


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = calibrate.get_config(variant if variant == "smoke" else "full")
  del c.drafters, c.thresholds, c.store
  c.drafter, c.serial = "tiny/dspark", "tiny/mtp"
  c.draft_lengths = (1, 2, 3, 4, 5, 6, 7)
  c.concurrencies = (1, 4, 16, 64)
  c.rows_per_slot = (1.5, 2, 3, 4, 5, 6)  # buckets of a verify call, between one row a slot and all
  c.context = 200
  c.repeats = 15
  c.steps = 256
  if variant in ACCELERATORS:
    flops, bandwidth = ACCELERATORS[variant]
    c.concurrencies = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    c.context = 2000
    c.roofline = ml_collections.ConfigDict(dict(
        parameters=4.02e9, bytes_per_parameter=2, flops=flops, bandwidth=bandwidth, kv_bytes_per_token=2 * 36 * 8 * 128 * 2, overhead=1e-4,
        drafter_bytes=dict(dspark=2 * 1.0e9, mtp=2 * 0.5e9)))  # read once a round; heads of 151,936 ids are most of it
  elif variant == "smoke":
    c.concurrencies, c.draft_lengths, c.rows_per_slot, c.context, c.repeats, c.steps = (2,), (2, 7), (), 16, 2, 8
  return c
