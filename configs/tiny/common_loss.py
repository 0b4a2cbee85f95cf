"""Every method under one loss, cross-entropy on the true token, and with as many anchors: the trainings that neither ships nor
configs/tiny/ablation.py has; configs/tiny/common_loss_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/common_loss.py:mtp --workdir=runs/tiny_common_mtp
  python -m experiments.train_drafter --config=configs/tiny/common_loss.py:eagle3 --workdir=runs/tiny_common_eagle3
  python -m experiments.train_drafter --config=configs/tiny/common_loss.py:hybrid --workdir=runs/tiny_common_hybrid

One CPU core, 15 minutes each. DFlash and DFlash 2 ship with this loss; DSpark's is configs/tiny/ablation.py:markov, whose confidence head
would leave the drafts alone. Data, steps, optimizer and learning rates are those of configs/tiny/METHOD.py. Figures: docs/results.md.
"""

import importlib

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  c = importlib.import_module(f"configs.tiny.{'mtp' if smoke else variant}").get_config("smoke" if smoke else "full")
  c.anchors = dspark.get_config("smoke" if smoke else "full").anchors
  c.soft, c.ce_share = False, 0.0
  c.loss.update(ce=1.0, tv=0.0, selector=1.0)
  return c
