"""The published 27 B pair (RELEASED_FORMATS §2): built from its configs alone, and a small pair of the same form that decodes."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import sharding
from specdec_jax.config import DrafterConfig, ModelConfig
from specdec_jax.drafters import drafter_model
from specdec_jax.hub import folder, layout
from specdec_jax.models.decoder import Decoder
from specdec_jax.presets import QWEN3_8_27B as TARGET
from specdec_jax.presets import QWEN3_8_27B_DFLASH2 as DRAFTER
from specdec_jax.sampling import make_sampling
from tests import toys


def published(entries) -> dict[str, tuple[int, ...]]:
  return {name: e.shape for e in entries for name in e.names}


def check_parameters(entries, params, transposed: bool = False, besides=()):
  """Every parameter has the shape that its published tensors give, and there are no others but `besides`."""
  found = {tuple(k.key for k in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  assert {e.path: e.parameter_shape(transposed) for e in entries} == {k: s for k, s in found.items() if k[0] not in besides}


def test_the_published_drafter():
  c = DrafterConfig.from_published(DRAFTER)
  assert (c.draft_length, c.layout, c.model.windows, c.model.rotary.width) == (7, "dflash2", (2048,) * 5, 128)
  wanted = {
      "fc.weight": (5120, 25600), "hidden_norm.weight": (5120,), "norm.weight": (5120,),
      "candidate_selector.predecessor_codebook": (248320, 256), "candidate_selector.successor_codebook": (248320, 256),
      "candidate_selector.hidden_projection.weight": (256, 5120)}
  for i in range(5):
    wanted |= {f"layers.{i}.{name}": shape for name, shape in {
        "input_layernorm.weight": (5120,), "post_attention_layernorm.weight": (5120,), "self_attn.q_proj.weight": (4096, 5120),
        "self_attn.k_proj.weight": (1024, 5120), "self_attn.v_proj.weight": (1024, 5120), "self_attn.o_proj.weight": (5120, 4096),
        "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "mlp.gate_proj.weight": (17408, 5120),
        "mlp.up_proj.weight": (17408, 5120), "mlp.down_proj.weight": (5120, 17408), "attention_conv.base_kernel": (2, 2, 5120),
        "attention_conv.kernel_projection.weight": (1280, 5120), "mlp_conv.base_kernel": (2, 2, 5120),
        "mlp_conv.kernel_projection.weight": (1280, 5120)}.items()}
  entries = layout.drafter_entries(c)
  assert published(entries) == wanted
  assert sum(map(math.prod, wanted.values())) == pytest.approx(1.92e9, rel=0.005)
  model = drafter_model(c, dtype="bfloat16")
  params = jax.eval_shape(model.init_params, jax.random.key(0))
  check_parameters(entries, params, besides=("embedding", "head"))
  sampling = make_sampling(1, c.model.vocab)
  made = jax.eval_shape(
      lambda p: model.propose(
          p, model.init_state(1, 4096), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32),
          sampling.position_keys(jnp.zeros(1, jnp.int32), 7), sampling),
      params)
  assert made.drafts.shape == (1, 7)


@pytest.mark.slow
def test_the_published_target():
  c = ModelConfig.from_published(TARGET)
  assert len(c.recurrent) == 48 and 3 not in c.recurrent and c.rotary.width == 64
  wanted = {"model.embed_tokens.weight": (248320, 5120), "lm_head.weight": (248320, 5120), "model.norm.weight": (5120,)}
  for i in range(64):
    kinds = {
        "linear_attn.in_proj_qkv.weight": (10240, 5120), "linear_attn.in_proj_z.weight": (6144, 5120),
        "linear_attn.in_proj_a.weight": (48, 5120), "linear_attn.in_proj_b.weight": (48, 5120),
        "linear_attn.conv1d.weight": (10240, 1, 4), "linear_attn.A_log": (48,), "linear_attn.dt_bias": (48,),
        "linear_attn.norm.weight": (128,), "linear_attn.out_proj.weight": (5120, 6144),
    } if (i + 1) % 4 else {
        "self_attn.q_proj.weight": (12288, 5120), "self_attn.k_proj.weight": (1024, 5120), "self_attn.v_proj.weight": (1024, 5120),
        "self_attn.o_proj.weight": (5120, 6144), "self_attn.q_norm.weight": (256,), "self_attn.k_norm.weight": (256,)}
    wanted |= {f"model.layers.{i}.{name}": shape for name, shape in {
        **kinds, "input_layernorm.weight": (5120,), "post_attention_layernorm.weight": (5120,), "mlp.gate_proj.weight": (17408, 5120),
        "mlp.up_proj.weight": (17408, 5120), "mlp.down_proj.weight": (5120, 17408)}.items()}
  entries = layout.decoder_entries(c)
  assert published(entries) == wanted
  assert sum(map(math.prod, wanted.values())) == pytest.approx(26.9e9, rel=0.01)
  decoder = Decoder(c, stacked=False)
  params = jax.eval_shape(lambda key: decoder.init(key, jnp.zeros((1, 1), jnp.int32), method="init_all")["params"], jax.random.key(0))
  check_parameters(entries, params)
  hidden, taps, cache = jax.eval_shape(
      lambda p: decoder.apply({"params": p}, jnp.zeros((1, 8), jnp.int32), decoder.init_cache(1, 4096, "bfloat16"), taps=(5, 61)), params)
  assert hidden.shape == (1, 8, 5120) and taps.shape == (1, 8, 2, 5120)
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  assert size(cache.states) == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
  assert size(cache.fed) == 48 * 8 * (10240 * 4 + (16 * 128 + 48 * 128 + 48) * 4)  # Against 8 states a layer, 1.2 GB.


@pytest.mark.parametrize("transposed", [False, True])
def test_the_published_pair_on_a_mesh(transposed):
  """Gated queries and the projections of delta nets are split as plain ones are; next to nothing lies whole on every device."""
  mesh = jax.sharding.AbstractMesh((1, 2, 4), sharding.AXES)
  for entries in (layout.decoder_entries(ModelConfig.from_published(TARGET)),
                  layout.drafter_entries(DrafterConfig.from_published(DRAFTER))):
    whole = split = 0
    for e in entries:
      shape = e.parameter_shape(transposed)
      spec = sharding.spec("/".join(e.path), shape, mesh, sharding.PARAMETERS, transposed)
      whole += math.prod(shape)
      split += math.prod(shape) / math.prod(sharding.ways(mesh, names) for names in spec)
      if e.path == ("layers", "3", "attention", "q", "kernel"):
        assert (shape, tuple(spec)) == (
            ((4, 6, 2, 256, 5120), ("tensor", None, None, None, "fsdp")) if transposed
            else ((5120, 4, 6, 2, 256), ("fsdp", "tensor", None, None, None)))
    assert split < 0.14 * whole


@pytest.mark.slow
def test_a_small_pair_of_the_same_form_decodes(tmp_path):
  """From published folders, the target's with tensors of another modality beside its own, far past the drafter's window."""
  small = copy.deepcopy(TARGET)
  small["text_config"] |= {
      "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
      "intermediate_size": 80, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
      "max_position_embeddings": 512, "eos_token_id": 95}
  c = ModelConfig.from_published(small)
  decoder = Decoder(c, stacked=False)
  params = toys.random_params(lambda key: decoder.init(key, jnp.zeros((1, 1), jnp.int32), method="init_all")["params"], 0)
  tensors = layout.take_apart(layout.decoder_entries(c), params)
  renamed = {"model.language_model." + n.removeprefix("model.") if n.startswith("model.") else n: t for n, t in tensors.items()}
  others = {"model.visual.patch_embed.weight": np.zeros((2, 2), np.float32), "mtp.fc.weight": np.zeros((2, 2), np.float32)}
  folder.save(tmp_path / "target", small, renamed | others)
  target = specdec_jax.load_target(tmp_path / "target")

  mine = copy.deepcopy(DRAFTER) | {
      "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_target_layers": 4, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 80, "max_position_embeddings": 512,
      "layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
  mine["dflash_config"] |= {"selector_rank": 8, "selector_top_k": 16, "mask_token_id": 94, "target_layer_ids": [0, 1, 2]}
  d = DrafterConfig.from_published(mine)
  made = toys.random_params(drafter_model(d).init_params, 1)
  folder.save(tmp_path / "drafter", mine, layout.take_apart(layout.drafter_entries(d), made))
  drafter = specdec_jax.load_drafter(tmp_path / "drafter", target)
  prompts = [[(11 * j + 5) % 90 for j in range(n)] for n in (20, 3)]
  plain = specdec_jax.generate(target, None, prompts, 64, ignore_eos=True)
  done = specdec_jax.generate(target, drafter, prompts, 64, ignore_eos=True)
  assert [c.tokens for c in done] == [c.tokens for c in plain]
  assert {d for c in done for d, _, _ in c.rounds} == {7} and sum(a for c in done for _, a, _ in c.rounds)
