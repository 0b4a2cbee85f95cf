"""GGUF files, written here the way that llama.cpp writes them, against the weights and tokenizers that went in."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax.config import ConfigError, ModelConfig
from specdec_jax.data.tokenizer import train_bpe
from specdec_jax.hub import folder, layout
from specdec_jax.hub.gguf import open_gguf
from specdec_jax.models.decoder import Decoder

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

CORPUS = ["A shop sells 3 pens for 2 dollars; 12 pens cost 8 dollars.\n", "def f(n):\n    return n + 1  # naïve\n"] * 4
TEXTS = ["It costs 1234567 dollars.", "a\n\n\tb\n", "  naïve — 漢字 ½²",
         "<|im_start|>user\nAre 12 pens 8?<|im_end|>\n<|im_start|>assistant\n", "x<|mask|><|endoftext|>7<|im_end"]
TURNS = [{"role": "user", "content": "What is 6 * 7?"}]
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


@pytest.fixture(scope="module")
def bpe():
  return train_bpe(CORPUS, 300)


def published_config(family: str, **changes) -> dict:
  """4 query heads on 2 key heads of size 32 in a width of 64, so that neither is width / heads."""
  return {"model_type": family, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 32, "intermediate_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 128,
          "vocab_size": 300, "tie_word_embeddings": family == "qwen3", "attention_bias": False} | changes


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  entries = layout.decoder_entries(ModelConfig.from_published(config))
  return {n: rng.normal(size=e.shape, scale=0.2).astype(np.float32) for e in entries for n in e.names}


def gguf_name(name: str) -> str:
  stem, end = name.rsplit(".", 1)
  if not stem.startswith("model.layers."):
    return f"{NAMES[stem]}.{end}"
  index, part = stem.removeprefix("model.layers.").split(".", 1)
  return f"blk.{index}.{NAMES[part]}.{end}"


def interleaved(name: str, value: np.ndarray, config: dict) -> np.ndarray:
  """llama.cpp's row order for architecture "llama": row 2i of a head is its published row i, row 2i+1 is row i + half."""
  if config["model_type"] != "llama" or ".q_proj." not in name and ".k_proj." not in name:
    return value
  half = config["head_dim"] // 2
  out = value.copy()
  for first in range(0, len(value), 2 * half):
    for i in range(half):
      out[first + 2 * i], out[first + 2 * i + 1] = value[first + i], value[first + i + half]
  return out


def write(
    path, config: dict, tensors: dict, *, bpe=None, pre="smollm", quantised=(), extra=(), skip=(),
    model="gpt2", kinds=None, merges=None,
):
  """Writes a GGUF file. extra: (method of GGUFWriter, *arguments); skip: config keys left out."""
  writer = gguf.GGUFWriter(path, config["model_type"])
  for key, method in (
      ("max_position_embeddings", "add_context_length"), ("hidden_size", "add_embedding_length"), ("num_hidden_layers", "add_block_count"),
      ("intermediate_size", "add_feed_forward_length"), ("num_attention_heads", "add_head_count"), ("rope_theta", "add_rope_freq_base"),
      ("num_key_value_heads", "add_head_count_kv"), ("rms_norm_eps", "add_layer_norm_rms_eps"), ("head_dim", "add_key_length")):
    if key not in skip:
      getattr(writer, method)(config[key])
  if bpe is not None:
    spec = json.loads(bpe.backend.to_str())
    tokens = [t for t, _ in sorted(bpe.backend.get_vocab().items(), key=lambda x: x[1])]
    added = {t["content"] for t in spec["added_tokens"]}
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + ["[PAD300]"])
    writer.add_token_types((kinds or [3 if t in added else 1 for t in tokens]) + [5])
    writer.add_token_merges([" ".join(m) for m in spec["model"]["merges"]] if merges is None else merges)
    writer.add_eos_token_id(bpe.id("<|im_end|>"))
    writer.add_pad_token_id(bpe.id("<|endoftext|>"))
    writer.add_chat_template(bpe.chat_template)
  for method, *arguments in extra:
    getattr(writer, method)(*arguments)
  for name, value in tensors.items():
    value = interleaved(name, value, config)
    name = gguf_name(name) if name.rsplit(".", 1)[0] in NAMES or name.startswith("model.") else name
    if name in quantised:
      writer.add_tensor(name, gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
      writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def logits(config: dict, shapes, read) -> np.ndarray:
  model = ModelConfig.from_published(config)
  params = layout.build(layout.decoder_entries(model), shapes, read, transposed=False)
  decoder, tokens = Decoder(model, stacked=False), jnp.arange(12).reshape(2, 6) * 17 % model.vocab
  return decoder.apply({"params": params}, tokens, method=lambda d, t: d.logits(d(t)[0]))


@pytest.mark.parametrize("family,bias", [("llama", False), ("llama", True), ("qwen3", False)])
def test_config_tensors_and_logits_are_the_originals(family, bias, tmp_path):
  config = published_config(family, attention_bias=bias)
  tensors = random_tensors(config)
  file = open_gguf(write(tmp_path / "m.gguf", config, tensors))
  assert ModelConfig.from_published(file.config) == ModelConfig.from_published(config)
  assert file.shapes == {n: t.shape for n, t in tensors.items()}
  for name, value in tensors.items():
    np.testing.assert_array_equal(file.read(name), value, err_msg=name)
  direct = logits(config, {n: t.shape for n, t in tensors.items()}, tensors.__getitem__)
  assert np.std(direct) > 0.1
  np.testing.assert_allclose(logits(file.config, file.shapes, file.read), direct, atol=1e-5)


def test_dequantises_to_within_a_step(tmp_path):
  config = published_config("llama")
  tensors = random_tensors(config)
  names = ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"]
  file = open_gguf(write(tmp_path / "m.gguf", config, tensors, quantised={gguf_name(n) for n in names}))
  assert ModelConfig.from_published(file.config) == ModelConfig.from_published(config)
  for name in names:
    read = file.read(name)
    assert read.dtype == np.float32 and read.shape == tensors[name].shape
    blocks, found = tensors[name].reshape(-1, 32), read.reshape(-1, 32)  # Q8_0: 32 weights share a float16 step.
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    assert (np.abs(found - blocks) <= 0.6 * step).all()
    assert (found != blocks).any()


def test_tokenizer_is_the_original(bpe, tmp_path):
  file = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe))
  tokenizer = file.tokenizer()
  for text in TEXTS:
    assert tokenizer.encode(text) == bpe.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == bpe.decode(bpe.encode(text))
  assert tokenizer.chat(TURNS) == bpe.chat(TURNS)
  assert tokenizer.special == bpe.special
  assert tokenizer.fingerprint() == bpe.fingerprint() and tokenizer.vocab == 300  # The padding token is left out.
  assert file.config["eos_token_id"] == bpe.id("<|im_end|>") and file.config["pad_token_id"] == bpe.id("<|endoftext|>")


def test_user_defined_tokens_stay_in_decoded_text(bpe, tmp_path):
  kinds = [1] * 300
  kinds[bpe.id("<|im_start|>")], kinds[bpe.id("<|mask|>")] = 3, 4
  tokenizer = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe, kinds=kinds)).tokenizer()
  ids = tokenizer.encode("<|im_start|>a<|mask|>")
  assert ids == [bpe.id("<|im_start|>"), bpe.id("a"), bpe.id("<|mask|>")]
  assert tokenizer.decode(ids) == "a<|mask|>"


@pytest.mark.parametrize("pre,pieces", [
    ("gpt-2", ["I", "'", "LL", " pay", " 12345", "!", "Ċ", "Ċ", "now"]),
    ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!", "Ċ", "Ċ", "now"]),
    ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!ĊĊ", "now"]),
    ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "!ĊĊ", "now"]),
])
def test_text_is_split_as_the_kind_says(pre, pieces, bpe, tmp_path):
  tokenizer = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe, pre=pre)).tokenizer()
  found = tokenizer.backend.pre_tokenizer.pre_tokenize_str("I'LL pay 12345!\n\nnow")
  assert [piece.replace("Ġ", " ") for piece, _ in found] == pieces
  assert tokenizer.decode(tokenizer.encode("I'LL pay 12345!\n\nnow")) == "I'LL pay 12345!\n\nnow"


@pytest.mark.parametrize("pre,whole", [("llama-bpe", True), ("qwen2", False)])
def test_a_whole_piece_needs_no_merges(pre, whole, bpe, tmp_path):
  tokenizer = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe, pre=pre, merges=["d o"])).tokenizer()
  word = "Ġdollars"
  assert bpe.id(word)
  assert (tokenizer.encode(" dollars") == [bpe.id(word)]) == whole


def test_qwen2_composes_characters(bpe, tmp_path):
  tokenizer = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe, pre="qwen2")).tokenizer()
  assert tokenizer.decode(tokenizer.encode("nai\u0308ve")) == "na\u00efve"


def test_a_turn_may_have_its_own_end(bpe, tmp_path):
  extra = [("add_eot_token_id", bpe.id("<|endoftext|>"))]
  file = open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, bpe=bpe, extra=extra))
  assert file.config["eos_token_id"] == [bpe.id("<|im_end|>"), bpe.id("<|endoftext|>")]


@pytest.mark.parametrize("extra,scaling", [
    ([("add_rope_scaling_type", gguf.RopeScalingType.NONE)], None),
    ([("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)], {"rope_type": "linear", "factor": 4.0}),
    ([("add_rope_scaling_type", gguf.RopeScalingType.YARN), ("add_rope_scaling_factor", 4.0), ("add_rope_scaling_orig_ctx_len", 32)],
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
])
def test_rotary_scaling(extra, scaling, tmp_path):
  config = published_config("qwen3")
  file = open_gguf(write(tmp_path / "m.gguf", config, random_tensors(config), extra=extra))
  assert ModelConfig.from_published(file.config) == ModelConfig.from_published(config | {"rope_scaling": scaling})


def llama3_divisors(theta: float, factor: float) -> np.ndarray:
  """One divisor for each pair of a head of size 32, by wavelength, as llama.cpp's converter computes them."""
  out = []
  for i in range(16):
    wavelength = 2 * np.pi * theta ** (i / 16)
    if wavelength < 8192 / 4:
      out.append(1.0)
    elif wavelength > 8192 / 1:
      out.append(factor)
    else:
      smooth = (8192 / wavelength - 1) / (4 - 1)
      out.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(out, np.float32)


def test_llama3_rotary_is_recovered_from_its_divisors(tmp_path):
  config = published_config("llama")
  divisors = llama3_divisors(50000.0, 8.0)
  assert len(set(divisors.tolist())) > 2  # Kept, blended and divided ones.
  file = open_gguf(write(tmp_path / "m.gguf", config, random_tensors(config) | {"rope_freqs.weight": divisors}))
  rotary = ModelConfig.from_published(file.config).rotary
  plain = 50000.0 ** -(np.arange(16) / 16)
  np.testing.assert_allclose(rotary.frequencies()[0], plain / divisors, rtol=1e-6)
  assert "rope_freqs.weight" not in file.shapes
  divisors[8] *= 1.01
  with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
    open_gguf(write(tmp_path / "other.gguf", config, {"rope_freqs.weight": divisors}))


@pytest.mark.parametrize("extra,named", [
    ([("add_sliding_window", 16)], "attention.sliding_window"),
    ([("add_rope_dimension_count", 16)], "rope.dimension_count"),
    ([("add_rope_scaling_type", gguf.RopeScalingType.YARN), ("add_rope_scaling_factor", 4.0), ("add_rope_scaling_attn_factors", 0.5)],
     "rope.scaling.attn_factor"),
])
def test_what_would_change_the_function_is_refused(extra, named, tmp_path):
  with pytest.raises(ConfigError, match=named):
    open_gguf(write(tmp_path / "m.gguf", published_config("llama"), {}, extra=extra))


def test_unknown_architecture(tmp_path):
  with pytest.raises(ConfigError, match="'mamba'.*known: llama, qwen3"):
    open_gguf(write(tmp_path / "m.gguf", published_config("mamba"), {}))


def test_no_rotary_base(tmp_path):
  config = published_config("llama")
  file = open_gguf(write(tmp_path / "m.gguf", config, random_tensors(config), skip={"rope_theta"}))
  with pytest.raises(ConfigError, match="no rotary base"):
    ModelConfig.from_published(file.config)


def test_unknown_tokenizers(bpe, tmp_path):
  config = published_config("llama")
  with pytest.raises(ConfigError, match="'tekken'.*known: smollm, gpt-2, qwen2, llama-bpe"):
    open_gguf(write(tmp_path / "pre.gguf", config, {}, bpe=bpe, pre="tekken")).tokenizer()
  with pytest.raises(ConfigError, match="model 'bert'.*known: gpt2"):
    open_gguf(write(tmp_path / "model.gguf", config, {}, bpe=bpe, model="bert")).tokenizer()
  assert open_gguf(write(tmp_path / "none.gguf", config, {})).tokenizer() is None


def test_missing_and_unknown_tensors_are_named(tmp_path):
  config = published_config("llama")
  tensors = random_tensors(config)
  tensors.pop("model.layers.1.mlp.up_proj.weight")
  tensors["blk.1.ffn_gate_exps.weight"] = np.zeros((4, 32), np.float32)
  file = open_gguf(write(tmp_path / "m.gguf", config, tensors))
  with pytest.raises(layout.TensorError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight.*extra: blk\.1\.ffn_gate_exps\.weight"):
    logits(file.config, file.shapes, file.read)


def test_unreadable_files(tmp_path):
  whole = write(tmp_path / "m.gguf", published_config("llama"), random_tensors(published_config("llama"))).read_bytes()
  for name, content in {"text": b"not a GGUF file at all, but long enough", "cut": whole[:-1000], "head": whole[:40], "empty": b""}.items():
    (tmp_path / name).write_bytes(content)
    with pytest.raises(layout.TensorError, match=name):
      open_gguf(tmp_path / name)
  with pytest.raises(FileNotFoundError):
    open_gguf(tmp_path / "absent.gguf")


def test_without_the_package(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(ImportError, match=r"pip install specdec_jax\[gguf\]"):
    open_gguf(tmp_path / "m.gguf")


def test_a_file_loads_and_decodes_like_its_folder(bpe, tmp_path):
  """`load_target` on the file, in every layout, against the same tensors saved as a published folder."""
  config = published_config("llama", vocab_size=bpe.vocab + 1)
  tensors = random_tensors(config)
  folder.save(tmp_path / "folder", config, tensors)
  plain = specdec_jax.load_target(tmp_path / "folder")
  prompts = [bpe.encode("def f(x):"), bpe.encode("12")]
  expected = [c.tokens for c in specdec_jax.generate(plain, None, prompts, 12, ignore_eos=True)]
  path = write(tmp_path / "m.gguf", config, tensors, bpe=bpe)
  for options in ({}, {"stacked": False, "transposed": False}):
    target = specdec_jax.load_target(path, **options)
    done = specdec_jax.generate(target, None, ["def f(x):", "12"], 12, ignore_eos=True)
    unpadded = [t[: next((i for i, x in enumerate(t) if x >= bpe.vocab), len(t))] for t in expected]
    assert [c.tokens[: len(t)] for c, t in zip(done, unpadded)] == unpadded
