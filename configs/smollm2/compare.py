"""SmolLM2-135M-Instruct with every drafter on eight evaluation sets (DSpark Table 1 and Figure 2).

  make smollm2 && .venv/bin/python -m experiments.compare_drafters --config=configs/smollm2/compare.py --workdir=runs/smollm2_compare

2 CPU cores, hours. Drafters: runs/smollm2_METHOD/METHOD; prompts: eval_datasets/SET.jsonl, one {"turns": ["…"]} a line. The paper, macro
over its nine sets: DSpark / DFlash 1.16 to 1.18, DSpark / Eagle3 1.27 to 1.31, DFlash 2 / DFlash about 1.2. Ours: not measured.
"""

import ml_collections

from configs import smollm2
from configs.tiny import compare


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = compare.get_config(variant)
  if variant == "full":
    c.target, c.system = "smollm2", smollm2.SYSTEM
    c.prompts = ml_collections.ConfigDict(smollm2.prompts())
    c.drafters = ml_collections.ConfigDict({m: (smollm2.folder(m),) for m in smollm2.METHODS})
    c.rules, c.prompts_per_dataset, c.batch, c.max_new_tokens = ("token",), 30, 1, 128
  return c
