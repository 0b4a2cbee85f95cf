"""Accepted length against the number of drafts a round, Markov against RNN head (DSpark Figure 4, left), for the trainings of
configs/tiny/length.py.

  python -m experiments.compare_drafters --config=configs/tiny/length_compare.py --workdir=runs/tiny_length

2 CPU cores, half an hour. Ours: not measured. What the heads cost is in configs/tiny/overhead.py.
"""

import ml_collections

from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    c.drafters = ml_collections.ConfigDict({
        f"{head}_{n}": (f"runs/tiny_length_{head}_{n}/{head}_{n}",) for head in ("markov", "rnn") for n in (4, 8, 12, 16)})
    c.baselines, c.temperatures, c.rules = ("markov_8",), (1.0,), ("token",)
  return c
