"""Packed training rows as a TFDS data set (ArrayRecord, no TensorFlow), read at random through Grain."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds

from specdec_jax.data.packing import Rows


class DatasetError(ValueError):
  """A stored data set that was made from something else; the message names the difference."""


class PackedRows(tfds.core.GeneratorBasedBuilder):
  """Rows of tokens, segments and answer marks; `facts` (tokenizer, template, target, counts by reason) are its metadata."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, rows: Rows, facts: Mapping[str, Any], **options):
    self._rows, self._facts = rows, dict(facts)
    super().__init__(file_format="array_record", **options)

  def _info(self) -> tfds.core.DatasetInfo:
    length = self._rows.tokens.shape[1]
    row = lambda dtype: tfds.features.Tensor(shape=(length,), dtype=dtype)
    return tfds.core.DatasetInfo(
        builder=self, description="Packed rows of conversations.", metadata=tfds.core.MetadataDict(self._facts),
        features=tfds.features.FeaturesDict({"tokens": row(np.int32), "segments": row(np.int32), "answer": row(np.bool_)}))

  def _split_generators(self, dl_manager):
    del dl_manager
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    for i, (tokens, segments, answer) in enumerate(zip(self._rows.tokens, self._rows.segments, self._rows.answer)):
      yield i, {"tokens": tokens.astype(np.int32), "segments": segments.astype(np.int32), "answer": answer}


def write_rows(folder: pathlib.Path, rows: Rows, facts: Mapping[str, Any]) -> None:
  """Stores rows under `folder` with what they were made from."""
  PackedRows(rows=rows, facts=facts, data_dir=str(folder)).download_and_prepare()


def open_rows(folder: pathlib.Path, wanted: Mapping[str, Any] | None = None) -> tuple[grain.MapDataset, dict[str, Any]]:
  """(rows by number, each with its number as "row"; facts). Raises FileNotFoundError where nothing is stored, DatasetError for other facts than `wanted`."""
  found = sorted(folder.glob("packed_rows/*/dataset_info.json"))
  if not found:
    raise FileNotFoundError(f"{folder} holds no packed rows")
  builder = tfds.builder_from_directory(str(found[-1].parent))
  facts = json.loads(json.dumps(dict(builder.info.metadata or {})))
  wrong = [f"{k} is {facts.get(k)}, not {v}" for k, v in (wanted or {}).items() if facts.get(k) != v]
  if wrong:
    raise DatasetError(f"the rows in {folder} were made from something else: {'; '.join(wrong)}")
  source = grain.MapDataset.source(builder.as_data_source(split="train"))
  size = len(source)  # Beyond the first epoch the index goes on.
  return source.map_with_index(lambda i, row: {**row, "row": i % size}), facts


def all_rows(rows: grain.MapDataset) -> Rows:
  """Every row in the stored order, in memory."""
  every = [rows[i] for i in range(len(rows))]
  return Rows(*(np.stack([r[k] for r in every]) for k in ("tokens", "segments", "answer")))


def batches(rows: grain.MapDataset, batch: int, seed: int) -> grain.MapDataset:
  """Shuffled batches without end: item i is a pure function of i, so that a step number is the whole data position."""
  return rows.seed(seed).shuffle().repeat().batch(batch)
