"""Calibration of every shipped drafter of the embedded target: half of the shipped prompts to fit on, half to report on.

  python -m experiments.calibrate --config=configs/tiny/calibrate.py --workdir=runs/tiny_calibrate

2 CPU cores, half an hour. DSpark Figures 5 and 6: ECE 3 to 8 % before and about 1 % after, AUC 0.81 to 0.90; acceptance 45.7 to 95.7 %
over the thresholds on chat. Ours: docs/results.md.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = quickstart.get_config()
  del c.temperatures, c.rule, c.repeats
  c.drafters = tuple(name for name in c.drafters if name != "tiny/mtp")  # One draft a round needs no schedule by position.
  c.prompts_per_dataset = 120
  c.samples = 4  # answers to each: with a quarter of the blocks chance alone makes an ECE of 1.5 %
  c.batch = 20
  c.temperature = 1.0
  c.max_new_tokens = 96
  c.thresholds = tuple(i / 20 for i in range(20))
  c.store = False  # True: write the temperatures beside each drafter's weights
  if variant == "smoke":
    c.drafters, c.prompts_per_dataset, c.samples, c.batch, c.max_new_tokens = ("tiny/dspark",), 4, 1, 2, 16
  return c
