"""Models to published folders."""

import dataclasses
import pathlib

import jax
import ml_dtypes
import numpy as np

from specdec_jax.config import ModelConfig
from specdec_jax.data.tokenizer import Tokenizer
from specdec_jax.drafters.base import Drafter
from specdec_jax.hub import folder as folder_lib
from specdec_jax.hub import layout as layout_lib

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def save_target(folder: str | pathlib.Path, config: ModelConfig, params, tokenizer: Tokenizer | None, dtype: str = "float32") -> None:
  """Writes a target (unstacked, untransposed parameters) in the layout of transformers 5."""
  folder = pathlib.Path(folder)
  _save(folder, config.to_published(dtype), layout_lib.decoder_entries(config), params, False, dtype)
  if tokenizer is not None:
    tokenizer.save(folder)


LAYOUTS = ("deepspec", "dflash2", "eagle3", "hybrid", "mtp")


def export(drafter: Drafter, folder: str | pathlib.Path, layout: str | None = None, dtype: str = "float32") -> None:
  """Writes a drafter in a published layout, ready for a serving engine: "deepspec", "eagle3" (RELEASED_FORMATS §1), "dflash2"
  (§2); "hybrid" and "mtp" extend those for what no published reader knows. layout None: the one that fits.

  Raises ValueError where `layout` cannot hold the drafter.
  """
  c = drafter.config
  if layout is not None and layout not in LAYOUTS:
    raise ValueError(f"unknown layout {layout!r}: {', '.join(LAYOUTS)}")
  if layout not in (None, c.layout):
    raise ValueError(f"layout {layout!r} cannot hold {drafter.name}, whose parts need {c.layout!r}")
  params = dict(drafter.params)
  if "draft_ids" in params:  # Published as offsets.
    params["draft_ids"] = np.asarray(params["draft_ids"]) - np.arange(len(params["draft_ids"]), dtype=np.int32)
  folder = pathlib.Path(folder)
  _save(folder, c.to_published(dtype), layout_lib.drafter_entries(c), params, drafter.model.transposed, dtype)
  if drafter.calibration:
    note = f"fitted on weights {drafter.calibration.drafter}, exported as {dtype}"
    digest = folder_lib.weights_hash(folder_lib.weight_files(folder))
    dataclasses.replace(drafter.calibration, drafter=digest, notes=(*drafter.calibration.notes, note)).save(folder)


def _save(folder: pathlib.Path, config, entries, params, transposed: bool, dtype: str) -> None:
  if dtype not in _DTYPES:
    raise ValueError(f"dtype {dtype!r} is not supported: {', '.join(_DTYPES)}")
  tensors = layout_lib.take_apart(entries, jax.device_get(params), transposed)
  folder_lib.save(folder, config, {k: v if np.issubdtype(v.dtype, np.integer) else v.astype(_DTYPES[dtype]) for k, v in tensors.items()})
