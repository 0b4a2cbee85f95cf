"""Qwen3-14B with its DSpark drafter on four chips of a v5p that are not there; see configs/qwen3_4b/plan.py.

  python -m experiments.plan_mesh --config=configs/qwen3_14b/plan.py

Several minutes on one core.
"""

from configs.qwen3_4b import plan


def get_config(variant: str = "full"):
  c = plan.plan("qwen3-14b", "v5p:2x2x1", (1, 2, 2), 2, (1, 1, 4))
  return plan.smoke(c) if variant == "smoke" else c
