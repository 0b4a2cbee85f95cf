"""A drafter for a target of one's own: block backbone, dynamic convolution, path selector and confidence head (the hybrid). The variants
dspark, dflash, dflash2, eagle3 and mtp make one of that kind, which other readers know (docs/export.md).

  python -m experiments.train_my_drafter --config=configs/tiny/my_drafter.py --workdir=runs/tiny_my_drafter

With --config.target=FOLDER and --config.prompts=FILE; as it stands, the embedded target and its code prompts. 2 CPU cores: minutes
for `tiny` and a thousand prompts, most of them for the target's answers; a target of 135 M parameters answers about 90 tokens a second.
Better drafters: more prompts (the shipped ones had 7,500), more steps, --config.recipe.documents for a limit.
"""

import importlib

import ml_collections

from configs.tiny import calibrate, lossless
from specdec_jax.data.prompts import ASSETS


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.prompts = str(ASSETS / "tiny/prompts/code.jsonl")  # a {"turns": […]} JSONL
  c.system = ""
  c.held_out = 0.2  # share of the prompts kept from training
  c.prompts_per_part = 60  # of those, for calibration and for the report each, at most
  c.batch = 4
  c.max_new_tokens = 128
  c.temperatures = (0.0, 1.0)
  c.seed = 0
  c.repeats = 1
  method = "hybrid" if variant in ("full", "smoke") else variant
  c.recipe = importlib.import_module(f"configs.tiny.{method}").get_config()  # what configs/tiny/METHOD.py sets
  c.recipe.mask_token = ""  # "": a token that texts do not hold
  c.recipe.drafter.taps = ()  # (): spread over the target's layers
  c.recipe.documents = 0  # prompts to train on, 0 for all
  c.recipe.response_batch, c.recipe.row_length, c.recipe.steps, c.recipe.save_every = 32, 512, 1200, 300
  c.calibration = calibrate.get_config()
  c.calibration.samples, c.calibration.batch = 2, 4
  c.lossless = lossless.get_config()
  c.lossless.requests, c.lossless.batches, c.lossless.draft_lengths, c.lossless.temperatures, c.lossless.top_ps = (
      8, (4,), (7,), (0.0, 1.0), (1.0,))
  if variant == "smoke":
    c.prompts_per_part, c.max_new_tokens, c.temperatures = 4, 16, (0.0,)
    c.recipe.documents, c.recipe.max_new_tokens, c.recipe.steps, c.recipe.anchors, c.recipe.evaluation_prompts, c.recipe.response_batch = (
        4, 16, 2, 8, 1, 4)
    c.recipe.row_length = 160
    c.calibration.samples, c.calibration.max_new_tokens = 1, 16
    c.lossless.requests, c.lossless.max_new_tokens, c.lossless.temperatures = 2, 8, (0.0,)
  return c
