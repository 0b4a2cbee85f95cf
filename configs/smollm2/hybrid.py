"""The hybrid for SmolLM2-135M-Instruct: convolution, path selector, loss on the distribution, confidence head.

  make smollm2 && .venv/bin/python -m experiments.train_drafter --config=configs/smollm2/hybrid.py --workdir=runs/smollm2_hybrid \
    --config.responses=configs/smollm2/responses.jsonl --config.feature_cache=runs/smollm2_features

2 CPU cores, hours. Data, steps and optimizer are those of configs/smollm2/dspark.py. Accepted lengths: docs/results.md.
"""

import ml_collections

from configs.smollm2 import dspark
from configs.tiny import hybrid


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return dspark.adapted(hybrid.get_config(variant), variant)
