"""Published folders: exact round trips, shards, and errors that name every tensor."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specdec_jax
from specdec_jax.config import ConfigError
from specdec_jax.data.tokenizer import train_bpe
from specdec_jax.hub import save_target
from specdec_jax.hub.layout import TensorError
from tests import toys

PLAIN = {"stacked": False, "transposed": False}  # The layout of the toys.


@pytest.fixture
def saved(tmp_path):
  """A target and its drafter on disk."""
  target = toys.target()
  save_target(tmp_path / "target", target.config, target.params, None)
  specdec_jax.export(toys.block_drafter(target), tmp_path / "drafter")
  return tmp_path


def equal_trees(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("changes", [
    {}, {"tied": True, "qk_norm": False, "family": "llama"}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_target_round_trip(tmp_path, changes):
  target = toys.target(**changes)
  save_target(tmp_path / "a", target.config, target.params, None)
  for options in (PLAIN, {"stacked": True}, {"transposed": True}, {}):
    again = specdec_jax.load_target(tmp_path / "a", **options)
    assert again.config == target.config
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_allclose(again.forward(tokens).logits, target.forward(tokens).logits, atol=5e-5)
  equal_trees(specdec_jax.load_target(tmp_path / "a", **PLAIN).params, target.params)
  assert ("lm_head.weight" in load_file(tmp_path / "a" / "model.safetensors")) == (not target.config.tied)


def test_drafter_round_trip(saved):
  target = specdec_jax.load_target(saved / "target", **PLAIN)
  drafter = specdec_jax.load_drafter(saved / "drafter", target)
  equal_trees(drafter.params, toys.block_drafter(toys.target()).params)
  specdec_jax.export(drafter, saved / "again")
  a, b = (load_file(saved / n / "model.safetensors") for n in ("drafter", "again"))
  assert a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
  assert (saved / "drafter/config.json").read_text() == (saved / "again/config.json").read_text()
  turned = specdec_jax.load_target(saved / "target", transposed=True)
  prompts = [[1, 2, 3], [4, 5, 6, 7]]
  plain = [c.tokens for c in specdec_jax.generate(target, drafter, prompts, 20)]
  assert plain == [c.tokens for c in specdec_jax.generate(turned, specdec_jax.load_drafter(saved / "drafter", turned), prompts, 20)]


def test_bfloat16_stays_bfloat16(saved):
  specdec_jax.export(toys.block_drafter(toys.target()), saved / "half", dtype="bfloat16")
  tensors = load_file(saved / "half" / "model.safetensors")
  assert {str(t.dtype) for t in tensors.values()} == {"bfloat16"}
  assert json.loads((saved / "half/config.json").read_text())["dtype"] == "bfloat16"
  target = specdec_jax.load_target(saved / "target")
  specdec_jax.export(specdec_jax.load_drafter(saved / "half", target), saved / "again", dtype="bfloat16")
  again = load_file(saved / "again" / "model.safetensors")
  assert all(np.array_equal(tensors[k].view(np.uint16), again[k].view(np.uint16)) for k in tensors)


def test_shards(saved):
  folder, whole = saved / "target", load_file(saved / "target/model.safetensors")
  names = sorted(whole)
  parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
  for file, mine in parts.items():
    save_file({n: whole[n] for n in mine}, str(folder / file))
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: f for f, mine in parts.items() for n in mine}}))
  (folder / "model.safetensors").unlink()
  equal_trees(specdec_jax.load_target(folder, **PLAIN).params, toys.target().params)
  (folder / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
    specdec_jax.load_target(folder)


def test_every_wrong_tensor_is_named(saved):
  """C93: one missing, one extra, two mis-shaped, all in one message."""
  path = saved / "target/model.safetensors"
  tensors = load_file(path)
  tensors["model.layers.7.bonus.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
  tensors["model.norm.weight"] = np.ones(7, np.float32)
  tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
  save_file(tensors, str(path))
  with pytest.raises(TensorError) as e:
    specdec_jax.load_target(saved / "target")
  for part in ("missing: model.layers.1.mlp.up_proj.weight", "extra: model.layers.7.bonus.weight",
               "lm_head.weight is (32, 61), expected (61, 32)", "model.norm.weight is (7,), expected (32,)"):
    assert part in str(e.value)


def test_corrupt_and_absent(saved, tmp_path):
  path = saved / "target/model.safetensors"
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(TensorError, match="not a readable safetensors file"):
    specdec_jax.load_target(saved / "target")
  with pytest.raises(FileNotFoundError, match="no config.json"):
    specdec_jax.load_target(tmp_path)
  with pytest.raises(FileNotFoundError, match="neither a path nor a shipped model; shipped: .*tiny"):
    specdec_jax.load_target("no/such/model")
  with pytest.raises(ValueError, match="dtype 'int4'"):
    specdec_jax.load_target("tiny", dtype="int4")


def test_unknown_drafter_is_named():
  with pytest.raises(FileNotFoundError, match="'tiny/nonesuch' is neither"):
    specdec_jax.load_drafter("tiny/nonesuch", toys.target())
  with pytest.raises(ConfigError, match="lacks block_size, mask_token_id"):
    specdec_jax.load_drafter("tiny", toys.target())  # A target is no drafter.


def test_drafter_of_another_target_is_refused(saved):
  """C99: other vocabulary, width, depth; and a swapped pair of token ids at equal sizes."""
  drafter = saved / "drafter"
  for changes, what in (({"vocab": 64}, "vocabulary 61, not 64"),
                        ({"layers": 4, "windows": (None,) * 4}, "number of target layers 3, not 4"),
                        ({"width": 16}, "hidden size 32, not 16")):
    with pytest.raises(ValueError, match=what):
      specdec_jax.load_drafter(drafter, toys.target(**changes))
  many = toys.target(vocab=2048, eos=())
  specdec_jax.export(toys.block_drafter(many), saved / "many")
  target, drafter = many, saved / "many"
  specdec_jax.load_drafter(drafter, target)
  swapped = target.params["embedding"].at[np.array([4, 5])].set(target.params["embedding"][np.array([5, 4])])
  with pytest.raises(ValueError, match="another target or tokenizer"):
    specdec_jax.load_drafter(drafter, dataclasses.replace(target, params={**target.params, "embedding": swapped}))


def test_tokenizer_folder(tmp_path):
  tokenizer = train_bpe(["def f(x):\n    return x + 12"] * 4, 280)
  target = toys.target(vocab=280)
  save_target(tmp_path / "t", target.config, target.params, tokenizer)
  again = specdec_jax.load_target(tmp_path / "t").tokenizer
  text = "def g(12):\n\treturn <|im_end|> é"
  assert again.encode(text) == tokenizer.encode(text)
  assert again.decode(again.encode(text)) == "def g(12):\n\treturn  é"
  assert again.fingerprint() == tokenizer.fingerprint()
  assert again.chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
  small = toys.target()
  save_target(tmp_path / "s", small.config, small.params, tokenizer)
  with pytest.raises(ValueError, match="tokenizer has 275 tokens, the model 61 rows"):
    specdec_jax.load_target(tmp_path / "s")


def test_more_stop_ids_in_generation_config(saved):
  (saved / "target/generation_config.json").write_text(json.dumps({"eos_token_id": [7, 60]}))
  assert specdec_jax.load_target(saved / "target").config.eos == (7, 60)
