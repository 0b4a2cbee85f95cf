"""Frozen descriptions of models and drafters, to and from the published config.json files."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.typing import Float

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class ConfigError(ValueError):
  """A config.json that cannot be honoured; the message names the key."""


@dataclasses.dataclass(frozen=True)
class Rotary:
  """Rotary position embedding: base, and the published rescalings of its frequencies.

  kind: "default", "linear", "llama3" or "yarn"; `scaling` holds the keys of that kind as published.
  width: rotated channels of a head (the first ones); the rest passes through.
  """

  theta: float
  width: int
  kind: str = "default"
  scaling: tuple[tuple[str, float], ...] = ()

  def frequencies(self) -> tuple[Float["H"], float]:
    """Angular frequencies [width/2] in radians per position, and the factor on cos and sin (1 but for yarn)."""
    base = self.theta ** -(np.arange(0, self.width, 2, dtype=np.float64) / self.width)
    s = dict(self.scaling)
    if self.kind == "default":
      return base.astype(np.float32), 1.0
    if self.kind == "linear":
      return (base / s["factor"]).astype(np.float32), 1.0
    if self.kind == "llama3":
      return _llama3(base, s).astype(np.float32), 1.0
    return _yarn(base, self.theta, self.width, s)

  def published(self, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` entry of a config.json."""
    partial = {"partial_rotary_factor": self.width / head_dim} if self.width != head_dim else {}
    return {"rope_theta": self.theta, "rope_type": self.kind, **dict(self.scaling), **partial}


def _llama3(base: np.ndarray, s: Mapping[str, float]) -> np.ndarray:
  """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
  cycles = s["original_max_position_embeddings"] * base / (2 * np.pi)
  blend = np.clip((cycles - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
  return blend * base + (1 - blend) * base / s["factor"]


def _yarn(base: np.ndarray, theta: float, width: int, s: Mapping[str, float]) -> tuple[np.ndarray, float]:
  """YaRN (arXiv 2309.00071, section 3.2): interpolation by wavelength, and the attention factor."""
  factor, original = s["factor"], s["original_max_position_embeddings"]

  def dimension(rotations: float) -> float:
    return width * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

  low, high = dimension(s.get("beta_fast", 32.0)), dimension(s.get("beta_slow", 1.0))
  if s.get("truncate", True):
    low, high = np.floor(low), np.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
  attention = s.get("attention_factor")
  if attention is None:
    mscale = lambda m: 0.1 * m * np.log(factor) + 1.0 if factor > 1 else 1.0
    both = s.get("mscale") and s.get("mscale_all_dim")
    attention = mscale(s["mscale"]) / mscale(s["mscale_all_dim"]) if both else mscale(1.0)
  return (base / factor * ramp + base * (1 - ramp)).astype(np.float32), float(attention)


_ROTARY_NEEDS = {
    "default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROTARY_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def rotary_from_published(config: Mapping[str, Any], head_dim: int) -> Rotary:
  """Rotary settings from any published spelling: `rope_parameters` (flat, or nested by layer type), or `rope_theta`
  with `rope_scaling`. Raises ConfigError where no base is given: a default would be a silent replacement."""
  parameters = dict(config.get("rope_parameters") or {})
  nested = [v for v in parameters.values() if isinstance(v, Mapping)]
  if nested:
    if any(dict(v) != dict(nested[0]) for v in nested):
      raise ConfigError("rope_parameters differ by layer type: not supported for this architecture")
    parameters = dict(nested[0])
  merged = {**(config.get("rope_scaling") or {}), **parameters}
  theta = merged.pop("rope_theta", None) or config.get("rope_theta")
  if not theta:
    raise ConfigError("no rotary base: give rope_theta, or rope_parameters with rope_theta")
  kind = merged.pop("rope_type", None) or merged.pop("type", None) or "default"
  if kind not in _ROTARY_NEEDS:
    raise ConfigError(f"rope_type {kind!r} is not supported; known: {', '.join(_ROTARY_NEEDS)}")
  if kind == "yarn":
    merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
  missing = [k for k in _ROTARY_NEEDS[kind] if merged.get(k) is None]
  if missing:
    raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}")
  share = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
  keys = [k for k in (*_ROTARY_NEEDS[kind], *_ROTARY_OPTIONS) if merged.get(k) is not None]
  unknown = [k for k, v in merged.items() if k not in keys and k != "original_max_position_embeddings" and v is not None]
  if unknown:
    raise ConfigError(f"rotary settings {', '.join(sorted(unknown))} are not supported for rope_type {kind!r}")
  return Rotary(float(theta), int(head_dim * share), kind, tuple((k, merged[k]) for k in keys if kind != "default"))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer of the Llama or Qwen3 family. Letters as in `specdec_jax.typing`."""

  family: str
  vocab: int  # V
  width: int  # D
  layers: int  # Y
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H
  mlp: int  # F
  rotary: Rotary
  max_positions: int
  windows: tuple[int | None, ...]  # sliding window of each layer, None for full attention
  norm_eps: float = 1e-6
  qk_norm: bool = False
  tied: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  activation: str = "silu"
  init_scale: float = 0.02
  bos: int | None = None
  eos: tuple[int, ...] = ()
  pad: int | None = None

  @property
  def groups(self) -> int:
    """Query heads per key/value head, G."""
    return self.heads // self.kv_heads

  @classmethod
  def from_published(cls, config: Mapping[str, Any]) -> "ModelConfig":
    """From the parsed config.json of a Llama or Qwen3 checkpoint. Raises ConfigError naming what is unknown or missing."""
    family = config.get("model_type")
    if family not in FAMILIES:
      raise ConfigError(f"architecture {config.get('architectures')} (model_type {family!r}) is not supported; known: {', '.join(FAMILIES)}")

    def need(key: str) -> Any:
      if config.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}")
      return config[key]

    heads, width, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    head_dim = config.get("head_dim") or width // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
      raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
      raise ConfigError(f"hidden_act {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return cls(
        family=family, vocab=need("vocab_size"), width=width, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, mlp=need("intermediate_size"), rotary=rotary_from_published(config, head_dim),
        max_positions=need("max_position_embeddings"), windows=_windows(config, layers), norm_eps=need("rms_norm_eps"),
        qk_norm=family == "qwen3", tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)), mlp_bias=bool(config.get("mlp_bias", False)),
        activation=activation, init_scale=config.get("initializer_range", 0.02), bos=config.get("bos_token_id"),
        eos=ids(config.get("eos_token_id")), pad=config.get("pad_token_id"))

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this model, in the spelling of transformers 5. Raises ConfigError for layers of different windows,
    which it cannot say."""
    if len({w for w in self.windows if w}) > 1:
      raise ConfigError(f"layers with different sliding windows {self.windows} have no published spelling")
    return {
        "architectures": [FAMILIES[self.family]], "model_type": self.family, "vocab_size": self.vocab,
        "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
        "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.mlp,
        "hidden_act": self.activation, "rms_norm_eps": self.norm_eps, "rope_parameters": self.rotary.published(self.head_dim),
        "max_position_embeddings": self.max_positions, "tie_word_embeddings": self.tied,
        "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias, "initializer_range": self.init_scale,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in self.windows],
        "sliding_window": next((w for w in self.windows if w), None), "use_sliding_window": any(self.windows),
        "bos_token_id": self.bos, "eos_token_id": list(self.eos) if len(self.eos) > 1 else next(iter(self.eos), None),
        "pad_token_id": self.pad, "dtype": dtype, "use_cache": True, "attention_dropout": 0.0}


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
  """Windows by layer, with the defaults of the published configuration classes: only Qwen3 has any."""
  qwen = config["model_type"] == "qwen3"
  window = config.get("sliding_window") if qwen and config.get("use_sliding_window", False) else None
  types = config.get("layer_types")
  if types is None:
    first = config.get("max_window_layers", 28)
    types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
  unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
  if unknown:
    raise ConfigError(f"layer_types {', '.join(unknown)} are not supported for model_type {config['model_type']!r}")
  if len(types) != layers:
    raise ConfigError(f"layer_types has {len(types)} entries for {layers} layers")
  if "sliding_attention" in types and window is None:
    raise ConfigError("layer_types has sliding_attention, but sliding_window is missing, switched off or unknown to this model_type")
  return tuple(window if t == "sliding_attention" else None for t in types)


def ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
  """A published token id field (absent, one id or a list) as a tuple."""
  if value is None:
    return ()
  return (value,) if isinstance(value, int) else tuple(value)


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
      raise ConfigError(f"selector_top_k {self.candidates} with head {self.head!r}: the selector, and it alone, needs 1 … {self.model.vocab}")
    if self.conv < 0 or self.conv_group < 1 or (self.conv and self.model.width % self.conv_group):
      raise ConfigError(f"conv_kernel_size {self.conv}, conv_group_size {self.conv_group}: a group must divide the width {self.model.width}")
    if self.confidence_with_head and not (self.confidence and self.rank):
      raise ConfigError("confidence_head_with_markov needs enable_confidence_head and markov_rank > 0")
    if self.model.family != "qwen3":
      raise ConfigError(f"a drafter's layers are of the qwen3 family in the published layout, not {self.model.family!r}")
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
    confidence, rank = bool(config.get("enable_confidence_head", False)), config.get("markov_rank") or 0
    published = config.get("markov_head_type", "vanilla")
    if rank and published not in _DEEPSPEC_HEADS:
      raise ConfigError(f"markov_head_type {published!r} is not supported; known: {', '.join(_DEEPSPEC_HEADS)}")
    return cls(
        model=ModelConfig.from_published(config), block=config["block_size"], mask_id=config["mask_token_id"],
        taps=tuple(config["target_layer_ids"]), target_layers=config["num_target_layers"],
        head=_DEEPSPEC_HEADS[published] if rank else "none", rank=rank, confidence=confidence,
        confidence_with_head=confidence and bool(config.get("confidence_head_with_markov", False)),
        anchors=config.get("num_anchors") or 512, tokenizer_hash=config.get("tokenizer_hash"))

  @classmethod
  def _from_dflash(cls, config: Mapping[str, Any]) -> "DrafterConfig":
    own = config["dflash_config"]
    block = own.get("block_size", config.get("block_size"))
    if config.get("block_size", block) != block:
      raise ConfigError(f"block_size is {config['block_size']} at the top level and {block} in dflash_config")
    given = ("target_layer_ids",) if own.get("target_layer_ids") else ()
    _need({**config, **own, "block_size": block}, "block_size", "mask_token_id", "num_target_layers", *given)
    if config.get("is_causal"):
      raise ConfigError("is_causal is true: a block drafter's attention is not causal")
    model = ModelConfig.from_published({**config, "tie_word_embeddings": False})
    layers = config["num_target_layers"]
    rank = own.get("selector_rank") or own.get("head_rank") or 0
    return cls(
        model=model, block=block, mask_id=own.get("mask_token_id", config.get("mask_token_id")),
        taps=tuple(own.get("target_layer_ids") or spread_taps(layers, model.layers)), target_layers=layers,
        anchor_predicts=bool(own.get("anchor_predicts", False)), head=own.get("head", "selector" if rank else "none"), rank=rank,
        candidates=own.get("selector_top_k") or 0, conv=own.get("conv_kernel_size") or 0, conv_group=own.get("conv_group_size") or 16,
        confidence=bool(own.get("confidence", False)), confidence_with_head=bool(own.get("confidence_with_head", False)),
        own_embedding=False, anchors=config.get("num_anchors") or 512, tokenizer_hash=config.get("tokenizer_hash"))

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this drafter's layout: the backbone's config and the drafter's keys."""
    out = self.model.to_published(dtype) | {
        "tie_word_embeddings": False, "num_target_layers": self.target_layers, "block_size": self.block, "num_anchors": self.anchors}
    if self.tokenizer_hash:
      out["tokenizer_hash"] = self.tokenizer_hash
    return out | (self._to_deepspec() if self.layout == "deepspec" else self._to_dflash())

  def _to_deepspec(self) -> dict[str, Any]:
    out = {
        "architectures": ["Qwen3DSparkModel"], "mask_token_id": self.mask_id, "target_layer_ids": list(self.taps),
        "markov_rank": self.rank, "enable_confidence_head": self.confidence}
    if self.rank:
      out["markov_head_type"] = next(k for k, v in _DEEPSPEC_HEADS.items() if v == self.head)
    if self.confidence:
      out["confidence_head_with_markov"] = self.confidence_with_head
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
    kind = "mtp" if config.get("mtp") else "eagle3"
    if "markov_rank" in config or "dflash_config" in config:
      raise ConfigError("ttt_length beside a block drafter's keys: which drafter is this?")
    return cls(
        model=ModelConfig.from_published(config), kind=kind, taps=tuple(config["target_layer_ids"]), target_layers=config["num_target_layers"],
        steps=config["ttt_length"], step_decay=config.get("step_loss_decay") or 0.8, draft_vocab=config.get("draft_vocab_size") or 0,
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
