"""GGUF files of llama.cpp in published terms: config.json keys, published tensor names and row order, a tokenizer."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from specdec_jax.config import FAMILIES, ConfigError, rotary_from_published
from specdec_jax.data.tokenizer import Tokenizer
from specdec_jax.hub.layout import TensorError

_ARCHITECTURES = ("llama", "qwen3")
_CONFIG_KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "max_position_embeddings": "context_length", "vocab_size": "vocab_size",
}
# Each of these changes the function that is computed, and a published Llama or Qwen3 config has no key for it.
_REFUSED = (
    "attention.sliding_window", "attention.scale", "attention.temperature_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale", "residual_scale", "embedding_scale",
)
_YARN_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type

# The splits of the published tokenizer.json files: Qwen2 takes single digits, Llama 3 up to three.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SPLITS = {"smollm": None, "gpt-2": None, "qwen2": _SPLIT % "", "llama-bpe": _SPLIT % "{1,3}"}


class GGUFFile:
  """An open GGUF file.

  config: in the spelling of a published config.json; a key that the file lacks is left out.
  shapes: shape of each tensor by published name, in published order; an unknown tensor keeps its GGUF name.
  """

  def __init__(self, reader):
    self._reader = reader
    self._tensors = {published_name(t.name): t for t in reader.tensors}
    self.shapes = {n: tuple(int(s) for s in reversed(t.shape)) for n, t in self._tensors.items()}
    self._last: tuple[str | None, np.ndarray | None] = (None, None)
    self.config = self._read_config()

  def metadata(self, key: str) -> Any:
    """One metadata value, or None."""
    field = self._reader.get_field(key)
    value = field.contents() if field is not None else None
    # Stored as float32: its shortest spelling is what was published (1e-05, not 9.999999747378752e-06).
    return float(str(np.float32(value))) if isinstance(value, float) else value

  def read(self, name: str) -> np.ndarray:
    """One tensor by published name, dequantised to float32. Raises TensorError for a type that gguf cannot dequantise."""
    from gguf import quants

    tensor = self._tensors[name]
    try:
      value = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shapes[name])
    except NotImplementedError as e:
      raise TensorError(f"{name} is stored as {tensor.tensor_type.name}, which gguf cannot dequantise") from e
    heads = self._permuted_heads(name)
    return _unpermute(value, heads) if heads else value

  def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor; the whole one is read and kept until another is asked for."""
    if self._last[0] != name:
      self._last = name, self.read(name)
    return self._last[1][index]

  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer with its chat template, or None where the file has none. Raises ConfigError for an unknown kind."""
    model, pre = self.metadata("tokenizer.ggml.model"), self.metadata("tokenizer.ggml.pre")
    if model in (None, "none"):
      return None
    if model != "gpt2":
      raise ConfigError(f"tokenizer.ggml.model {model!r} is not supported; known: gpt2")
    if pre not in _SPLITS:
      raise ConfigError(f"tokenizer.ggml.pre {pre!r} is not supported; known: {', '.join(_SPLITS)}")
    tokens = self.metadata("tokenizer.ggml.tokens")
    kinds = self.metadata("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend = _byte_bpe(pre, tokens, kinds, self.metadata("tokenizer.ggml.merges") or [])
    named = {n: self.metadata(f"tokenizer.ggml.{key}_token_id")
             for n, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))}
    special = {n: tokens[i] for n, i in named.items() if i is not None}
    return Tokenizer(backend, self.metadata("tokenizer.chat_template"), special)

  def _permuted_heads(self, name: str) -> int | None:
    """Heads whose rows llama.cpp stores interleaved: queries and keys of its "llama" architecture only."""
    kind = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
    if kind is None or self.config["model_type"] != "llama":
      return None
    heads = self.config["num_attention_heads"]
    return heads if kind[1] == "q" else self.config.get("num_key_value_heads", heads)

  def _read_config(self) -> dict[str, Any]:
    family = self.metadata("general.architecture")
    if family not in _ARCHITECTURES:
      raise ConfigError(f"general.architecture {family!r} is not supported; known: {', '.join(_ARCHITECTURES)}")
    if (self.metadata("split.count") or 1) > 1:
      raise ConfigError("split.count: a model in several GGUF files is not supported; merge them with gguf-split")
    refused = [f"{family}.{k}" for k in _REFUSED if self.metadata(f"{family}.{k}")]
    if refused:
      raise ConfigError(f"{', '.join(refused)}: not supported for architecture {family!r}")
    config = {"model_type": family, "architectures": [FAMILIES[family]], "hidden_act": "silu"}
    for published, key in _CONFIG_KEYS.items():
      value = self._same_in_all_layers(f"{family}.{key}")
      if value is not None:
        config[published] = value
    if "model.embed_tokens.weight" in self.shapes:
      config.setdefault("vocab_size", self.shapes["model.embed_tokens.weight"][0])
    self._check_head_sizes(config)
    scaling = self._rope_scaling(config)
    if scaling:
      config["rope_scaling"] = scaling
    config["tie_word_embeddings"] = "lm_head.weight" not in self.shapes
    config["attention_bias"] = any(n.endswith("_proj.bias") and ".self_attn." in n for n in self.shapes)
    config["mlp_bias"] = any(n.endswith("_proj.bias") and ".mlp." in n for n in self.shapes)
    return config | self._token_ids()

  def _same_in_all_layers(self, key: str) -> Any:
    value = self.metadata(key)
    if isinstance(value, list):
      if len(set(value)) != 1:
        raise ConfigError(f"{key} differs by layer: not supported")
      return value[0]
    return value

  def _check_head_sizes(self, config: Mapping[str, Any]) -> None:
    family, size = config["model_type"], config.get("head_dim")
    if size is None and config.get("hidden_size") and config.get("num_attention_heads"):
      size = config["hidden_size"] // config["num_attention_heads"]
    for key in (f"{family}.attention.value_length", f"{family}.rope.dimension_count"):
      value = self.metadata(key)
      if None not in (value, size) and value != size:
        raise ConfigError(f"{key} {value} differs from the head size {size}: not supported")

  def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
    prefix = f"{config['model_type']}.rope.scaling."
    kind = self.metadata(prefix + "type") or "linear"  # llama.cpp's default; it needs a factor to do anything.
    factor = self.metadata(prefix + "factor") or self.metadata(f"{config['model_type']}.rope.scale_linear")
    if _ROPE_FACTORS in self._tensors:
      if factor not in (None, 1.0):
        raise ConfigError(f"{_ROPE_FACTORS} together with {prefix}factor is not supported")
      return self._llama3_scaling(config)
    if kind == "none" or kind == "linear" and factor in (None, 1.0):
      return None
    if kind != "yarn":
      return {"rope_type": kind, "factor": factor}
    # llama.cpp multiplies YaRN's own attention factor by these, published configs replace it: no exact spelling.
    changed = [prefix + k for k, neutral in _YARN_NEUTRAL.items() if self.metadata(prefix + k) not in (None, neutral)]
    if changed:
      raise ConfigError(f"{', '.join(changed)}: not supported")
    keys = {"original_max_position_embeddings": "original_context_length", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    found = {k: self.metadata(prefix + v) for k, v in keys.items()}
    return {"rope_type": kind, "factor": factor} | {k: v for k, v in found.items() if v is not None}

  def _llama3_scaling(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rescaling from the divisors of its frequencies, the only form that a GGUF file has it in.

    Raises ConfigError unless the published settings of Llama 3.1 … 3.3 give these very divisors.
    """
    divisors = self.read(_ROPE_FACTORS)
    del self._tensors[_ROPE_FACTORS], self.shapes[_ROPE_FACTORS]
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    plain, scaled = (rotary_from_published({"rope_theta": config.get("rope_theta"), "rope_scaling": s}, 2 * divisors.size)
                     for s in (None, scaling))
    if not np.allclose(plain.frequencies()[0] / scaled.frequencies()[0], divisors, rtol=1e-5, atol=0):
      raise ConfigError(f"{_ROPE_FACTORS} holds frequency divisors other than those of Llama 3.1 … 3.3: not supported")
    return scaling

  def _token_ids(self) -> dict[str, Any]:
    bos, pad, *ends = (self.metadata(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "padding", "eos", "eot", "eom"))
    ends = list(dict.fromkeys(i for i in ends if i is not None))  # A turn may end with another token than a text.
    found = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None, "pad_token_id": pad}
    return {k: v for k, v in found.items() if v is not None}


def open_gguf(path: pathlib.Path) -> GGUFFile:
  """Opens a GGUF file; tensors are read from the mapped file when asked for.

  Raises ImportError without the package gguf, TensorError for an unreadable file, ConfigError for an unknown architecture.
  """
  try:
    import gguf
  except ImportError as e:
    raise ImportError("reading a .gguf file needs the package gguf: pip install specdec_jax[gguf]") from e
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError) as e:
    raise TensorError(f"{path} is not a readable GGUF file: {e}") from e
  return GGUFFile(reader)


def published_name(name: str) -> str:
  """The published name of a GGUF tensor; an unknown one is returned as it is."""
  stem, _, end = name.rpartition(".")
  if stem in _TENSORS:
    return f"{_TENSORS[stem]}.{end}"
  layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
  if layer and layer[2] in _LAYER_TENSORS:
    return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{end}"
  return name


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of each head from rotation pairs side by side (llama.cpp) to first halves, then second halves (published)."""
  pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
  return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _byte_bpe(pre: str, tokens: list[str], kinds: list[int], merges: list[str]) -> tokenizers.Tokenizer:
  """A byte-level BPE as the published tokenizer.json of this kind sets it up."""
  # Unused tokens pad the table to the rows of the embedding; no published tokenizer has them.
  vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
  if len(vocabulary) != len(tokens) - kinds.count(_UNUSED):
    raise ConfigError("tokenizer.ggml.tokens spells two tokens alike")
  pairs = [tuple(m.split(" ", 1)) for m in merges]
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
  steps = tokenizers.pre_tokenizers
  split = _SPLITS[pre]
  if split:
    first = [steps.Split(tokenizers.Regex(split), "isolated")]
  else:
    first = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
  backend.pre_tokenizer = steps.Sequence([*first, steps.ByteLevel(add_prefix_space=False, use_regex=not split)])
  if pre == "qwen2":
    backend.normalizer = tokenizers.normalizers.NFC()
  backend.decoder = tokenizers.decoders.ByteLevel()
  # In the order of ids, and in one call: both kinds are recognised inside text, decoding drops the special ones only.
  backend.add_tokens([tokenizers.AddedToken(t, special=kind != _USER_DEFINED, normalized=False)
                      for t, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)])
  return backend
