"""Frozen descriptions of targets, to and from the published config.json files."""

import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.config.error import ConfigError
from specdec_jax.config.rotary import Rotary, rotary_from_published, rotary_object

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
GEMMA = ("gemma4_text", "gemma4_unified_text")


@dataclasses.dataclass(frozen=True)
class FullAttention:
  """What layers without a window have instead, where they differ (Gemma 4). shared_kv: values are the keys before norm and rotary."""

  head_dim: int
  kv_heads: int
  rotary: Rotary
  shared_kv: bool = False


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
  """A gated delta net: heads and head sizes of keys and values, and the taps of its causal convolution."""

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  conv: int = 4

  @property
  def channels(self) -> int:
    """What the convolution runs over: queries, keys, values."""
    return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer of the Llama, Qwen3, Qwen3.5 (hybrid) or Gemma 4 family. Letters as in `specdec_jax.typing`."""

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
  recurrent: tuple[int, ...] = ()  # layers with a gated delta net in the place of attention
  delta: DeltaConfig | None = None  # of those layers
  full: FullAttention | None = None  # of layers without a window, where they differ
  shared_kv: bool = False
  logit_cap: float | None = None  # c in c · tanh(logits / c)

  @property
  def groups(self) -> int:
    """Query heads per key/value head, G."""
    return self.heads // self.kv_heads

  @property
  def gated(self) -> bool:
    """Whether attention's output is multiplied by a sigmoid gate of its input (Qwen3.5)."""
    return self.family == "qwen3_5_text"

  @property
  def norm_offset(self) -> float:
    """What is added to the scale of a norm before it multiplies (Qwen3.5)."""
    return 1.0 if self.family == "qwen3_5_text" else 0.0

  @property
  def sandwich(self) -> bool:
    """Gemma 4's layer: norms behind both sublayers too, values normed, scores not scaled, the output times a scalar."""
    return self.family in GEMMA

  @property
  def score_scale(self) -> float | None:
    """What attention scores are multiplied by; None for 1/√H."""
    return 1.0 if self.sandwich else None

  @property
  def embedding_scale(self) -> float:
    """What embeddings are multiplied by."""
    return self.width**0.5 if self.sandwich else 1.0

  def layer(self, i: int) -> "ModelConfig":
    """The model of whose layers layer i is one, where layers differ in their heads."""
    if self.full is None or self.windows[i] is not None:
      return self
    return dataclasses.replace(self, **{f.name: getattr(self.full, f.name) for f in dataclasses.fields(self.full)}, full=None)

  def plain(self, layers: int = 1, window: int | None = None) -> "ModelConfig":
    """A model of these sizes in the Qwen3 form, every layer with whole rotary attention: what drafters are made of."""
    rotary = Rotary(self.rotary.theta, self.head_dim) if self.recurrent or self.full else self.rotary
    return dataclasses.replace(
        self, family="qwen3", qk_norm=True, layers=layers, windows=(window,) * layers, tied=False, rotary=rotary, recurrent=(), delta=None,
        full=None, shared_kv=False, logit_cap=None)

  @property
  def uniform(self) -> bool:
    """Whether all layers have parameters of one form."""
    return not self.recurrent and len({self.layer(i) for i in range(self.layers)}) == 1

  @classmethod
  def from_published(cls, config: Mapping[str, Any]) -> "ModelConfig":
    """From the parsed config.json of a checkpoint, of several modalities (`text_config`) too. Raises ConfigError naming what is
    unknown or missing."""
    config = text_config(config)
    family = config.get("model_type")
    if family not in FAMILIES:
      raise ConfigError(
          f"architecture {config.get('architectures')} (model_type {family!r}) is not supported; known: {', '.join(FAMILIES)}")
    need = functools.partial(_required, config)
    for key in _SIZES:
      _check_size(config, key)
    for key in _FLAGS:
      if not isinstance(config.get(key), bool | None):
        raise ConfigError(f"{key} {config[key]!r} must be true or false")
    heads, width, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    if config.get("head_dim") is None and width % heads:
      raise ConfigError(f"config.json lacks 'head_dim', and hidden_size {width} is no multiple of num_attention_heads {heads}")
    head_dim = config.get("head_dim") or width // heads
    kv_heads = config.get("num_key_value_heads") or heads
    gemma = family in GEMMA
    key, usual = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    activation = config.get(key) or usual
    if activation not in ACTIVATIONS:
      raise ConfigError(f"{key} {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    types = _layer_types(config, layers)
    own = {"qwen3_5_text": _hybrid, **dict.fromkeys(GEMMA, _gemma)}.get(family, _plain)(config, types, head_dim, kv_heads)
    for k in (kv_heads, own["full"].kv_heads if own.get("full") else kv_heads):
      if heads % k:
        raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {k}")
    return cls(
        family=family, vocab=need("vocab_size"), width=width, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, mlp=need("intermediate_size"), max_positions=need("max_position_embeddings"), windows=_windows(config, types),
        norm_eps=need("rms_norm_eps"), qk_norm=family != "llama", tied=bool(config.get("tie_word_embeddings", gemma)),
        attention_bias=bool(config.get("attention_bias", False)), mlp_bias=bool(config.get("mlp_bias", False)),
        activation=activation, init_scale=config.get("initializer_range", 0.02), bos=config.get("bos_token_id"),
        eos=ids(config.get("eos_token_id")), pad=config.get("pad_token_id"), **own)

  def to_published(self, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this model, in the spelling of transformers 5. Raises ConfigError for layers of different windows,
    which it cannot say."""
    if len({w for w in self.windows if w}) > 1:
      raise ConfigError(f"layers with different sliding windows {self.windows} have no published spelling")
    kinds = [
        "linear_attention" if i in self.recurrent else "sliding_attention" if w else "full_attention"
        for i, w in enumerate(self.windows)]
    out = {
        "architectures": [FAMILIES[self.family]], "model_type": self.family, "vocab_size": self.vocab,
        "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
        "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.mlp,
        "hidden_act": self.activation, "rms_norm_eps": self.norm_eps, "rope_parameters": self.rotary.published(self.head_dim),
        "max_position_embeddings": self.max_positions, "tie_word_embeddings": self.tied,
        "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias, "initializer_range": self.init_scale,
        "layer_types": kinds, "sliding_window": next((w for w in self.windows if w), None), "use_sliding_window": any(self.windows),
        "bos_token_id": self.bos, "eos_token_id": list(self.eos) if len(self.eos) > 1 else next(iter(self.eos), None),
        "pad_token_id": self.pad, "dtype": dtype, "use_cache": True, "attention_dropout": 0.0}
    if self.family == "qwen3_5_text":
      out["rope_parameters"]["partial_rotary_factor"] = self.rotary.width / self.head_dim
    if self.delta:
      out |= {theirs: getattr(self.delta, mine) for mine, theirs in _DELTA_KEYS.items()}
    if self.family in GEMMA:
      for key in ("hidden_act", "use_sliding_window", "mlp_bias"):
        del out[key]
      f = self.full
      out |= {
          "hidden_activation": self.activation, "final_logit_softcapping": self.logit_cap, "attention_k_eq_v": f.shared_kv,
          "global_head_dim": f.head_dim, "num_global_key_value_heads": f.kv_heads if f.shared_kv else None,
          "rope_parameters": {
              "full_attention": f.rotary.published(f.head_dim), "sliding_attention": self.rotary.published(self.head_dim)},
          "hidden_size_per_layer_input": 0, "enable_moe_block": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    return out


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The text decoder's config inside one of several modalities; the config itself where there is no such nesting. Token ids and
  tying that only the outer one states hold for it."""
  inner = config.get("text_config")
  if not isinstance(inner, Mapping):
    return config
  outer = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
  tied = {} if config.get("tie_word_embeddings") is None else {"tie_word_embeddings": config["tie_word_embeddings"]}
  return {
      "architectures": config.get("architectures"), **outer,
      **{k: v for k, v in inner.items() if v is not None or k not in outer}, **tied}


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "global_head_dim", "num_global_key_value_heads", "full_attention_interval")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "attention_k_eq_v")


def _check_size(config: Mapping[str, Any], key: str) -> None:
  """Raises ConfigError for what is there and no integer from 1."""
  value = config.get(key)
  if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
    raise ConfigError(f"{key} {value!r} must be an integer of at least 1")


def _required(config: Mapping[str, Any], key: str) -> Any:
  if config.get(key) is None:
    raise ConfigError(f"config.json lacks {key!r}")
  return config[key]


def _plain(config: Mapping[str, Any], types: Sequence[str], head_dim: int, kv_heads: int) -> dict[str, Any]:
  """The fields that Llama and Qwen3 have of their own."""
  del types, kv_heads
  return {"rotary": _whole_heads(config, head_dim)}


def _whole_heads(config: Mapping[str, Any], head_dim: int) -> Rotary:
  """Rotary settings of a family whose published class rotates whole heads, whatever partial factor it is given. Raises ConfigError
  where there is one: heads rotated in part would be another model, and overlooking the key a silent replacement."""
  rotary = rotary_from_published(config, head_dim)
  if rotary.width != head_dim:
    share = rotary.width / head_dim
    raise ConfigError(f"partial_rotary_factor {share} is not supported for model_type {config['model_type']!r}, which rotates whole heads")
  return rotary


_DELTA_KEYS = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "conv": "linear_conv_kernel_dim"}


def _hybrid(config: Mapping[str, Any], types: Sequence[str], head_dim: int, kv_heads: int) -> dict[str, Any]:
  """Those of Qwen3.5: gated delta nets, and rotary settings whose mrope sections text does not tell apart."""
  del kv_heads
  if config.get("attn_output_gate", True) is not True:
    raise ConfigError(f"attn_output_gate {config['attn_output_gate']!r} is not supported: attention is gated in this family")
  if "full_attention" not in types:
    raise ConfigError("layer_types has no full_attention")
  for key in _DELTA_KEYS.values():
    _check_size(config, key)
  recurrent = tuple(i for i, t in enumerate(types) if t == "linear_attention")
  delta = DeltaConfig(**{mine: _required(config, theirs) for mine, theirs in _DELTA_KEYS.items()}) if recurrent else None
  if delta and (delta.value_heads % delta.key_heads or delta.conv < 2):
    raise ConfigError(
        f"linear_num_value_heads {delta.value_heads} must be a multiple of linear_num_key_heads {delta.key_heads}, "
        f"linear_conv_kernel_dim {delta.conv} at least 2")
  rope = {**rotary_object(config, "rope_scaling"), **rotary_object(config, "rope_parameters")}  # The older spelling, and today's.
  rope = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
  share = config.get("partial_rotary_factor")
  rope.setdefault("partial_rotary_factor", 0.25 if share is None else share)  # As the published class does.
  rotary = rotary_from_published({**config, "rope_scaling": None, "rope_parameters": rope}, head_dim)
  return {"rotary": rotary, "recurrent": recurrent, "delta": delta}


# use_double_wide_mlp is of layers with shared caches only.
_GEMMA_NEUTRAL = {
    "hidden_size_per_layer_input": (0,), "enable_moe_block": (False,), "num_kv_shared_layers": (0,),
    "attn_logit_softcapping": (), "use_bidirectional_attention": (False, "vision")}


def _gemma(config: Mapping[str, Any], types: Sequence[str], head_dim: int, kv_heads: int) -> dict[str, Any]:
  """Those of Gemma 4. Raises ConfigError for parts that are not built: inputs by layer, experts, shared caches …"""
  del types
  for key, neutral in _GEMMA_NEUTRAL.items():
    if config.get(key) is not None and config[key] not in neutral:
      raise ConfigError(f"{key} {config[key]!r} is not supported for model_type {config['model_type']!r}")
  cap = config.get("final_logit_softcapping")
  if cap is not None and not (isinstance(cap, numbers.Real) and cap > 0):
    raise ConfigError(f"final_logit_softcapping {cap!r} must be a number above 0, or null for none")
  rope = rotary_object(config, "rope_parameters")
  shared = bool(config.get("attention_k_eq_v", False))
  full_heads = (config.get("num_global_key_value_heads") or kv_heads) if shared else kv_heads
  full_dim = config.get("global_head_dim") or head_dim
  rotary = {}
  for kind, size in (("sliding_attention", head_dim), ("full_attention", full_dim)):
    if not isinstance(rope.get(kind), Mapping):
      raise ConfigError(f"no rotary base: rope_parameters lacks {kind!r}")
    rotary[kind] = _whole_heads({**config, "rope_parameters": rope[kind]}, size)
  return {
      "rotary": rotary["sliding_attention"], "full": FullAttention(full_dim, full_heads, rotary["full_attention"], shared),
      "logit_cap": cap}


_LAYER_TYPES = {"qwen3_5_text": ("full_attention", "linear_attention")}


def _layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str]:
  """Kinds of the layers, with the defaults of the published configuration classes."""
  family, types = config["model_type"], config.get("layer_types")
  if types is None:
    if family in GEMMA:
      raise ConfigError("config.json lacks 'layer_types'")
    if family == "qwen3_5_text":
      every = 4 if config.get("full_attention_interval") is None else config["full_attention_interval"]
      types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    else:
      first = config.get("max_window_layers", 28) if _window(config) is not None else layers
      types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
  if not isinstance(types, list | tuple) or not all(isinstance(t, str) for t in types):
    raise ConfigError(f"layer_types must be a list of names, not {str(types)[:60]}")
  unknown = sorted(set(types) - set(_LAYER_TYPES.get(family, ("full_attention", "sliding_attention"))))
  if unknown:
    where = [i for i, t in enumerate(types) if t in unknown]
    raise ConfigError(f"layer_types {', '.join(unknown)} (layers {where}) are not supported for model_type {family!r}")
  if len(types) != layers:
    raise ConfigError(f"layer_types has {len(types)} entries for {layers} layers")
  return types


def _window(config: Mapping[str, Any]) -> int | None:
  """The sliding window in force: only Qwen3 and Gemma have any, and Qwen3 where it is switched on."""
  family = config["model_type"]
  on = family in GEMMA or family == "qwen3" and config.get("use_sliding_window", False)
  return config.get("sliding_window") if on else None


def _windows(config: Mapping[str, Any], types: Sequence[str]) -> tuple[int | None, ...]:
  window = _window(config)
  if "sliding_attention" in types and window is None:
    raise ConfigError("layer_types has sliding_attention, but sliding_window is missing, switched off or unknown to this model_type")
  if "sliding_attention" in types:
    _check_size(config, "sliding_window")
  return tuple(window if t == "sliding_attention" else None for t in types)


def ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
  """A published token id field (absent, one id or a list) as a tuple. Raises ConfigError for anything else."""
  found = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
  if not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in found):
    raise ConfigError(f"{value!r} is no token id, nor a list of some")
  return found
