"""SmolLM2-135M-Instruct here and in Hugging Face transformers, float32, one request at once.

  make smollm2 &&
    .venv/bin/python -m experiments.bench_transformers --config=configs/smollm2/transformers.py --workdir=runs/smollm2_transformers

2 CPU cores, 20 minutes; pip install -e '.[transformers]' first. Goals: 2.2 times transformers for the target alone, 4 times its prompt
lookup with a drafter. Ours: docs/results.md.
"""

import ml_collections

from configs import smollm2


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target, c.system = "smollm2", smollm2.SYSTEM
  c.drafters = ()  # folders, such as runs/smollm2_hybrid/hybrid
  c.prompts = ml_collections.ConfigDict(dict(maths="smollm2", code="smollm2", chat="smollm2"))
  c.prompts_per_dataset, c.max_new_tokens, c.repeats = 6, 96, 2
  c.lookup = 10  # tokens that prompt lookup drafts
  if variant == "smoke":
    c.prompts_per_dataset, c.max_new_tokens, c.repeats = 1, 8, 1
  return c
