"""DSpark for Qwen3-4B with the published settings, on eight devices.

  python -m experiments.train_drafter --config=configs/qwen3_4b/dspark.py --config.target=FOLDER --workdir=runs/qwen3_4b_dspark

Not run and not timed here: `experiments.plan_mesh` says what a step takes (docs/scale.md). The prompts are those of the embedded corpus, or
--config.prompts=FILE; the published run regenerated open-perfectblend, 10 epochs in steps of 512 sequences.
"""

import ml_collections

from configs.tiny import dspark
from specdec_jax import presets


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  if variant == "smoke":
    return dspark.get_config("smoke")
  c = dspark.get_config()
  published = presets.drafter_config("qwen3-4b", "dspark")
  c.target = ""  # a published folder
  c.dtype = "bfloat16"
  with c.ignore_type():
    c.mask_token = presets.QWEN3_MASK  # an id: the published tokenizer has no token there
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=published.model.layers, block=published.block, taps=published.taps, head=published.head, rank=published.rank,
      confidence=True, confidence_with_head=True))
  c.loss = ml_collections.ConfigDict(presets.LOSSES["dspark"])
  c.ce_share = 0.0
  c.documents, c.max_new_tokens, c.temperature = 20_000, 3072, 0.7
  c.row_length, c.batch, c.anchors = presets.TRAINING["row_length"], 8, published.anchors
  c.micro_batches = presets.TRAINING["batch"] // c.batch
  c.learning_rate = presets.TRAINING["learning_rate"]
  c.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=8, tensor=1))
  return c
