"""What the engine adds to its parts, for SmolLM2-135M-Instruct with a randomly initialised drafter of DSpark's published form.

  make smollm2 && .venv/bin/python -m experiments.bench_engine --config=configs/smollm2/engine.py --workdir=runs/smollm2_engine

2 CPU cores, ten minutes. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import engine


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = engine.get_config(variant)
  c.target, c.drafter = "smollm2", ""
  c.recipe = ml_collections.ConfigDict(dict(anchors=0, mask_token="<|endoftext|>", drafter=dict(
      kind="block", layers=5, block=7, taps=(1, 8, 15, 22, 28), own_embedding=False, head="markov", rank=256,
      confidence=True, confidence_with_head=True)))
  c.slots, c.rounds, c.repeats, c.turns = ((1, 4), 20, 3, 3) if variant == "full" else ((1,), 2, 2, 1)
  return c
