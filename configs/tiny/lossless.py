"""The losslessness contracts for every shipped drafter of the embedded target.

  python -m experiments.check_lossless --config=configs/tiny/lossless.py --workdir=runs/tiny_lossless
  python -m experiments.check_lossless --config=configs/tiny/lossless.py:bfloat16 --workdir=runs/tiny_lossless_bfloat16
  python -m experiments.check_lossless --config=configs/tiny/lossless.py:misreporting --workdir=runs/tiny_lossless_fault   (must fail)

2 CPU cores, twenty minutes for the first, minutes for the others. Figures: docs/results.md.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.dtype = "float32"
  c.drafters = quickstart.get_config().drafters
  c.misreport = False  # break the drafters on purpose
  c.prompts = ml_collections.ConfigDict(dict(maths="tiny", code="tiny", chat="tiny"))
  c.prompts_per_dataset = 40  # read; the first `requests` of them, are decoded
  c.longest_prompt = 64  # tokens: one shape to compile
  c.requests = 8
  c.system = ""
  c.temperatures = (0.0, 0.6, 1.0)
  c.top_ps = (1.0, 0.9)
  c.rule = "token"  # or block
  c.batches = (1, 8)
  c.draft_lengths = tuple(range(1, 8))
  c.max_new_tokens = 24
  c.samples = 8  # of one prompt, for each draft length and batch size
  c.positions = 8  # of those samples that are compared
  c.seed = 0
  if variant == "bfloat16":
    c.dtype, c.draft_lengths, c.temperatures, c.top_ps = "bfloat16", (3, 7), (0.0, 1.0), (1.0,)
  if variant == "misreporting":
    c.misreport, c.drafters, c.draft_lengths, c.temperatures, c.requests = True, ("tiny/dspark",), (7,), (0.0, 1.0), 40
  if variant == "smoke":
    c.drafters, c.prompts, c.draft_lengths, c.batches = ("tiny/dspark",), ml_collections.ConfigDict(dict(chat="tiny")), (2,), (4,)
    c.prompts_per_dataset, c.max_new_tokens, c.samples, c.positions, c.temperatures, c.top_ps, c.requests = (
        2, 8, 8, 2, (0.0, 1.0), (0.9,), 2)
  return c
