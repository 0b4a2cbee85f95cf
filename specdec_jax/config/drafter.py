"""Frozen descriptions of drafters, to and from the published config.json files."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.config.error import ConfigError
from specdec_jax.config.model import GEMMA, ModelConfig

HEADS = ("none", "markov", "gated", "rnn", "selector")
_DEEPSPEC_HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """A block drafter: a backbone that reads target features, and parts on it that combine freely (ALGORITHMS §4).

  block: input slots of one block [anchor, mask, …]. anchor_predicts: whether slot 0 predicts too, so that γ = block
  (DeepSpec), or is the clean anchor only, so that γ = block − 1 (the original DFlash).
  taps: target layers whose outputs are the context features; -1 is the embedding output.
  head: what lets a slot depend on the token drafted before it: a bias of rank `rank` on the logits (markov, gated, rnn),
  or a choice among each slot's `candidates` best tokens (selector). conv: taps of the dynamic convolution, 0 for none.
  own_embedding: whether the checkpoint carries copies of the target's embedding and head.
  """

  model: ModelConfig
  block: int
  mask_id: int
  taps: tuple[int, ...]
  target_layers: int
  anchor_predicts: bool = True
  head: str = "none"
  rank: int = 0  # R
  candidates: int = 0  # C
  conv: int = 0
  conv_group: int = 16  # channels that share a predicted coefficient
  confidence: bool = False
  confidence_with_head: bool = False  # whether the confidence reads the head's embedding of the previous token
  own_embedding: bool = True
  anchors: int = 512  # A, blocks a training sequence
  tokenizer_hash: str | None = None

  @property
  def draft_length(self) -> int:
    """γ, the draft tokens of a full proposal."""
    return self.block if self.anchor_predicts else self.block - 1

  @property
  def layout(self) -> str:
    """The published layout that holds this drafter: "deepspec", "dflash2", or "hybrid", which extends the latter."""
    dflash2 = not self.anchor_predicts and not self.confidence and self.head in ("none", "selector")
    if self.own_embedding:
      return "deepspec"
    return "dflash2" if dflash2 else "hybrid"

  def __post_init__(self):
    m = self.mask_id
    if not 0 <= m < self.model.vocab:
      raise ConfigError(f"mask_token_id {m} is outside the vocabulary of {self.model.vocab}")
    if m in self.model.eos or m == self.model.pad:
      raise ConfigError(f"mask_token_id {m} is also an end-of-sequence or padding id")
    check_taps(self.taps, self.target_layers, last=self.layout == "hybrid")
    if self.head not in HEADS:
      raise ConfigError(f"head {self.head!r} is not supported; known: {', '.join(HEADS)}")
    if self.rank < 0 or (self.rank > 0) != (self.head != "none"):
      raise ConfigError(f"head {self.head!r} with rank {self.rank}: a head needs a rank above 0, and no head none")
    if (self.candidates > 0) != (self.head == "selector") or self.candidates > self.model.vocab:
      raise ConfigError(
          f"selector_top_k {self.candidates} with head {self.head!r}: the selector, and it alone, needs 1 … {self.model.vocab}")
    if self.conv < 0 or self.conv_group < 1 or (self.conv and self.model.width % self.conv_group):
      raise ConfigError(
          f"conv_kernel_size {self.conv}, conv_group_size {self.conv_group}: a group must divide the width {self.model.width}")
    if self.confidence_with_head and not (self.confidence and self.rank):
      raise ConfigError("confidence_head_with_markov needs enable_confidence_head and markov_rank > 0")
    if self.model.family not in ("qwen3", *(GEMMA if self.own_embedding else ())):
      raise ConfigError(f"a drafter's layers are of the qwen3 family, or gemma4 in DeepSpec's layout, not {self.model.family!r}")
    if self.draft_length < 1:
      raise ConfigError(f"block_size {self.block} leaves no slot that predicts")
    if any(w is not None and w < self.block for w in self.model.windows):
      raise ConfigError(f"sliding_window {min(w for w in self.model.windows if w)} is shorter than block_size {self.block}")
    if self.own_embedding and (not self.anchor_predicts or self.conv or self.head == "selector"):
      raise ConfigError("the layout with its own embedding (DeepSpec) has neither convolution, selector nor a silent slot 0")

  @classmethod
  def from_published(cls, config: Mapping[str, Any]) -> "DrafterConfig":
    """From a drafter's config.json, DeepSpec's or DFlash's (RELEASED_FORMATS §1.1, §2); the key `dflash_config` tells them."""
    if not isinstance(config.get("dflash_config", {}), Mapping):
      raise ConfigError(f"dflash_config must be an object, not {config['dflash_config']!r}")
    if "projector_type" in config or "projector_type" in config.get("dflash_config", {}):
      raise ConfigError("projector_type: this is SpecForge's drafter layout, which is not supported")
    return cls._from_dflash(config) if "dflash_config" in config else cls._from_deepspec(config)

  @classmethod
  def _from_deepspec(cls, config: Mapping[str, Any]) -> "DrafterConfig":
    """DFlash and DSpark share one class there: the heads are told by markov_rank and enable_confidence_head."""
    _need(config, "block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    _check_types(config, ("num_anchors", "markov_rank"), ("enable_confidence_head", "confidence_head_with_markov"))
    confidence, rank = bool(config.get("enable_confidence_head", False)), config.get("markov_rank") or 0
    published = config.get("markov_head_type", "vanilla")
    if rank and published not in tuple(_DEEPSPEC_HEADS):
      raise ConfigError(f"markov_head_type {published!r} is not supported; known: {', '.join(_DEEPSPEC_HEADS)}")
    return cls(
        model=ModelConfig.from_published(config), block=config["block_size"], mask_id=config["mask_token_id"],
        taps=tuple(config["target_layer_ids"]), target_layers=config["num_target_layers"],
        head=_DEEPSPEC_HEADS[published] if rank else "none", rank=rank, confidence=confidence,
        confidence_with_head=confidence and bool(config.get("confidence_head_with_markov", False)),
        anchors=_default(config, "num_anchors", 512), tokenizer_hash=config.get("tokenizer_hash"))

  @classmethod
  def _from_dflash(cls, config: Mapping[str, Any]) -> "DrafterConfig":
    own = config["dflash_config"]
    block = own.get("block_size", config.get("block_size"))
    if config.get("block_size", block) != block:
      raise ConfigError(f"block_size is {config['block_size']} at the top level and {block} in dflash_config")
    given = ("target_layer_ids",) if own.get("target_layer_ids") else ()
    _need({**config, **own, "block_size": block}, "block_size", "mask_token_id", "num_target_layers", *given)
    _check_types(config, ("num_anchors",), ("is_causal",))
    _check_types(
        own, ("selector_rank", "head_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        ("anchor_predicts", "confidence", "confidence_with_head"))
    if config.get("is_causal"):
      raise ConfigError("is_causal is true: a block drafter's attention is not causal")
    model = ModelConfig.from_published({**config, "tie_word_embeddings": False})
    layers = config["num_target_layers"]
    rank, conv = own.get("selector_rank") or own.get("head_rank") or 0, own.get("conv_kernel_size") or 0
    group = _default(own, "conv_group_size", 16)
    return cls(
        model=model, block=block, mask_id=own.get("mask_token_id", config.get("mask_token_id")),
        taps=tuple(own.get("target_layer_ids") or spread_taps(layers, model.layers)), target_layers=layers,
        anchor_predicts=bool(own.get("anchor_predicts", False)), head=own.get("head", "selector" if rank else "none"), rank=rank,
        candidates=own.get("selector_top_k") or 0, conv=conv, conv_group=group if conv else group or 16,  # 0 of none is none.
        confidence=bool(own.get("confidence", False)), confidence_with_head=bool(own.get("confidence_with_head", False)),
        own_embedding=False, anchors=_default(config, "num_anchors", 512), tokenizer_hash=config.get("tokenizer_hash"))

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this drafter's layout: the backbone's config and the drafter's keys."""
    out = self.model.to_published(dtype) | {
        "tie_word_embeddings": False, "num_target_layers": self.target_layers, "block_size": self.block, "num_anchors": self.anchors}
    if self.tokenizer_hash:
      out["tokenizer_hash"] = self.tokenizer_hash
    return out | (self._to_deepspec() if self.layout == "deepspec" else self._to_dflash())

  def _to_deepspec(self) -> dict[str, Any]:
    gemma = self.model.family in GEMMA
    out = {
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"], "mask_token_id": self.mask_id,
        "target_layer_ids": list(self.taps), "markov_rank": self.rank, "enable_confidence_head": self.confidence}
    if self.rank:
      out["markov_head_type"] = next(k for k, v in _DEEPSPEC_HEADS.items() if v == self.head)
    if self.confidence:
      out["confidence_head_with_markov"] = self.confidence_with_head
    if gemma:
      out |= {"target_model_type": self.model.family.removesuffix("_text"), "target_text_model_type": self.model.family}
    return out

  def _to_dflash(self) -> dict[str, Any]:
    own = {"block_size": self.block, "mask_token_id": self.mask_id, "target_layer_ids": list(self.taps)}
    if self.conv or self.conv_group != 16:
      own |= {"conv_kernel_size": self.conv, "conv_group_size": self.conv_group}
    if self.head == "selector":
      own |= {"selector_rank": self.rank, "selector_top_k": self.candidates}
    architecture = "Qwen3DFlash2DraftModel" if self.conv or self.head == "selector" else "Qwen3DFlashDraftModel"
    if self.layout == "hybrid":  # Beyond what the published readers know: another architecture, so that they refuse it.
      architecture = "HybridBlockDraftModel"
      own |= {"anchor_predicts": self.anchor_predicts, "head": self.head, "head_rank": self.rank, "confidence": self.confidence,
              "confidence_with_head": self.confidence_with_head}
    return {"architectures": [architecture], "is_causal": False, "max_window_layers": self.model.layers, "dflash_config": own}


def check_taps(taps: Sequence[int], target_layers: int, last: bool = False) -> None:
  """Raises ConfigError unless the taps increase strictly and stop before the target's last layer, or there with `last`:
  the published layouts do not tap it, because their readers give its output after the final norm."""
  end = target_layers if last else target_layers - 1
  if list(taps) != sorted(set(taps)) or not taps or taps[0] < -1 or taps[-1] >= end:
    raise ConfigError(
        f"target_layer_ids {list(taps)} must increase strictly, from -1 (embedding) to {end - 1}, of {target_layers} target layers")


def spread_taps(target_layers: int, count: int) -> tuple[int, ...]:
  """The published default where a DFlash checkpoint names no taps: `count` of them from layer 1 to the fourth last."""
  if count == 1:
    return (target_layers // 2,)
  return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def _need(config: Mapping[str, Any], *keys: str) -> None:
  """Raises ConfigError for keys that are missing or, all being numbers of something, are no integers."""
  missing = [k for k in keys if config.get(k) is None]
  if missing:
    raise ConfigError(f"the drafter's config.json lacks {', '.join(missing)}")
  integers = lambda x: all(type(i) is int for i in x) if isinstance(x, (list, tuple)) else type(x) is int
  for k in keys:
    if not integers(config[k]) or isinstance(config[k], (list, tuple)) != (k == "target_layer_ids"):
      raise ConfigError(f"{k} is {config[k]!r}: expected {'a list of layer numbers' if k == 'target_layer_ids' else 'an integer'}")


def _check_types(config: Mapping[str, Any], counts: Sequence[str], flags: Sequence[str], numbers: Sequence[str] = ()) -> None:
  """Raises ConfigError for one of these keys that is there, not null, and of another type than in the published files."""
  for keys, right, words in (
      (counts, lambda x: type(x) is int and x >= 0, "an integer of at least 0"), (flags, lambda x: type(x) is bool, "true or false"),
      (numbers, lambda x: type(x) in (int, float) and 0 <= x < math.inf, "a number of at least 0")):
    for k in keys:
      if config.get(k) is not None and not right(config[k]):
        raise ConfigError(f"{k} is {config[k]!r}: expected {words}")


def _default(config: Mapping[str, Any], key: str, default: Any) -> Any:
  """What a key holds, the default where it is missing or null."""
  return default if config.get(key) is None else config[key]


KINDS = ("eagle3", "mtp")


@dataclasses.dataclass(frozen=True)
class SerialConfig:
  """A drafter that runs one layer once a draft, on its own last hidden state (ALGORITHMS §4: Eagle3, MTP).

  kind "eagle3": the taps are projected to one feature, and the layer's attention reads [embedding; feature]. "mtp": one
  tap, normed and projected together with the embedding to the layer's input.
  steps: γ, and the steps of training-time test; step_decay: weight of each further step's loss.
  draft_vocab: ids that can be drafted, 0 for all.
  """

  model: ModelConfig
  kind: str
  taps: tuple[int, ...]
  target_layers: int
  steps: int = 7
  step_decay: float = 0.8
  draft_vocab: int = 0
  own_embedding: bool = True
  tokenizer_hash: str | None = None
  confidence: bool = False
  candidates: int = 0

  @property
  def draft_length(self) -> int:
    """γ, the draft tokens of a full proposal."""
    return self.steps

  @property
  def layout(self) -> str:
    """The layout that holds this drafter."""
    return self.kind

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ConfigError(f"serial drafter kind {self.kind!r} is not supported; known: {', '.join(KINDS)}")
    if self.kind == "eagle3":
      check_taps(self.taps, self.target_layers)
    elif self.taps != (self.target_layers - 1,):
      raise ConfigError(f"an mtp drafter reads the last target layer, {self.target_layers - 1}, not {list(self.taps)}")
    if self.model.layers != 1:
      raise ConfigError(f"num_hidden_layers {self.model.layers}: a serial drafter has one layer")
    if self.steps < 1 or not 0 <= self.draft_vocab <= self.model.vocab:
      raise ConfigError(f"ttt_length {self.steps} must be at least 1, draft_vocab_size {self.draft_vocab} at most {self.model.vocab}")
    if self.model.family != "qwen3":
      raise ConfigError(f"a drafter's layers are of the qwen3 family in the published layout, not {self.model.family!r}")

  @classmethod
  def from_published(cls, config: Mapping[str, Any]) -> "SerialConfig":
    """From an EAGLE-3 config.json in DeepSpec's layout (RELEASED_FORMATS §1.1), or of the same form with mtp: true."""
    _need(config, "ttt_length", "num_target_layers", "target_layer_ids")
    _check_types(config, ("draft_vocab_size",), ("mtp", "own_embedding"), ("step_loss_decay",))
    kind = "mtp" if config.get("mtp") else "eagle3"
    if "markov_rank" in config or "dflash_config" in config:
      raise ConfigError("ttt_length beside a block drafter's keys: which drafter is this?")
    return cls(
        model=ModelConfig.from_published(config), kind=kind,
        taps=tuple(config["target_layer_ids"]), target_layers=config["num_target_layers"], steps=config["ttt_length"],
        step_decay=_default(config, "step_loss_decay", 0.8), draft_vocab=config.get("draft_vocab_size") or 0,
        own_embedding=bool(config.get("own_embedding", True)), tokenizer_hash=config.get("tokenizer_hash"))

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this drafter."""
    out = self.model.to_published(dtype) | {
        "architectures": ["Qwen3Eagle3Model" if self.kind == "eagle3" else "MTPDraftModel"], "tie_word_embeddings": False,
        "num_target_layers": self.target_layers, "target_layer_ids": list(self.taps), "ttt_length": self.steps,
        "step_loss_decay": self.step_decay, "draft_num_hidden_layers": 1}
    extra = {"mtp": self.kind == "mtp", "draft_vocab_size": self.draft_vocab, "tokenizer_hash": self.tokenizer_hash}
    own = {} if self.own_embedding else {"own_embedding": False}
    return out | {k: v for k, v in extra.items() if v} | own


def drafter_config(config: Mapping[str, Any]) -> "DrafterConfig | SerialConfig":
  """The description in a drafter's config.json, whichever kind it is."""
  return (SerialConfig if "ttt_length" in config else DrafterConfig).from_published(config)
