"""Rotary position embeddings by any of their published spellings."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.config.error import ConfigError
from specdec_jax.typing import Float


@dataclasses.dataclass(frozen=True)
class Rotary:
  """Rotary position embedding: base, and the published rescalings of its frequencies.

  kind: "default", "linear", "llama3", "yarn" or "proportional"; `scaling` holds the keys of that kind as published.
  width: rotated channels of a head (the first ones); the rest passes through. Under "proportional" (Gemma 4) they are all
  paired, and only the first `partial_rotary_factor` of the pairs turn.
  """

  theta: float
  width: int
  kind: str = "default"
  scaling: tuple[tuple[str, float], ...] = ()

  def frequencies(self) -> tuple[Float["H"], float]:
    """Angular frequencies [width/2] in radians per position, and the factor on cos and sin (1 but for yarn)."""
    base = self.theta ** -(np.arange(0, self.width, 2, dtype=np.float64) / self.width)
    s = dict(self.scaling)
    if self.kind == "default":
      return base.astype(np.float32), 1.0
    if self.kind == "linear":
      return (base / s["factor"]).astype(np.float32), 1.0
    if self.kind == "llama3":
      return _llama3(base, s).astype(np.float32), 1.0
    if self.kind == "proportional":
      turning = np.arange(len(base)) < int(s["partial_rotary_factor"] * self.width // 2)
      return np.where(turning, base / s.get("factor", 1.0), 0.0).astype(np.float32), 1.0
    return _yarn(base, self.theta, self.width, s)

  def published(self, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` entry of a config.json."""
    partial = {"partial_rotary_factor": self.width / head_dim} if self.width != head_dim else {}
    return {"rope_theta": self.theta, "rope_type": self.kind, **dict(self.scaling), **partial}


def _llama3(base: np.ndarray, s: Mapping[str, float]) -> np.ndarray:
  """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
  cycles = s["original_max_position_embeddings"] * base / (2 * np.pi)
  blend = np.clip((cycles - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
  return blend * base + (1 - blend) * base / s["factor"]


def _yarn(base: np.ndarray, theta: float, width: int, s: Mapping[str, float]) -> tuple[np.ndarray, float]:
  """YaRN (arXiv 2309.00071, section 3.2): interpolation by wavelength, and the attention factor."""
  factor, original = s["factor"], s["original_max_position_embeddings"]

  def dimension(rotations: float) -> float:
    return width * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

  low, high = dimension(s.get("beta_fast", 32.0)), dimension(s.get("beta_slow", 1.0))
  if s.get("truncate", True):
    low, high = np.floor(low), np.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
  attention = s.get("attention_factor")
  if attention is None:
    mscale = lambda m: 0.1 * m * np.log(factor) + 1.0 if factor > 1 else 1.0
    both = s.get("mscale") and s.get("mscale_all_dim")
    attention = mscale(s["mscale"]) / mscale(s["mscale_all_dim"]) if both else mscale(1.0)
  return (base / factor * ramp + base * (1 - ramp)).astype(np.float32), float(attention)


_ROTARY_NEEDS = {
    "default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), "proportional": (),
}
_ROTARY_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def rotary_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
  """config[key], empty where there is none. Raises ConfigError for what is no object."""
  found = config.get(key)
  if not isinstance(found, Mapping | None):
    raise ConfigError(f"{key} must be an object, not {found!r}")
  return found or {}


def _check_known(settings: Mapping[str, Any], keys: Sequence[str], kind: str) -> None:
  unknown = [k for k, v in settings.items() if k not in keys and k != "original_max_position_embeddings" and v is not None]
  if unknown:
    raise ConfigError(f"rotary settings {', '.join(sorted(unknown))} are not supported for rope_type {kind!r}")


def rotary_from_published(config: Mapping[str, Any], head_dim: int) -> Rotary:
  """Rotary settings from any published spelling: `rope_parameters` (flat, or nested by layer type), or `rope_theta`
  with `rope_scaling`. Raises ConfigError where no base is given: a default would be a silent replacement."""
  parameters = dict(rotary_object(config, "rope_parameters"))
  nested = [v for v in parameters.values() if isinstance(v, Mapping)]
  if nested:
    if any(dict(v) != dict(nested[0]) for v in nested):
      raise ConfigError("rope_parameters differ by layer type: not supported for this architecture")
    parameters = dict(nested[0])
  merged = {**rotary_object(config, "rope_scaling"), **parameters}
  theta = merged.pop("rope_theta", None) or config.get("rope_theta")
  if not theta:
    raise ConfigError("no rotary base: give rope_theta, or rope_parameters with rope_theta")
  if not isinstance(theta, numbers.Real) or not theta > 0:
    raise ConfigError(f"rope_theta {theta!r} must be a number above 0")
  older, kind = merged.pop("type", None), merged.pop("rope_type", None)  # Some releases wrote both.
  kind = kind or older or "default"
  if kind not in _ROTARY_NEEDS:
    raise ConfigError(f"rope_type {kind!r} is not supported; known: {', '.join(_ROTARY_NEEDS)}")
  if kind == "yarn":
    merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
  missing = [k for k in _ROTARY_NEEDS[kind] if merged.get(k) is None]
  if missing:
    raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}")
  stated = [x for x in (merged.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")) if x is not None]
  share = stated[0] if stated else 1.0
  if not isinstance(share, numbers.Real) or not 0 < share <= 1:
    raise ConfigError(f"partial_rotary_factor {share!r} must be above 0 and at most 1")
  width = head_dim if kind == "proportional" else int(head_dim * share)
  if not 0 < width + width % 2 <= head_dim:  # Channels are turned in pairs; an odd one takes the next along.
    raise ConfigError(f"{width} channels of heads of {head_dim} cannot be rotated in pairs")
  if kind == "proportional":
    factor = merged.pop("factor", None) or 1.0
    _check_known(merged, (), kind)
    scaling = (("partial_rotary_factor", float(share)), *((("factor", float(factor)),) if factor != 1.0 else ()))
    return Rotary(float(theta), head_dim, kind, scaling)
  keys = [k for k in (*_ROTARY_NEEDS[kind], *_ROTARY_OPTIONS) if merged.get(k) is not None]
  _check_known(merged, keys, kind)
  return Rotary(float(theta), width, kind, tuple((k, merged[k]) for k in keys if kind != "default"))
