"""Sizes of published targets and settings of their published drafters, for planning and training without a checkpoint at hand.

Targets as in their config.json; drafters as RELEASED_FORMATS §1, §3 and ALGORITHMS §5 have them. A checkpoint that is loaded
brings its own.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax.config import DrafterConfig, ModelConfig, Rotary, SerialConfig
from specdec_jax.drafters import drafter_model
from specdec_jax.drafters.base import Drafter
from specdec_jax.hub import target_tables
from specdec_jax.models.decoder import Decoder
from specdec_jax.models.target import Target


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool) -> ModelConfig:
  return ModelConfig(
      family="qwen3", vocab=151_936, width=width, layers=layers, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, rotary=Rotary(1e6, 128),
      max_positions=40_960, windows=(None,) * layers, qk_norm=True, tied=tied, bos=151_643, eos=(151_643, 151_645), pad=151_643)


# config.json of the published 27 B pair (RELEASED_FORMATS §2).
QWEN3_8_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "attn_output_gate": True, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "eos_token_id": 248044, "rope_parameters": {
            "rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10]}}}
QWEN3_8_27B_DFLASH2 = {
    "architectures": ["Qwen3DFlash2DraftModel"], "model_type": "qwen3", "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 5,
    "num_target_layers": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
    "use_sliding_window": True, "max_window_layers": 5, "is_causal": False, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16, "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61]}}

TARGETS = {
    "qwen3.8-27b": ModelConfig.from_published(QWEN3_8_27B),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408, False),
    "smollm2-135m": ModelConfig(
        family="llama", vocab=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536, rotary=Rotary(1e5, 64),
        max_positions=8192, windows=(None,) * 30, norm_eps=1e-5, tied=True, init_scale=576**-0.5, bos=1, eos=(2,), pad=2)}

QWEN3_MASK = 151_669
_TAPS = {"qwen3-4b": (1, 9, 17, 25, 33), "qwen3-8b": (1, 9, 17, 25, 33), "qwen3-14b": (1, 10, 19, 28, 37)}
_PARTS = {
    "dspark": dict(block=7, head="markov", rank=256, confidence=True, confidence_with_head=True),
    "dflash": dict(block=7),
    "dflash2": dict(block=16, anchor_predicts=False, head="selector", rank=256, candidates=16, conv=2, own_embedding=False, anchors=256)}

# Of the DeepSpec runs; DFlash 2's (NeMo) differ in betas (0.9, 0.95), a cosine to a tenth and sequences of 3072.
TRAINING = dict(learning_rate=6e-4, warmup_share=0.04, batch=512, epochs=10, row_length=4096, clip=1.0)
LOSSES = {
    "dspark": dict(ce=0.1, tv=0.9, confidence=1.0, selector=0.0, decay=4.0),
    "dflash": dict(ce=1.0, tv=0.0, confidence=0.0, selector=0.0, decay=4.0),
    "dflash2": dict(ce=1.0, tv=0.0, confidence=0.0, selector=1.0, decay=7.0)}


def target_config(name: str) -> ModelConfig:
  """A published target's sizes. Raises ValueError with the names there are."""
  if name not in TARGETS:
    raise ValueError(f"no preset {name!r}: {', '.join(TARGETS)}")
  return TARGETS[name]


def drafter_config(target: str, kind: str) -> DrafterConfig | SerialConfig:
  """The published drafter of a Qwen3 target: "dspark", "dflash", "eagle3" (DeepSpec) or "dflash2" (NeMo's example for Qwen3-8B,
  here for each; of Qwen3.8-27B its own). Raises ValueError where none was published."""
  owner = target_config(target)
  if (target, kind) == ("qwen3.8-27b", "dflash2"):
    return DrafterConfig.from_published(QWEN3_8_27B_DFLASH2)
  if target not in _TAPS or kind not in (*_PARTS, "eagle3"):
    raise ValueError(f"no published {kind!r} drafter for {target!r}: {', '.join((*_PARTS, 'eagle3'))} for {', '.join(_TAPS)}")
  layers = 1 if kind == "eagle3" else 5
  shared = dict(
      model=dataclasses.replace(owner, layers=layers, windows=(None,) * layers, tied=False), taps=_TAPS[target], target_layers=owner.layers)
  if kind == "eagle3":
    return SerialConfig(kind="eagle3", **shared)
  return DrafterConfig(mask_id=QWEN3_MASK, **shared, **_PARTS[kind])


def random_target(name: str, dtype: str = "bfloat16", layers: int = 0) -> Target:
  """A target of published size with random weights and no tokenizer, to measure time, which does not depend on weights; layers: only
  so many of it (0: all). Raises ValueError for an unknown name or more layers than there are."""
  config = target_config(name)
  if not 0 <= layers <= config.layers:
    raise ValueError(f"{name} has {config.layers} layers, not {layers}")
  if layers:
    config = dataclasses.replace(config, layers=layers, windows=config.windows[:layers])
  decoder = Decoder(config)
  make = lambda key: decoder.init(key, jnp.zeros((1, 8), jnp.int32), method="init_all")["params"]
  return Target(f"{name} (random, {config.layers} layers)", config, decoder, _random(make, dtype), None, "random", dtype)


def random_drafter(target: Target, name: str, kind: str) -> Drafter:
  """The published drafter of `kind` for the target `name`, with random weights, on `target`, which may have fewer layers: its taps are
  then the first ones."""
  config = dataclasses.replace(drafter_config(name, kind), target_layers=target.config.layers)
  if max(config.taps) >= target.config.layers:
    config = dataclasses.replace(config, taps=tuple(range(min(len(config.taps), target.config.layers))))
  model = drafter_model(config, dtype=target.dtype)
  params = _random(model.init_params, target.dtype) | target_tables(target)
  return Drafter(f"{kind} (random)", config, model, params, "random")


def _random(make, dtype: str):
  """Parameters of the shapes that `make`, of a key, gives, drawn in `dtype`, one array at a time."""
  shapes, tree = jax.tree.flatten(jax.eval_shape(make, jax.random.key(0)))
  draw = jax.jit(lambda key, shape, kind: 0.02 * jax.random.normal(key, shape, kind), static_argnums=(1, 2))
  floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return tree.unflatten(
      [draw(jax.random.key(i), x.shape, dtype) if floating(x) else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)])
