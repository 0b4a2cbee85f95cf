"""The main job: the embedded target alone and with every shipped drafter, on the shipped prompts of three domains.

  python -m experiments.quickstart --config=configs/tiny/quickstart.py --workdir=runs/tiny_quickstart      (make quickstart)

2 CPU cores, four minutes. Tables and plots: runs/tiny_quickstart/report.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.dtype = "float32"  # or bfloat16
  c.drafters = ("tiny/mtp", "tiny/eagle3", "tiny/dflash", "tiny/dspark", "tiny/dflash2", "tiny/hybrid")
  c.prompts = ml_collections.ConfigDict(dict(maths="tiny", code="tiny", chat="tiny"))  # "tiny", or a {"turns": […]} JSONL
  c.prompts_per_dataset = 4
  c.system = ""
  c.temperatures = (0.0, 1.0)
  c.rule = "token"  # or block
  c.batch = 4  # one shape a data set: most of the time is compilation
  c.max_new_tokens = 96
  c.seed = 0
  c.repeats = 1  # timed runs of every setting, interleaved; the best counts
  if variant == "smoke":
    c.drafters = ("tiny/dspark",)
    c.prompts_per_dataset, c.batch, c.max_new_tokens, c.repeats = 2, 2, 16, 1
  return c
