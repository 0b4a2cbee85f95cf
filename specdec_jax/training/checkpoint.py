"""Training state on disk, through orbax: parameters, optimizer, keys and data position in one tree."""

import pathlib

import jax
import orbax.checkpoint as ocp


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
