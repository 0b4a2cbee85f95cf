"""Small random models and scripted drafters for the tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.config import DeltaConfig, DrafterConfig, FullAttention, ModelConfig, Rotary, SerialConfig
from specdec_jax.drafters.base import Drafter, Proposal
from specdec_jax.drafters.block import BlockDrafter
from specdec_jax.drafters.serial import SerialDrafter
from specdec_jax.models.decoder import Decoder, head_table
from specdec_jax.models.target import Target
from specdec_jax.verify import SparseDistribution


def model_config(**changes) -> ModelConfig:
  base = ModelConfig(
      family="qwen3", vocab=61, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, rotary=Rotary(1e4, 8),
      max_positions=256, windows=(None,) * changes.get("layers", 3), qk_norm=True, eos=(60,), init_scale=0.3)
  return dataclasses.replace(base, **changes)


HYBRID = dict(
    family="qwen3_5_text", rotary=Rotary(1e4, 4), recurrent=(0, 1), delta=DeltaConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6))
GEMMA = dict(
    family="gemma4_text", windows=(6, None, 6),
    full=FullAttention(16, 1, Rotary(1e6, 16, "proportional", (("partial_rotary_factor", 0.25),)), True),
    logit_cap=30.0, activation="gelu_pytorch_tanh", tied=True)


def random_params(init, seed: int, scale: float = 0.3):
  """Parameters of the shapes that `init` makes, without compiling it: norms 1, convolutions the identity, the rest random."""
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    name = path[-1].key
    if name == "base":
      return jnp.zeros(leaf.shape).at[:, 0].set(1.0)
    drawn = np.ones(leaf.shape) if name == "scale" else scale * rng.standard_normal(leaf.shape)
    return jnp.asarray(drawn.astype(leaf.dtype))

  return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(init, jax.random.key(seed)))


@functools.lru_cache
def target(seed: int = 0, stacked: bool = False, **changes) -> Target:
  c = model_config(**changes)
  decoder = Decoder(c, stacked=stacked)
  if stacked:
    params = target(seed, **changes).params
    layers = [params["layers"][str(i)] for i in range(c.layers)]
    return Target("toy", c, decoder, {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}, None, "0", "float32")
  params = random_params(lambda key: decoder.init(key, jnp.zeros((1, 4), jnp.int32), method="init_all")["params"], seed)
  return Target("toy", c, decoder, params, None, "0", "float32")


@functools.lru_cache
def block_drafter(owner: Target, seed: int = 1, **changes) -> Drafter:
  """A randomly initialised block drafter for `owner`; it shares the target's embedding and head."""
  options = {"block": 5, "mask_id": 59, "taps": (0, 1), "head": "markov", "rank": 6, "confidence": True, **changes}
  options.setdefault("confidence_with_head", bool(options["confidence"] and options["rank"]))
  window = options.pop("window", None)
  c = DrafterConfig(model=owner.config.plain(1, window), target_layers=owner.config.layers, **options)
  model = BlockDrafter(c)
  params = random_params(model.init_params, seed)
  params["embedding"], params["head"] = owner.params["embedding"], {"kernel": head_table(owner.params)}
  for group, name in (("confidence", "kernel"), ("markov", "bias"), ("selector", "successor")):  # These must matter.
    if group in params:
      params[group][name] /= 0.3
  return Drafter("toy/block", c, model, params, "0")


@functools.lru_cache
def serial_drafter(owner: Target, kind: str, seed: int = 1, **changes) -> Drafter:
  """A randomly initialised serial drafter for `owner`; it shares the target's embedding and head."""
  taps = (0, 1) if kind == "eagle3" else (owner.config.layers - 1,)
  options = {"steps": 4, "taps": taps, **changes}
  c = SerialConfig(
      model=owner.config.plain(1, options.pop("window", None)), kind=kind, target_layers=owner.config.layers, **options)
  model = SerialDrafter(c)
  params = random_params(model.init_params, seed)
  params["embedding"], head = owner.params["embedding"], head_table(owner.params)
  if c.draft_vocab:
    params["draft_ids"] = jnp.sort(jax.random.permutation(jax.random.key(seed), owner.config.vocab)[: c.draft_vocab]).astype(jnp.int32)
    head = head[params["draft_ids"]]
  params["head"] = {"kernel": head}
  return Drafter(f"toy/{kind}", c, model, params, "0")


@dataclasses.dataclass(frozen=True)
class Scripted:
  """A drafter that proposes what its parameters, a script [B,S] of tokens by position, say; -1 for a placeholder."""

  draft_length: int
  taps: tuple[int, ...] = ()

  def init_state(self, batch, length):
    return jnp.zeros((batch,), jnp.int32)

  def extend(self, params, state, features, tokens, positions, valid):
    return positions[:, 0] + valid

  def propose(self, params, state, anchor, position, keys, sampling):
    index = jnp.minimum(position[:, None] + 1 + jnp.arange(self.draft_length), params.shape[1] - 1)
    drafts = jnp.take_along_axis(params, index, 1)
    return Proposal(drafts, SparseDistribution(drafts[..., None], jnp.ones((*drafts.shape, 1))))

  def block_outputs(self, params, batch):
    raise NotImplementedError("a script is not trained")


def scripted(script, draft_length: int) -> Drafter:
  return Drafter("toy/script", None, Scripted(draft_length), jnp.asarray(script, jnp.int32), "0")
