"""Methods whose 2400 steps take less core-time than the hybrid's, trained for as long as that takes: 17 core-minutes of the machine that
all of them were timed on; configs/tiny/core_time_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/core_time.py:mtp --workdir=runs/tiny_core_time_mtp
  python -m experiments.train_drafter --config=configs/tiny/core_time.py:eagle3 --workdir=runs/tiny_core_time_eagle3
  python -m experiments.train_drafter --config=configs/tiny/core_time.py:dflash --workdir=runs/tiny_core_time_dflash

One CPU core, 17 minutes each. DSpark and DFlash 2 take as long as they ship. Figures: docs/results.md.
"""

import importlib

import ml_collections

STEPS = {"mtp": 2800, "eagle3": 3220, "dflash": 2670}


def get_config(variant: str = "eagle3") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  c = importlib.import_module(f"configs.tiny.{'eagle3' if smoke else variant}").get_config("smoke" if smoke else "full")
  if not smoke:
    c.steps = STEPS[variant]
  return c
