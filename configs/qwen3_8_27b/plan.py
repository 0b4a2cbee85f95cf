"""Qwen3.8-27B with its published DFlash 2 drafter on four chips of a v5p, or on one H200, that are not there: the programs of a round.

  python -m experiments.plan_mesh --config=configs/qwen3_8_27b/plan.py:v5p
  python -m experiments.plan_mesh --config=configs/qwen3_8_27b/plan.py:h200

Several minutes on one core: its layers are of two forms, so each of the 64 is compiled. Tables: docs/scale.md.
"""

from configs.qwen3_4b import plan

VARIANTS = {"v5p": ("v5p:2x2x1", (1, 1, 4)), "h200": ("h200:1x1", (1, 1, 1))}


def get_config(variant: str = "v5p"):
  topology, mesh = VARIANTS["v5p" if variant == "smoke" else variant]
  c = plan.plan("qwen3.8-27b", topology, mesh, 1, mesh)
  c.drafter, c.what = "dflash2", ("decoding",)
  c.decoding.slots, c.decoding.buckets = 8, (8, 64)
  return c
