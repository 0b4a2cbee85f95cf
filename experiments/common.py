"""What every experiment shares: the two flags, and the fields of a results record that do not depend on the experiment."""

import importlib.util
import pathlib
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from specdec_jax import report

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file; override its values as --config.key=value.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results and checkpoints; created where missing.")


def settings(config: str | None = None, workdir: str | None = None) -> tuple[ConfigDict, pathlib.Path]:
  """The configuration and the work folder of this run; the arguments are the experiment's defaults.

  Raises SystemExit naming the missing flag where there is no default.
  """
  logging.set_verbosity(logging.WARNING)  # Orbax reports every file it writes.
  if _CONFIG.value is None and config is None:
    raise SystemExit("give --config=FILE; the configurations are under configs/")
  folder = pathlib.Path(_WORKDIR.value or workdir or f"runs/{pathlib.Path(_config_name(config)).stem}")
  folder.mkdir(parents=True, exist_ok=True)
  return _CONFIG.value if _CONFIG.value is not None else _load(config), folder


def record_base(experiment: str, config: str | None = None) -> dict[str, Any]:
  """The fields of a results record that say what ran, where and on which versions."""
  overrides = config_flags.get_override_values(flags.FLAGS["config"]) if _CONFIG.value is not None else {}
  return {
      "experiment": experiment, "config": _config_name(config), "overrides": dict(overrides), "commit": report.commit(),
      "versions": report.versions(), "device": report.device()}


def _config_name(default: str | None) -> str:
  return config_flags.get_config_filename(flags.FLAGS["config"]) if _CONFIG.value is not None else default


def _load(path: str) -> ConfigDict:
  spec = importlib.util.spec_from_file_location("default_config", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()
