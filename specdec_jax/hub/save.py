"""Models to published folders."""

import pathlib

import jax
import ml_dtypes
import numpy as np

from specdec_jax.config import ModelConfig
from specdec_jax.data.tokenizer import Tokenizer
from specdec_jax.hub import folder as folder_lib
from specdec_jax.hub import layout

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def save_target(folder: pathlib.Path, config: ModelConfig, params, tokenizer: Tokenizer | None, dtype: str = "float32") -> None:
  """Writes a target (unstacked, untransposed parameters) in the layout of transformers 5."""
  tensors = layout.take_apart(layout.decoder_entries(config), jax.device_get(params))
  folder_lib.save(folder, config.to_published(dtype), {k: v.astype(_DTYPES[dtype]) for k, v in tensors.items()})
  if tokenizer is not None:
    tokenizer.save(folder)


def export(drafter, folder: str | pathlib.Path, layout_name: str = "deepspec", dtype: str = "float32") -> None:
  raise NotImplementedError
