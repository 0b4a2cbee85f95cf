"""SmolLM2-135M-Instruct, real weights, autoregressive: tokens a second and real prompts.

  make smollm2 && .venv/bin/python -m experiments.quickstart --config=configs/smollm2/quickstart.py --workdir=runs/smollm2

2 CPU cores, a few minutes. Other prompts: --config.prompts.maths=PATH of a {"turns": […]} JSONL.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = quickstart.get_config(variant)
  c.target = "smollm2"
  c.drafters = ()
  c.prompts.update(maths="smollm2", code="smollm2", chat="smollm2")
  c.system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
  c.prompts_per_dataset, c.batch, c.max_new_tokens, c.repeats = 4, 4, 48, 1
  if variant == "smoke":
    c.prompts_per_dataset, c.max_new_tokens, c.temperatures = 1, 4, (0.0,)
  return c
