"""DSpark for the embedded target: block backbone, Markov head, confidence head.

  python -m experiments.train_drafter --config=configs/tiny/dspark.py --workdir=runs/tiny_dspark

One CPU core, 20 minutes; before them the regeneration of 638 k response tokens, which --config.responses=FILE shares between
runs, as --config.feature_cache=FOLDER does the features of the target. Accepted lengths: README.
"""

import ml_collections

from specdec_jax.data.prompts import ASSETS


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0  # initialisation, anchors, order of the batches
  c.data_seed = 0  # prompts, responses, packing
  c.name = "dspark"
  c.target = "tiny"
  c.dtype = "float32"  # of the target, and of what the drafter computes in
  c.mask_token = "<|mask|>"
  c.prompts = ""  # training questions, a {"turns": […]} JSONL; "": those of `domains`
  c.domains = ("maths", "code", "chat")  # of the embedded corpus; "general": those of specdec_jax.data.questions
  c.system = ""  # system prompt
  c.responses = ""  # a file of responses to share between runs; "": the run's own
  c.feature_cache = ""  # a folder for the target's features; "": computed on the fly
  c.feature_dtype = "bfloat16"  # or int8
  c.documents = 2500  # prompts a domain to regenerate
  c.max_new_tokens = 160
  c.response_batch = 128
  c.temperature = 1.0
  c.drafter = ml_collections.ConfigDict(dict(
      kind="block", layers=2, block=7, taps=(1, 4, 6), head="markov", rank=64, confidence=True, confidence_with_head=True))
  c.loss = ml_collections.ConfigDict(dict(ce=0.1, tv=0.9, confidence=1.0, selector=1.0, decay=4.0))
  c.ce_share = 0.25  # of the steps, cross-entropy alone: TV learns slowly while q is far from p
  c.soft = False  # cross-entropies on the target's distribution, as serial drafters are published, instead of the true token
  c.row_length = 320
  c.batch = 3  # rows of a micro-batch
  c.micro_batches = 1  # of a step
  c.anchors = 48  # a row; 0, for serial drafters: every column
  c.anchor_rule = "cumulative"
  c.steps = 2400
  c.learning_rate = 2e-3
  c.evaluation = ml_collections.ConfigDict(dict(maths="tiny", code="tiny", chat="tiny"))  # "tiny", or a {"turns": […]} JSONL
  c.evaluation_prompts = 8  # a domain, at checkpoints
  c.save_every = 600
  c.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=1, tensor=1))  # devices, of all processes together
  c.distributed = ml_collections.ConfigDict(dict(coordinator="", processes=1, process=0, patience=100))  # see experiments.common.connect
  if variant == "smoke":
    c.prompts = str(ASSETS / "tiny" / "prompts" / "code.jsonl")  # Reading the corpus takes longer than the rest.
    c.documents, c.response_batch, c.max_new_tokens, c.steps, c.anchors, c.evaluation_prompts = 8, 8, 16, 3, 8, 1
  return c
