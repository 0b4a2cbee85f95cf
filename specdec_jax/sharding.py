"""Many devices: one mesh, and first-match rules for what lies where on it.

Mesh axes: data splits the rows of a batch, or the slots of a decode; fsdp splits the same rows, and the parameters, which are
gathered where they are used; tensor splits heads, MLP and vocabulary. Functions that run on a mesh are traced under `use(mesh)`;
without a mesh nothing here does anything.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
Rules = Sequence[tuple[str, P]]

# Of parameters, and of the optimizer's moments, whose paths end alike: kernels [inputs, outputs…]; axes behind those that a rule names are
# not split, nor is the one that stacked layers have in front.
PARAMETERS: Rules = (
    (r"attention/(q|k|kv|qkv|z|gates)/kernel$", P("fsdp", "tensor")),
    (r"attention/(q|k|kv)/bias$", P("tensor")),
    (r"(attention/o|mlp/down|fuse)/kernel$", P("tensor", "fsdp")),
    (r"gate_up/kernel$", P("fsdp", None, "tensor")),
    (r"gate_up/bias$", P(None, "tensor")),
    (r"dynamic/kernel$", P("fsdp")),
    (r"(^|/)(embedding|head/kernel)$", P("tensor", "fsdp")),
    (r"markov/(previous|bias)$|selector/(predecessor|successor)$", P(("tensor", "fsdp"))),
    (r"", P()))

# Of a drafter that lies whole on every device, but for the tables that it shares with its target.
REPLICATED: Rules = ((r"(^|/)(embedding|head/kernel)$", P("tensor", "fsdp")), (r"", P()))

# Of what a decode keeps (caches, stacked or layer by layer, of target and drafter; settings; transcripts): slots first.
STATE: Rules = (
    (r"memory$", P(BATCH, "tensor")),  # Of a recurrent layer, by head; what a call adds to it, by token and head.
    (r"fed/\d+/(keys|corrections|decays)$", P(BATCH, None, "tensor")),
    (r"(keys|values)$", P(None, BATCH, "tensor")),
    (r"(keys|values)/\d+$", P(BATCH, "tensor")),
    (r"(counts|bias|prompt)$", P(BATCH, "tensor")),
    (r"(^|/)(q|logits)$", P(BATCH, None, "tensor")),
    (r"", P(BATCH)))

# Heads that the tensor axis does not divide stay whole on every device.
WHOLE = re.compile(r"attention/(q|k|kv|qkv|z|gates)/|(keys|values)(/\d+)?$|(memory|corrections|decays)$")
STACKED = re.compile(r"(^|/)layers/(?!\d)")
TABLES = re.compile(r"(^|/)(head|confidence)/kernel$")  # Kernels that are stored output-major always.


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh of all `devices`, those of every process where None. Raises ValueError where the product is another number."""
  devices = jax.devices() if devices is None else devices
  shape = (data, fsdp, tensor)
  if min(shape) < 1 or np.prod(shape) != len(devices):
    raise ValueError(f"a mesh of data {data} × fsdp {fsdp} × tensor {tensor} needs {np.prod(shape)} devices; there are {len(devices)}")
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """The context that programs of this mesh are traced and run in."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def ways(mesh: Mesh | None, axes: str | Sequence[str] | None = BATCH) -> int:
  """Parts that these mesh axes split something into; the rows of a batch by default."""
  if mesh is None or axes is None:
    return 1
  return int(np.prod([mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes)]))


def spec(path: str, shape: Sequence[int], mesh: Mesh, rules: Rules, transposed: bool = False) -> P:
  """The spec of one array by the first rule whose pattern is found in its path.

  Raises ValueError that names the array and the axis where a size does not divide; heads stay whole then (WHOLE).
  """
  entries = list(_first_match(rules, path))
  if rules is not STATE:
    front = 1 if STACKED.search(path) else 0
    entries += [None] * (len(shape) - front - len(entries))
    if transposed and path.endswith("kernel") and not TABLES.search(path):
      entries = entries[1:] + entries[:1]
    entries = [None] * front + entries
  for axis, (size, names) in enumerate(zip(shape, entries)):
    if size % ways(mesh, names):
      if not (names == "tensor" and WHOLE.search(path)):
        raise ValueError(
            f"{path} {list(shape)}: axis {axis} of size {size} cannot be split over the {ways(mesh, names)} devices of mesh axis "
            f"{names if isinstance(names, str) else ' × '.join(names)}; take a mesh that divides it")
      entries[axis] = None
  return P(*entries)


def _first_match(rules: Rules, path: str) -> P:
  return next(entries for pattern, entries in rules if re.search(pattern, path))


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(tree: Any, mesh: Mesh, rules: Rules = PARAMETERS, transposed: bool = False) -> Any:
  """NamedShardings of a pytree of arrays or their shapes. transposed: kernels are stored output-major. Raises as `spec`."""
  return jax.tree_util.tree_map_with_path(lambda path, x: NamedSharding(mesh, spec(_name(path), x.shape, mesh, rules, transposed)), tree)


def replicated(mesh: Mesh) -> NamedSharding:
  """Whole on every device."""
  return NamedSharding(mesh, P())


def constrain(x, *entries):
  """x, split so on the mesh that is in use, along the axes that divide; x itself without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  fitting = [names if names is not None and size % ways(mesh, names) == 0 else None for size, names in zip(x.shape, entries)]
  return jax.lax.with_sharding_constraint(x, P(*fitting))


def constrain_rows(x, flat: bool = False):
  """Activations [B,T,…] split by row, or, flattened to [1,n,…], by token."""
  return constrain(x, *((None, BATCH) if flat else (BATCH,)))


def constrain_state(tree):
  """What a decode keeps, split by the rules STATE; a single slot, which nothing divides, lies on every device."""
  if jax.sharding.get_abstract_mesh().empty:
    return tree
  return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, *_first_match(STATE, _name(path))), tree)


def constrain_whole(tree):
  """Whole on every device, so that every process can read it."""
  return tree if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(tree, P())


def fetch(tree, mesh: Mesh | None):
  """Arrays on the host, also those that other processes hold parts of; then every process has to ask."""
  if mesh is not None and not all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
    tree = jax.jit(lambda x: x, out_shardings=replicated(mesh))(tree)
  return jax.device_get(tree)


def barrier(name: str) -> None:
  """Waits until every process is here; nothing in a run of one."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def in_turn(name: str, work: Callable[[], Any]) -> Any:
  """work(), first in the first process, then in the others: what the first one writes to a shared folder, the others find."""
  if jax.process_index() == 0:
    found = work()
    barrier(name)
    return found
  barrier(name)
  return work()


def create(make: Callable, mesh: Mesh | None, *inputs, rules: Rules = PARAMETERS, transposed: bool = False) -> Any:
  """make(*inputs), computed where its parts belong; on one device without a mesh."""
  if mesh is None:
    return make(*inputs)
  with use(mesh):
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make, *inputs), mesh, rules, transposed))(*inputs)


def local_rows(mesh: Mesh | None, rows: int) -> slice:
  """The rows of a batch that this process's devices hold. Raises ValueError where the mesh does not divide them."""
  if mesh is None:
    return slice(0, rows)
  if rows % ways(mesh):
    raise ValueError(
        f"a batch of {rows} rows cannot be split over the {ways(mesh)} devices of mesh axes {' × '.join(BATCH)}; take a multiple")
  parts = [i[0].indices(rows) for i in NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((rows,)).values()]
  first, last = min(p[0] for p in parts), max(p[1] for p in parts)
  if len({p[0] for p in parts}) * (rows // ways(mesh)) != last - first:
    raise ValueError("the mesh gives this process rows that do not lie side by side: order its devices by process")
  return slice(first, last)


def all_rows(mesh: Mesh, mine: int) -> int:
  """The rows of a batch of which this process holds `mine`."""
  return mine * (ways(mesh) // len({
      i[0].start for i in NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((ways(mesh),)).values()}))


def place_rows(mesh: Mesh | None, tree: Any, rows: int, axis: int = 0) -> Any:
  """A batch on the mesh, from this process's part of it (`local_rows` of `rows`); numbers lie on every device. axis: that of
  the rows."""
  if mesh is None:
    return tree
  first = local_rows(mesh, rows).start

  def place(x):
    x = np.asarray(x)
    if x.ndim <= axis:
      return jax.make_array_from_callback(x.shape, replicated(mesh), lambda index: x[index])

    def part(index):
      start, stop, _ = index[axis].indices(rows)
      return x[(*index[:axis], slice(start - first, stop - first), *index[axis + 1 :])]

    shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*[None] * axis, BATCH)), part)

  return jax.tree.map(place, tree)
