"""A target's features on disk, for training a drafter more than once on the same rows without running the target again.

What is stored of every token: the taps and the final-normed hidden state, in bfloat16, or in int8 with one scale a token
and vector. A cache belongs to one target, tap list, tokenizer and set of rows, and is refused with any other.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specdec_jax import facts
from specdec_jax.data.packing import Rows
from specdec_jax.models.target import Target
from specdec_jax.typing import Float

STORED = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}
_MANIFEST = "manifest.json"


class FeatureCacheError(ValueError):
  """A cache that belongs to something else, or is not complete; the message names the difference."""


def bytes_per_token(width: int, taps: int, dtype: str) -> int:
  """Bytes that one token takes: `taps` tapped layers and the last hidden state, of `width` channels each."""
  return (taps + 1) * (width * STORED[dtype].itemsize + (4 if dtype == "int8" else 0))


def describe(target: Target, taps: Sequence[int], rows: Rows, dtype: str) -> dict[str, Any]:
  """What a cache is tied to."""
  if dtype not in STORED:
    raise ValueError(f"a feature cache holds {' or '.join(STORED)}, not {dtype!r}")
  digest = hashlib.sha256(rows.tokens.tobytes() + rows.segments.tobytes()).hexdigest()[:16]
  return {
      "target": target.hash, "taps": list(taps), "tokenizer": target.tokenizer.fingerprint() if target.tokenizer else None,
      "rows": len(rows.tokens), "row_length": rows.tokens.shape[1], "tokens": digest, "width": target.config.width, "dtype": dtype}


@dataclasses.dataclass(frozen=True)
class FeatureCache:
  """An open cache: values [rows, S, taps+1, D] as stored, the hidden state last; scales [rows, S, taps+1], of int8 only."""

  values: np.ndarray
  scales: np.ndarray | None

  def rows(self, index: np.ndarray) -> dict[str, np.ndarray]:
    """The stored form of some rows, for `restore`."""
    out = {"values": np.asarray(self.values[index])}
    return out if self.scales is None else out | {"scales": np.asarray(self.scales[index])}


def restore(stored: dict[str, Any]) -> tuple[Float["B S M D"], Float["B S D"]]:
  """Taps and final-normed hidden states, float32, from `FeatureCache.rows`."""
  values = jnp.asarray(stored["values"]).astype(jnp.float32)
  if "scales" in stored:
    values *= stored["scales"][..., None]
  return values[:, :, :-1], values[:, :, -1]


def write(
    folder: pathlib.Path, target: Target, taps: Sequence[int], rows: Rows, dtype: str, batch: int,
    compute: Callable[[np.ndarray, np.ndarray], tuple[Float["B S M D"], Float["B S D"]]],
) -> FeatureCache:
  """Fills `folder` by compute(tokens [B,S], segments [B,S]), `batch` rows at a time, and opens it. The manifest comes last,
  so that a cache that was cut off is no cache."""
  wanted = describe(target, taps, rows, dtype)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / _MANIFEST).unlink(missing_ok=True)
  values, scales = _arrays(folder, wanted, "w+")
  for start in range(0, len(rows.tokens), batch):
    tokens, segments = rows.tokens[start : start + batch], rows.segments[start : start + batch]
    short = batch - len(tokens)
    padded = [np.pad(x, ((0, short), (0, 0))) for x in (tokens, segments)]
    tapped, hidden = compute(*padded)
    block = np.concatenate([np.asarray(tapped, np.float32), np.asarray(hidden, np.float32)[:, :, None]], 2)[: len(tokens)]
    if scales is None:
      values[start : start + batch] = block.astype(values.dtype)
    else:
      scale = np.abs(block).max(-1) / 127
      scales[start : start + batch] = scale
      values[start : start + batch] = np.rint(block / np.maximum(scale, 1e-30)[..., None])
  values.flush()
  (folder / _MANIFEST).write_text(json.dumps(wanted, indent=2) + "\n")
  return open_cache(folder, target, taps, rows, dtype)


def open_cache(folder: pathlib.Path, target: Target, taps: Sequence[int], rows: Rows, dtype: str) -> FeatureCache:
  """Raises FileNotFoundError where there is none, FeatureCacheError where it belongs to something else."""
  path = folder / _MANIFEST
  if not path.exists():
    raise FileNotFoundError(f"{folder} holds no complete feature cache")
  found, wanted = json.loads(path.read_text()), describe(target, taps, rows, dtype)
  wrong = facts.differences(found, wanted)
  if wrong:
    raise FeatureCacheError(f"the feature cache {folder} belongs to something else: {wrong}")
  return FeatureCache(*_arrays(folder, wanted, "r"))


def _arrays(folder: pathlib.Path, d: dict[str, Any], mode: str):
  shape = (d["rows"], d["row_length"], len(d["taps"]) + 1)
  stored = STORED[d["dtype"]]
  raw = np.memmap(folder / "values.bin", np.uint16 if stored.itemsize == 2 else np.int8, mode, shape=(*shape, d["width"]))
  scales = np.memmap(folder / "scales.bin", np.float32, mode, shape=shape) if d["dtype"] == "int8" else None
  return raw.view(stored), scales
