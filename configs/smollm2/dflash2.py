"""DFlash 2 for SmolLM2-135M-Instruct: two-tap dynamic convolution and a path selector over 16 candidates.

  make smollm2 && .venv/bin/python -m experiments.train_drafter --config=configs/smollm2/dflash2.py --workdir=runs/smollm2_dflash2 \
    --config.responses=configs/smollm2/responses.jsonl --config.feature_cache=runs/smollm2_features

2 CPU cores, hours. Data, steps and optimizer are those of configs/smollm2/dspark.py. Accepted lengths: docs/results.md.
"""

import ml_collections

from configs.smollm2 import dspark
from configs.tiny import dflash2


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return dspark.adapted(dflash2.get_config(variant), variant)
