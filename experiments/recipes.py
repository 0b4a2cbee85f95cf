"""Drafters and their losses from a training configuration, as experiments share it."""

import dataclasses

from ml_collections import ConfigDict

from specdec_jax.config import DrafterConfig, SerialConfig
from specdec_jax.drafters import BlockDrafter, SerialDrafter
from specdec_jax.models.target import Target
from specdec_jax.training.losses import BlockLoss
from specdec_jax.training.objective import Objective


def drafter_config(config: ConfigDict, target: Target) -> DrafterConfig | SerialConfig:
  """The drafter that `config.drafter` describes, with the target's sizes, frozen embedding and head."""
  d = dict(config.drafter)
  kind, layers = d.pop("kind"), d.pop("layers", 1)
  model = dataclasses.replace(target.config, family="qwen3", qk_norm=True, layers=layers, windows=(d.pop("window", None),) * layers, tied=False)
  shared = {"model": model, "taps": tuple(d.pop("taps")), "target_layers": target.config.layers, "tokenizer_hash": target.tokenizer.fingerprint()}
  if kind == "block":
    return DrafterConfig(**shared, mask_id=target.tokenizer.id(config.mask_token), anchors=config.anchors, **d)
  return SerialConfig(**shared, kind=kind, **d)


def objective(config: ConfigDict, target: Target, model: BlockDrafter | SerialDrafter) -> Objective:
  """The loss that `config` describes."""
  return Objective(target, model, config.anchors, config.anchor_rule, BlockLoss(**config.loss), config.ce_share)
