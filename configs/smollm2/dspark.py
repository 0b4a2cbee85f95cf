"""DSpark for SmolLM2-135M-Instruct: two block layers, Markov head, confidence head.

  make smollm2 && .venv/bin/python -m experiments.train_drafter --config=configs/smollm2/dspark.py --workdir=runs/smollm2_dspark \
    --config.responses=configs/smollm2/responses.jsonl --config.feature_cache=runs/smollm2_features

2 CPU cores, hours. Every drafter of this folder shares the responses and, where its taps are the same, the features. responses.jsonl holds
230,877 tokens that the target answered to the questions below (1460 answers cut at 128 tokens, 539 complete, 40 minutes of two cores), two
domains of which are Python 3.11's own sources and documentation: under another version leave --config.responses out, and they are made
anew. Accepted lengths: docs/results.md.
"""

import ml_collections

from configs import smollm2
from configs.tiny import dspark
from specdec_jax.data.prompts import ASSETS


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  return adapted(dspark.get_config(variant), variant)


def adapted(c: ml_collections.ConfigDict, variant: str) -> ml_collections.ConfigDict:
  """A recipe of the embedded target, for this one: its data, sizes and steps."""
  c.target, c.system, c.mask_token = "smollm2", smollm2.SYSTEM, "<empty_output>"
  c.evaluation = ml_collections.ConfigDict(dict(maths="smollm2", code="smollm2", chat="smollm2"))
  c.drafter.taps, c.drafter.own_embedding = TAPS[c.drafter.kind], False
  if c.drafter.get("conv_group"):
    c.drafter.conv_group = 32
  if variant == "smoke":
    c.prompts, c.documents, c.response_batch, c.batch, c.row_length = str(ASSETS / "smollm2/prompts/maths.jsonl"), 2, 2, 1, 160
    return c
  c.domains, c.documents = ("general", "maths", "code", "chat"), 500
  c.temperature = 0.7
  c.max_new_tokens, c.response_batch = 128, 64
  c.steps, c.save_every, c.learning_rate = 1200, 200, 1e-3
  return c


TAPS = {"block": (1, 10, 19, 28), "eagle3": (1, 8, 15, 22, 28), "mtp": (29,)}
