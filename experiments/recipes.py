"""Drafters and their losses from a training configuration, as experiments share it."""

from ml_collections import ConfigDict

from specdec_jax.config import DrafterConfig, SerialConfig
from specdec_jax.drafters import BlockDrafter, SerialDrafter
from specdec_jax.models.target import Target
from specdec_jax.training.losses import BlockLoss
from specdec_jax.training.objective import Objective

TAPS = {"block": 4, "eagle3": 5, "mtp": 1}  # where a configuration names no target layers


def drafter_config(config: ConfigDict, target: Target) -> DrafterConfig | SerialConfig:
  """The drafter that `config.drafter` describes, with the target's sizes, frozen embedding and head."""
  d = dict(config.drafter)
  kind, layers = d.pop("kind"), d.pop("layers", 1)
  d["taps"] = d["taps"] or default_taps(target.config.layers, TAPS[kind])
  model = target.config.plain(layers, d.pop("window", None))
  shared = {
      "model": model, "taps": tuple(d.pop("taps")), "target_layers": target.config.layers, "tokenizer_hash": target.tokenizer.fingerprint()}
  if kind == "block":
    mask = config.mask_token if isinstance(config.mask_token, int) else target.tokenizer.id(config.mask_token)
    return DrafterConfig(**shared, mask_id=mask, anchors=config.anchors, **d)
  return SerialConfig(**shared, kind=kind, **d)


def default_taps(layers: int, count: int = 4) -> tuple[int, ...]:
  """`count` target layers from the second to the last but two (DFlash's published spread), fewer where there are not so many; one: the
  last."""
  if count == 1:
    return (layers - 1,)
  return tuple(sorted({min(max(0, round(1 + i * (layers - 4) / (count - 1))), layers - 1) for i in range(count)}))


def unused_token(target: Target) -> str:
  """A token that texts do not hold, to stand for a slot that is to be drafted: a mask token, or else the last special token of the
  tokenizer that neither ends a text nor stands in the chat template. Raises ValueError where there is none."""
  t, c = target.tokenizer, target.config
  known = t.backend.get_added_tokens_decoder()
  special = [a.content for i, a in sorted(known.items()) if a.special and i not in (*c.eos, c.pad, c.bos)]
  special = [token for token in special if token not in (t.chat_template or "")]
  named = [n for n in ("<|mask|>", "<mask>", "[MASK]") if n in special]
  if not special:
    raise ValueError(f"{target.name}: no special token is free to stand for a draft: name one, --config.recipe.mask_token=TOKEN")
  return (named or special[-1:])[0]


def objective(config: ConfigDict, target: Target, model: BlockDrafter | SerialDrafter) -> Objective:
  """The loss that `config` describes."""
  return Objective(target, model, config.anchors, config.anchor_rule, BlockLoss(**config.loss), config.ce_share, config.soft)
