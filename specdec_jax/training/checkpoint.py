"""Training state on disk, through orbax: parameters, optimizer, keys and data position in one tree."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp


def claim(folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
  """Ties a work folder to what is trained in it, so that no run resumes from another's state. facts: as JSON, objects one
  level deep. Raises ValueError, naming what differs, for a folder that is tied to something else."""
  path, flat = folder / "training.json", {}
  for key, value in json.loads(json.dumps(facts)).items():
    flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
  if not path.exists():
    path.write_text(json.dumps(flat, indent=2) + "\n")
    return
  found = json.loads(path.read_text())
  wrong = [f"{k} is {found.get(k)}, not {flat.get(k)}" for k in {**found, **flat} if found.get(k) != flat.get(k)]
  if wrong:
    raise ValueError(f"{folder} holds another training: {'; '.join(wrong)}. Take another work folder")


def manager(folder: pathlib.Path, keep: int = 2) -> ocp.CheckpointManager:
  """Keeps the last `keep` steps under `folder`, which is created."""
  return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True))


def save(checkpoints: ocp.CheckpointManager, step: int, state) -> None:
  """Starts saving `state` (a pytree of arrays) as `step`; typed keys are stored as their data."""
  checkpoints.save(step, args=ocp.args.StandardSave(_plain(state)))


def restore(checkpoints: ocp.CheckpointManager, like):
  """The latest state, in the structure, dtypes and shardings of `like`; None where nothing was saved."""
  step = checkpoints.latest_step()
  if step is None:
    return None
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _plain(like))
  found = checkpoints.restore(step, args=ocp.args.StandardRestore(target))
  return jax.tree.map(lambda x, y: jax.random.wrap_key_data(y) if _is_key(x) else y, like, found)


def _is_key(x) -> bool:
  return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(tree):
  return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)
