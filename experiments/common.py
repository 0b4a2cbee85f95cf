"""What every experiment shares: the two flags, the results record."""

import pathlib

from absl import flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file; override as --config.key=value.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results and checkpoints; created where missing.")


def settings(config: str | None = None, workdir: str | None = None):
  """The configuration and the work folder of this run; the arguments are the experiment's defaults."""
  del config
  logging.set_verbosity(logging.WARNING)  # Orbax reports every file it writes.
  folder = pathlib.Path(_WORKDIR.value or workdir or "runs/default")
  folder.mkdir(parents=True, exist_ok=True)
  return _CONFIG.value, folder
