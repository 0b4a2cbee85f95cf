"""Published folders: config.json, one or several safetensors files with an index, a tokenizer beside them."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec_jax.hub.layout import TensorError


def read_config(folder: pathlib.Path) -> dict:
  """The parsed config.json. Raises FileNotFoundError naming the folder."""
  path = folder / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{folder} has no config.json")
  return json.loads(path.read_text())


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files of a folder: those of the index where there is one."""
  index = folder / "model.safetensors.index.json"
  if index.exists():
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [folder / n for n in names]
  else:
    files = [folder / "model.safetensors"]
  absent = [str(f) for f in files if not f.exists()]
  if absent:
    raise FileNotFoundError(f"weights are missing: {', '.join(absent)}")
  return files


class Tensors:
  """The tensors of a folder, opened lazily: `shapes` by name, `read(name)`, `part(name, index)`."""

  def __init__(self, files: list[pathlib.Path], stack: contextlib.ExitStack):
    self.shapes: dict[str, tuple[int, ...]] = {}
    self._handles = {}
    for path in files:
      try:
        handle = stack.enter_context(safe_open(str(path), framework="numpy"))
      except SafetensorError as e:
        raise TensorError(f"{path} is not a readable safetensors file: {e}") from e
      for name in handle.keys():  # noqa: SIM118 - no mapping
        if name in self.shapes:
          raise TensorError(f"{name} stands in two files, one of them {path}")
        self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        self._handles[name] = handle

  def read(self, name: str) -> np.ndarray:
    return self._handles[name].get_tensor(name)

  def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    return self._handles[name].get_slice(name)[index]


class Renamed:
  """Tensors under other names: `names` gives what each is stored as; those that it leaves out are not there."""

  def __init__(self, tensors: Tensors, names: Mapping[str, str]):
    self._tensors, self._names = tensors, names
    self.shapes = {name: tensors.shapes[stored] for name, stored in names.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors.read(self._names[name])

  def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    return self._tensors.part(self._names[name], index)


@contextlib.contextmanager
def open_tensors(folder: pathlib.Path) -> Iterator[Tensors]:
  """The tensors of a published folder."""
  with contextlib.ExitStack() as stack:
    yield Tensors(weight_files(folder), stack)


def save(folder: pathlib.Path, config: Mapping, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes config.json and model.safetensors."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})


def weights_hash(files: list[pathlib.Path]) -> str:
  """A hash of the bytes of the weight files, 16 hex digits."""
  digest = hashlib.sha256()
  for path in files:
    with path.open("rb") as f:
      while block := f.read(1 << 22):
        digest.update(block)
  return digest.hexdigest()[:16]
