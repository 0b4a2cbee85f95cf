"""Published configurations: every spelling that is honoured, every fault that is named."""

import json

import numpy as np
import pytest

from specdec_jax.config import ConfigError, DrafterConfig, ModelConfig, Rotary
from tests import toys

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 1e6}
DRAFTER = {
    **LLAMA, "model_type": "qwen3", "block_size": 4, "mask_token_id": 99, "target_layer_ids": [-1, 2], "num_target_layers": 6,
    "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}


def without(key, config=LLAMA):
  return {k: v for k, v in config.items() if k != key}


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_theta": 1e6, "rope_scaling": {"type": "default", "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
    {"rope_parameters": {"rope_theta": None, "rope_type": "default", "full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
    ], ids=str)
def test_rotary_base_in_every_spelling(spelling):
  c = ModelConfig.from_published({**without("rope_theta"), **spelling})
  assert c.rotary == Rotary(1e6, 8)
  assert ModelConfig.from_published(c.to_published()) == c


def test_missing_rotary_base_is_refused():
  with pytest.raises(ConfigError, match="no rotary base"):
    ModelConfig.from_published(without("rope_theta"))


def test_rescaled_rotary():
  """Against the published formulas evaluated by hand at chosen wavelengths."""
  width, theta, original = 8, 1e4, 64
  base = theta ** -(np.arange(0, width, 2) / width)
  linear = ModelConfig.from_published({**LLAMA, "rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 4.0}}).rotary
  np.testing.assert_allclose(linear.frequencies()[0], base / 4, rtol=1e-6)
  scaling = {
      "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
  llama3 = ModelConfig.from_published({**LLAMA, "rope_theta": theta, "rope_scaling": scaling}).rotary
  found = llama3.frequencies()[0]
  assert found[0] == pytest.approx(base[0])  # 2π positions a turn: more than 4 turns in 64.
  assert found[-1] == pytest.approx(base[-1] / 8)  # Less than one turn.
  yarn = ModelConfig.from_published({
      **LLAMA, "rope_theta": theta,
      "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}}).rotary
  frequencies, attention = yarn.frequencies()
  assert attention == pytest.approx(0.1 * np.log(4) + 1)
  assert frequencies[0] == pytest.approx(base[0]) and frequencies[-1] == pytest.approx(base[-1] / 4)
  for rotary in (linear, llama3, yarn):
    c = ModelConfig.from_published({**without("rope_theta"), "rope_parameters": rotary.published(8)})
    assert c.rotary == rotary


@pytest.mark.parametrize("change, message", [
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*'mamba'. is not supported"),
    ({"vocab_size": None}, "lacks 'vocab_size'"), ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
    ({"num_key_value_heads": 3}, "no multiple"), ({"num_key_value_heads": 0}, "num_key_value_heads 0 must be"),
    ({"head_dim": -8}, "head_dim -8 must be"),
    ({"hidden_size": "32"}, "hidden_size '32' must be"), ({"hidden_size": 34}, "lacks 'head_dim', and hidden_size 34"),
    ({"head_dim": 5}, "5 channels of heads of 5"), ({"partial_rotary_factor": 0}, "partial_rotary_factor 0 must be"),
    ({"rope_theta": -1.0}, "rope_theta -1.0"), ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' must be"), ({"eos_token_id": "</s>"}, "'</s>' is no token id"),
    ({"layer_types": 7}, "layer_types must be a list"), ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 .* 'llama'"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_window is missing, switched off or unknown"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 2]}}, "mrope_section")], ids=str)
def test_faults_are_named(change, message):
  with pytest.raises(ConfigError, match=message):
    ModelConfig.from_published({**LLAMA, **change})


def test_windows():
  windowed = {**LLAMA, "model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}
  assert ModelConfig.from_published({**windowed, "max_window_layers": 1}).windows == (None, 8)
  assert ModelConfig.from_published(windowed).windows == (None, None)  # max_window_layers is 28 where it is not given.
  assert ModelConfig.from_published({**windowed, "max_window_layers": 0, "use_sliding_window": False}).windows == (None, None)
  c = ModelConfig.from_published({**windowed, "layer_types": ["sliding_attention", "full_attention"]})
  assert c.windows == (8, None) and ModelConfig.from_published(c.to_published()).windows == (8, None)


def test_every_field_survives_publication():
  c = toys.model_config(attention_bias=True, mlp_bias=True, activation="gelu", tied=True, eos=(1, 2), bos=3, pad=0, windows=(4, None, 4))
  assert ModelConfig.from_published(json.loads(json.dumps(c.to_published()))) == c


@pytest.mark.parametrize("form", [
    toys.HYBRID, {**toys.HYBRID, "rotary": Rotary(1e7, 8)}, toys.GEMMA,
    {**toys.GEMMA, "family": "gemma4_unified_text", "logit_cap": None}], ids=str)
def test_every_field_of_mixed_layers_survives_publication(form):
  c = toys.model_config(**form)
  published = json.loads(json.dumps(c.to_published()))
  assert ModelConfig.from_published(published) == c
  wrapped = {"model_type": "any", "text_config": without("eos_token_id", published), "eos_token_id": 60, "vision_config": {}}
  assert ModelConfig.from_published(wrapped) == c


def test_hybrid_rotary_in_the_older_spelling():
  c = toys.model_config(**toys.HYBRID)
  scaling = {"type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
  assert ModelConfig.from_published({**without("rope_parameters", c.to_published()), "rope_theta": 1e4, "rope_scaling": scaling}) == c


def test_what_gemma_configs_leave_out():
  """The defaults of the published class, and a flag of layers with shared caches where there are none."""
  c = toys.model_config(**toys.GEMMA, attention_bias=True)
  published = {**c.to_published(), "use_double_wide_mlp": True}
  assert ModelConfig.from_published({k: v for k, v in published.items() if k not in ("hidden_activation", "tie_word_embeddings")}) == c


@pytest.mark.parametrize("change, message", [
    ({"layer_types": ["full_attention", "mamba", "mamba"]}, r"mamba \(layers \[1, 2\]\)"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"layer_types": ["linear_attention"] * 3}, "no full_attention"), ({"linear_num_key_heads": None}, "lacks 'linear_num_key_heads'"),
    ({"linear_num_key_heads": 3}, "multiple of linear_num_key_heads 3"), ({"linear_num_key_heads": 0}, "linear_num_key_heads 0 must be"),
    ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim '4' must be"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval 0"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "partial_rotary_factor 2.0")], ids=str)
def test_hybrid_faults_are_named(change, message):
  with pytest.raises(ConfigError, match=message):
    ModelConfig.from_published({**toys.model_config(**toys.HYBRID).to_published(), **change})


@pytest.mark.parametrize("change, message", [
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"), ({"enable_moe_block": True}, "enable_moe_block"),
    ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"), ({"layer_types": None}, "layer_types"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "lacks 'sliding_attention'"),
    ({"num_global_key_value_heads": 3}, "no multiple"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"), ({"sliding_window": 0}, "sliding_window 0 must be"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0"), ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ({"rope_parameters": {
        "sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "beta": 2}}},
     "rotary settings beta .* 'proportional'")], ids=str)
def test_gemma_faults_are_named(change, message):
  with pytest.raises(ConfigError, match=message):
    ModelConfig.from_published({**toys.model_config(**toys.GEMMA).to_published(), **change})


@pytest.mark.parametrize("change", [
    {}, {"markov_rank": 0, "enable_confidence_head": False}, {"confidence_head_with_markov": False}, {"num_anchors": 6}], ids=str)
def test_drafter_round_trip(change):
  c = DrafterConfig.from_published({**DRAFTER, **change})
  assert c.draft_length == 4
  assert DrafterConfig.from_published(json.loads(json.dumps(c.to_published()))) == c


@pytest.mark.parametrize("change, message", [
    ({"mask_token_id": None}, "lacks mask_token_id"), ({"mask_token_id": 100}, "outside the vocabulary"),
    ({"mask_token_id": -1}, "outside"), ({"eos_token_id": [5, 99]}, "end-of-sequence"), ({"pad_token_id": 99}, "padding"),
    ({"target_layer_ids": [2, 1]}, "increase strictly"), ({"target_layer_ids": [5]}, "strictly, from -1"),
    ({"target_layer_ids": []}, "target_layer_ids"), ({"markov_head_type": "lstm"}, "'lstm'"),
    ({"markov_rank": 0}, "markov_rank > 0"), ({"block_size": -1}, "block_size -1"), ({"model_type": "llama"}, "qwen3 family"),
    ({"projector_type": "dspark"}, "SpecForge"), ({"enable_confidence_head": "false"}, "enable_confidence_head is 'false'"),
    ({"markov_rank": "8"}, "markov_rank is '8'"), ({"num_anchors": -1}, "num_anchors is -1"),
    ({"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 0}}, "conv_group_size 0"),
    ({"num_anchors": "x", "dflash_config": {"num_anchors": 3}}, "num_anchors is 'x'"), ({"markov_head_type": []}, "markov_head_type"),
    ({"dflash_config": {"selector_rank": 4.5}}, "selector_rank is 4.5"),
    ({"dflash_config": {"anchor_predicts": 1}}, "anchor_predicts is 1"),
    ], ids=str)
def test_drafter_faults_are_named(change, message):
  with pytest.raises(ConfigError, match=message):
    DrafterConfig.from_published({**DRAFTER, **change})
