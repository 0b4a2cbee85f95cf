"""Qwen3-4B with its DSpark drafter on devices that are not there: the training step, and the programs of a round.

  python -m experiments.plan_mesh --config=configs/qwen3_4b/plan.py:v5e
  python -m experiments.plan_mesh --config=configs/qwen3_4b/plan.py:v6e
  python -m experiments.plan_mesh --config=configs/qwen3_4b/plan.py:h200

Several minutes a variant on one core, nearly all of them the compiler's. Tables: docs/scale.md.
"""

import ml_collections

AXES = ("data", "fsdp", "tensor")
# topology, mesh of training, sequences at a time on all devices, mesh of decoding
VARIANTS = {
    "v5e": ("v5e:2x4", (1, 1, 8), 1, (1, 1, 8)), "v6e": ("v6e:2x4", (1, 2, 4), 2, (1, 1, 8)), "h200": ("h200:1x8", (1, 8, 1), 8, (1, 1, 8))}


def get_config(variant: str = "v5e") -> ml_collections.ConfigDict:
  if variant == "smoke":
    return smoke(get_config())
  return plan("qwen3-4b", *VARIANTS[variant])


def smoke(c: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  c.what = ("decoding",)
  return c


def plan(target: str, topology: str, training, rows: int, decoding) -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = target
  c.drafter = "dspark"
  c.topology = topology
  c.what = ("training", "decoding")
  c.training = ml_collections.ConfigDict(dict(mesh=dict(zip(AXES, training)), batch=512, rows=rows, row_length=4096, anchors=512))
  c.decoding = ml_collections.ConfigDict(dict(
      mesh=dict(zip(AXES, decoding)), slots=16, length=4096, buckets=(16, 64, 128), replicated=False))
  return c
