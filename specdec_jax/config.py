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
    """The config.json of this model, in the spelling of transformers 5."""
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


MARKOV_HEADS = ("vanilla",)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """A block drafter: a backbone that reads target features, and the heads on it (ALGORITHMS: DFlash, DSpark).

  block: input slots of one block [anchor, mask, …]; every slot predicts, so γ = block.
  taps: target layers whose outputs are the context features; -1 is the embedding output.
  """

  model: ModelConfig
  block: int
  mask_id: int
  taps: tuple[int, ...]
  target_layers: int
  markov_rank: int = 0  # R; 0 for no sequential head
  markov_head: str = "vanilla"
  confidence: bool = False
  confidence_with_markov: bool = True
  anchors: int = 512  # A, blocks a training sequence

  @property
  def draft_length(self) -> int:
    """γ, the draft tokens of a full proposal."""
    return self.block

  def __post_init__(self):
    m = self.mask_id
    if not 0 <= m < self.model.vocab:
      raise ConfigError(f"mask_token_id {m} is outside the vocabulary of {self.model.vocab}")
    if m in self.model.eos or m == self.model.pad:
      raise ConfigError(f"mask_token_id {m} is also an end-of-sequence or padding id")
    if list(self.taps) != sorted(set(self.taps)) or not self.taps or self.taps[0] < -1 or self.taps[-1] >= self.target_layers - 1:
      raise ConfigError(
          f"target_layer_ids {list(self.taps)} must increase strictly, from -1 (embedding) to below the last of "
          f"{self.target_layers} target layers")
    if self.markov_rank and self.markov_head not in MARKOV_HEADS:
      raise ConfigError(f"markov_head_type {self.markov_head!r} is not supported; known: {', '.join(MARKOV_HEADS)}")
    if self.confidence and self.confidence_with_markov and not self.markov_rank:
      raise ConfigError("confidence_head_with_markov needs markov_rank > 0")
    if self.model.family != "qwen3":
      raise ConfigError(f"a drafter's layers are of the qwen3 family in the published layout, not {self.model.family!r}")
    if self.block < 1:
      raise ConfigError(f"block_size {self.block} must be at least 1")

  @classmethod
  def from_published(cls, config: Mapping[str, Any]) -> "DrafterConfig":
    """From a DeepSpec drafter's config.json (RELEASED_FORMATS §1.1). DFlash and DSpark share one class there: the heads
    are told by markov_rank and enable_confidence_head."""
    missing = [k for k in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers") if config.get(k) is None]
    if missing:
      raise ConfigError(f"the drafter's config.json lacks {', '.join(missing)}")
    foreign = [k for k in ("dflash_config", "projector_type") if k in config]
    if foreign:
      raise ConfigError(f"{', '.join(foreign)}: this is another drafter layout than DeepSpec's, and not supported")
    confidence = bool(config.get("enable_confidence_head", False))
    return cls(
        model=ModelConfig.from_published(config), block=config["block_size"], mask_id=config["mask_token_id"],
        taps=tuple(config["target_layer_ids"]), target_layers=config["num_target_layers"],
        markov_rank=config.get("markov_rank") or 0, markov_head=config.get("markov_head_type", "vanilla"),
        confidence=confidence, confidence_with_markov=confidence and bool(config.get("confidence_head_with_markov", False)),
        anchors=config.get("num_anchors") or 512)

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of DeepSpec's layout: the backbone's config and the drafter's keys, flat."""
    out = self.model.to_published(dtype) | {
        "architectures": ["Qwen3DSparkModel"], "tie_word_embeddings": False, "num_target_layers": self.target_layers,
        "block_size": self.block, "mask_token_id": self.mask_id, "target_layer_ids": list(self.taps),
        "num_anchors": self.anchors, "markov_rank": self.markov_rank, "enable_confidence_head": self.confidence}
    if self.markov_rank:
      out["markov_head_type"] = self.markov_head
    if self.confidence:
      out["confidence_head_with_markov"] = self.confidence_with_markov
    return out
