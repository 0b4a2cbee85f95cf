"""SmolLM2-135M-Instruct under load: alone, MTP-1, fixed lengths and the asynchronous schedule (DSpark Figures 7 and 8).

  make smollm2 && .venv/bin/python -m experiments.serve_load --config=configs/smollm2/serve.py --workdir=runs/smollm2_serve

2 CPU cores, hours. Drafters and prompts as in configs/smollm2/compare.py. The paper: 60 to 85 % faster per user than MTP-1 at the same
throughput. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import serve


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = serve.get_config(variant)
  if variant == "full":
    c.target, c.system = "smollm2", smollm2.SYSTEM
    c.prompts = ml_collections.ConfigDict({k: v for k, v in smollm2.prompts().items() if k in ("gsm8k", "mbpp", "mt-bench")})
    for method in c.methods.values():
      if method.drafter:
        method.drafter = smollm2.folder(method.drafter.rpartition("/")[2])
    c.prompts_per_dataset, c.max_length, c.repeats, c.warm_up, c.open_loops = 30, 640, 3, 1, ()
  return c
