"""The losslessness contracts for SmolLM2-135M-Instruct and its drafters.

  make smollm2 && .venv/bin/python -m experiments.check_lossless --config=configs/smollm2/lossless.py --workdir=runs/smollm2_lossless

2 CPU cores, an hour. Drafters and prompts as in configs/smollm2/compare.py. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import lossless


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = lossless.get_config(variant)
  if variant == "full":
    c.target, c.system = "smollm2", smollm2.SYSTEM
    c.drafters = tuple(map(smollm2.folder, smollm2.METHODS))
    c.prompts = ml_collections.ConfigDict({k: v for k, v in smollm2.prompts().items() if k in ("gsm8k", "mbpp", "mt-bench")})
    c.longest_prompt, c.batches, c.draft_lengths, c.temperatures, c.top_ps = 160, (1,), (7,), (0.0, 1.0), (1.0,)
  return c
