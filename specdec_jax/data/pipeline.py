"""Prompts, responses and packed training rows as TFDS data sets (ArrayRecord, no TensorFlow), read through Grain."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds

from specdec_jax.data.packing import Rows
from specdec_jax.facts import differences


class DatasetError(ValueError):
  """A stored data set that was made from something else; the message names the difference."""


class _Stored(tfds.core.GeneratorBasedBuilder):
  """Examples in their order; `facts` (tokenizer, template, target, counts by reason) are the metadata."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, examples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], **options):
    self._examples, self._facts = examples, dict(facts)
    super().__init__(file_format="array_record", **options)

  def _features(self) -> dict[str, Any]:
    raise NotImplementedError

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=self, description=type(self).__doc__, disable_shuffling=True, metadata=tfds.core.MetadataDict(self._facts),
        features=tfds.features.FeaturesDict(self._features()))

  def _split_generators(self, dl_manager):
    del dl_manager
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    yield from enumerate(self._examples)


_TOKENS = tfds.features.Tensor(shape=(None,), dtype=np.int32)


class Prompts(_Stored):
  """Token ids of prompts, each with the name of what it came from."""

  def _features(self):
    return {"name": tfds.features.Text(), "prompt": _TOKENS}


class Responses(_Stored):
  """A target's own answers to prompts."""

  def _features(self):
    return {"name": tfds.features.Text(), "prompt": _TOKENS, "answer": _TOKENS, "reason": tfds.features.Text()}


class PackedRows(_Stored):
  """Rows of tokens, segments and answer marks."""

  def _features(self):
    row = lambda dtype: tfds.features.Tensor(shape=self._examples[0]["tokens"].shape, dtype=dtype)
    return {"tokens": row(np.int32), "segments": row(np.int32), "answer": row(np.bool_)}


def write(kind: type[_Stored], folder: pathlib.Path, examples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
  """Stores examples under `folder` with what they were made from."""
  kind(examples=examples, facts=facts, data_dir=str(folder)).download_and_prepare()


def read(kind: type[_Stored], folder: pathlib.Path, wanted: Mapping[str, Any] | None = None) -> tuple[grain.MapDataset, dict[str, Any]]:
  """(examples by number, in the order they were written; facts). Raises FileNotFoundError where nothing is stored,
  DatasetError for other facts than `wanted`."""
  found = sorted(folder.glob(f"{kind.name}/*/dataset_info.json"))
  if not found:
    raise FileNotFoundError(f"{folder} holds no {kind.name}")
  builder = tfds.builder_from_directory(str(found[-1].parent))
  facts = json.loads(json.dumps(dict(builder.info.metadata or {})))
  wrong = differences(facts, wanted or {})
  if wrong:
    raise DatasetError(f"the {kind.name} in {folder} were made from something else: {wrong}")
  return grain.MapDataset.source(builder.as_data_source(split="train")), facts


def read_or_write(
    kind: type[_Stored], folder: pathlib.Path, facts: Mapping[str, Any], make: Callable[[], Sequence[Mapping[str, Any]]],
) -> grain.MapDataset:
  """The stored examples, after storing those that `make` gives where there are none. Raises DatasetError as `read` does."""
  try:
    return read(kind, folder, facts)[0]
  except FileNotFoundError:
    write(kind, folder, make(), facts)
    return read(kind, folder, facts)[0]


def row_examples(rows: Rows) -> list[dict[str, np.ndarray]]:
  """Packed rows as examples of `PackedRows`."""
  each = zip(rows.tokens.astype(np.int32), rows.segments.astype(np.int32), rows.answer, strict=True)
  return [dict(zip(("tokens", "segments", "answer"), row, strict=True)) for row in each]


def numbered(examples: grain.MapDataset) -> grain.MapDataset:
  """Every example with its number as "row", also behind the first epoch, where the index goes on."""
  size = len(examples)
  return examples.map_with_index(lambda i, row: {**row, "row": i % size})


def all_rows(rows: grain.MapDataset) -> Rows:
  """Every row in the stored order, in memory."""
  every = [rows[i] for i in range(len(rows))]
  return Rows(*(np.stack([r[k] for r in every]) for k in ("tokens", "segments", "answer")))


def batches(rows: grain.MapDataset, batch: int, seed: int, part: slice | None = None) -> grain.MapDataset:
  """Shuffled batches without end: item i is a pure function of i, so that a step number is the whole data position.

  part: the rows of every batch that this process reads, all where None; whichever way a batch is parted, it holds the same rows.
  """
  # Not without number: Grain computes lengths in floats, and len() of a batch of one row would be beyond an index.
  stream = rows.seed(seed).shuffle().repeat(2**53 // len(rows))
  if part is None:
    return stream.batch(batch)
  size = part.stop - part.start
  if batch % size or part.start % size:
    raise ValueError(f"rows {part.start} … {part.stop - 1} are no even part of a batch of {batch}")
  return stream.batch(size)[part.start // size :: batch // size]
