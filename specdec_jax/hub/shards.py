"""Published tensors straight to the devices that hold them: the host has one device's part of one parameter at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specdec_jax import sharding
from specdec_jax.hub import layout

Index = tuple[slice, ...]


def load(
    entries: Sequence[layout.Entry], shapes: dict[str, tuple[int, ...]], part: Callable[[str, Index], np.ndarray], mesh: Mesh, dtype: str,
    transposed: bool, stacked: bool = False, rules: sharding.Rules = sharding.PARAMETERS,
) -> dict[str, Any]:
  """The parameter tree on a mesh: part(name, index) reads a part of a published tensor. stacked: with the layers of the decoder
  under one leading axis. Raises TensorError as `layout.build`, and ValueError for sizes that the mesh does not divide."""
  layout.check(entries, shapes)
  groups: dict[tuple[str, ...], list[layout.Entry]] = {}
  for e in entries:
    together = stacked and e.path[0] == "layers"
    groups.setdefault(("layers", *e.path[2:]) if together else e.path, []).append(e)
  tree: dict[str, Any] = {}
  for path, group in groups.items():
    layers = (len(group),) if stacked and path[0] == "layers" else ()
    shape = (*layers, *group[0].parameter(transposed))
    where = NamedSharding(mesh, sharding.spec("/".join(path), shape, mesh, rules, transposed))
    layout.place(tree, path, _place(group, shape, where, part, dtype, transposed, bool(layers)))
  return tree


def _place(group, shape, where: NamedSharding, part, dtype: str, transposed: bool, stacked: bool) -> jax.Array:
  """One parameter; devices that hold the same part share one reading."""
  holders: dict[tuple, list[jax.Device]] = {}
  for device, index in where.addressable_devices_indices_map(shape).items():
    holders.setdefault(tuple(i.indices(n)[:2] for i, n in zip(index, shape)), []).append(device)
  arrays = []
  for bounds, devices in holders.items():
    index = tuple(slice(*b) for b in bounds)
    if stacked:
      piece = None
      for y, e in enumerate(group):
        layer = e.part(index[1:], part, transposed)
        piece = np.empty((len(group), *layer.shape), _kept(layer, dtype)) if piece is None else piece
        piece[y] = layer
    else:
      piece = group[0].part(index, part, transposed)
      piece = np.ascontiguousarray(piece, _kept(piece, dtype))
    arrays += jax.block_until_ready([jax.device_put(piece, d) for d in devices])
  return jax.make_array_from_single_device_arrays(shape, where, arrays)


def _kept(x: np.ndarray, dtype: str) -> np.dtype:
  return x.dtype if np.issubdtype(x.dtype, np.integer) else jnp.dtype(dtype)
