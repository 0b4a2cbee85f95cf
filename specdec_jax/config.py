"""Frozen descriptions of models and drafters, to and from the published config.json files."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.typing import Float

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
GEMMA = ("gemma4_text", "gemma4_unified_text")


class ConfigError(ValueError):
  """A config.json that cannot be honoured; the message names the key."""


@dataclasses.dataclass(frozen=True)
class Rotary:
  """Rotary position embedding: base, and the published rescalings of its frequencies.

  kind: "default", "linear", "llama3", "yarn" or "proportional"; `scaling` holds the keys of that kind as published.
  width: rotated channels of a head (the first ones); the rest passes through. Under "proportional" (Gemma 4) they are all
  paired, and only the first `partial_rotary_factor` of the pairs turn.
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
    if self.kind == "proportional":
      turning = np.arange(len(base)) < int(s["partial_rotary_factor"] * self.width // 2)
      return np.where(turning, base / s.get("factor", 1.0), 0.0).astype(np.float32), 1.0
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
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), "proportional": (),
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
  older, kind = merged.pop("type", None), merged.pop("rope_type", None)  # Some releases wrote both.
  kind = kind or older or "default"
  if kind not in _ROTARY_NEEDS:
    raise ConfigError(f"rope_type {kind!r} is not supported; known: {', '.join(_ROTARY_NEEDS)}")
  if kind == "yarn":
    merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
  missing = [k for k in _ROTARY_NEEDS[kind] if merged.get(k) is None]
  if missing:
    raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}")
  share = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
  if kind == "proportional":
    factor = merged.pop("factor", None) or 1.0
    scaling = (("partial_rotary_factor", float(share)), *((("factor", float(factor)),) if factor != 1.0 else ()))
    return Rotary(float(theta), head_dim, kind, scaling)
  keys = [k for k in (*_ROTARY_NEEDS[kind], *_ROTARY_OPTIONS) if merged.get(k) is not None]
  unknown = [k for k, v in merged.items() if k not in keys and k != "original_max_position_embeddings" and v is not None]
  if unknown:
    raise ConfigError(f"rotary settings {', '.join(sorted(unknown))} are not supported for rope_type {kind!r}")
  return Rotary(float(theta), int(head_dim * share), kind, tuple((k, merged[k]) for k in keys if kind != "default"))


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
      raise ConfigError(f"architecture {config.get('architectures')} (model_type {family!r}) is not supported; known: {', '.join(FAMILIES)}")
    need = functools.partial(_required, config)
    heads, width, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
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
    kinds = ["linear_attention" if i in self.recurrent else "sliding_attention" if w else "full_attention" for i, w in enumerate(self.windows)]
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
  return {"architectures": config.get("architectures"), **outer, **{k: v for k, v in inner.items() if v is not None or k not in outer}, **tied}


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
  recurrent = tuple(i for i, t in enumerate(types) if t == "linear_attention")
  delta = DeltaConfig(**{mine: _required(config, theirs) for mine, theirs in _DELTA_KEYS.items()}) if recurrent else None
  if delta and (delta.value_heads % delta.key_heads or delta.conv < 2):
    raise ConfigError(
        f"linear_num_value_heads {delta.value_heads} must be a multiple of linear_num_key_heads {delta.key_heads}, "
        f"linear_conv_kernel_dim {delta.conv} at least 2")
  rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}  # The older spelling, and today's.
  rope = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
  rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 0.25)  # As the published class does.
  rotary = rotary_from_published({**config, "rope_scaling": None, "rope_parameters": rope}, head_dim)
  return {"rotary": rotary, "recurrent": recurrent, "delta": delta}


_GEMMA_NEUTRAL = {
    "hidden_size_per_layer_input": (0,), "enable_moe_block": (False,), "num_kv_shared_layers": (0,),
    "use_bidirectional_attention": (False, "vision")}  # use_double_wide_mlp is of layers with shared caches only.


def _gemma(config: Mapping[str, Any], types: Sequence[str], head_dim: int, kv_heads: int) -> dict[str, Any]:
  """Those of Gemma 4. Raises ConfigError for parts that are not built: inputs by layer, experts, shared caches …"""
  del types
  for key, neutral in _GEMMA_NEUTRAL.items():
    if config.get(key) is not None and config[key] not in neutral:
      raise ConfigError(f"{key} {config[key]!r} is not supported for model_type {config['model_type']!r}")
  rope = config.get("rope_parameters") or {}
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
      "logit_cap": config.get("final_logit_softcapping")}


_LAYER_TYPES = {"qwen3_5_text": ("full_attention", "linear_attention")}


def _layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str]:
  """Kinds of the layers, with the defaults of the published configuration classes."""
  family, types = config["model_type"], config.get("layer_types")
  if types is None:
    if family in GEMMA:
      raise ConfigError("config.json lacks 'layer_types'")
    if family == "qwen3_5_text":
      every = config.get("full_attention_interval") or 4
      types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    else:
      first = config.get("max_window_layers", 28) if _window(config) is not None else layers
      types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
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
    gemma = self.model.family in GEMMA
    out = {
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"], "mask_token_id": self.mask_id, "target_layer_ids": list(self.taps),
        "markov_rank": self.rank, "enable_confidence_head": self.confidence}
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
