"""Every shipped drafter of the embedded target on 100 prompts a domain (DSpark Table 1 and Figure 2 at tiny scale).

  python -m experiments.compare_drafters --config=configs/tiny/compare.py --workdir=runs/tiny_compare       # or :block, that rule alone

2 CPU cores, fifteen minutes for one training seed and one rule. The paper, macro over its nine sets: DSpark / DFlash 1.16 to 1.18, DSpark /
Eagle3 1.27 to 1.31; DFlash 2 / DFlash about 1.2. Ours: docs/results.md.
"""

import ml_collections

from configs.tiny import quickstart


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = quickstart.get_config(variant)
  del c.drafters, c.rule
  names = ("mtp", "eagle3", "dflash", "dspark", "dflash2", "hybrid")
  c.drafters = ml_collections.ConfigDict({name: (f"tiny/{name}",) for name in names})  # one folder a training seed
  c.baselines = ("dflash", "eagle3")
  c.rules = ("token", "block")  # the first is that of the tables; the gain of the others stands beside it
  c.prompts_per_dataset = 100
  c.batch = 20
  if variant == "block":
    c.rules, c.temperatures = ("block",), (1.0,)
  if variant == "smoke":
    c.drafters, c.baselines = ml_collections.ConfigDict(dict(dspark=("tiny/dspark",))), ("dspark",)
    c.prompts_per_dataset, c.batch, c.max_new_tokens, c.temperatures = 2, 2, 8, (0.0,)
  return c
