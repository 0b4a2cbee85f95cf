"""Eagle3 for SmolLM2-135M-Instruct: one layer, five taps, seven steps of training-time test.

  make smollm2 && .venv/bin/python -m experiments.train_drafter --config=configs/smollm2/eagle3.py --workdir=runs/smollm2_eagle3 \
    --config.responses=configs/smollm2/responses.jsonl --config.feature_cache=runs/smollm2_features

2 CPU cores, hours. Data, steps and optimizer are those of configs/smollm2/dspark.py. Accepted lengths: docs/results.md.
"""

import ml_collections

from configs.smollm2 import dspark
from configs.tiny import eagle3


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return dspark.adapted(eagle3.get_config(variant), variant)
