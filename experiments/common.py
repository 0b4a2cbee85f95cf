"""What every experiment shares: the two flags, the processes and the mesh of a run, and the fields of a results record that do not
depend on the experiment."""

import os
import pathlib
import sys
from typing import Any

import jax
from absl import flags, logging
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_flags

from specdec_jax import report, sharding
from specdec_jax.models.target import Target


def define(config: str) -> None:
  """Defines the two flags; `config` is the experiment's default configuration file."""
  config_flags.DEFINE_config_file("config", config, "Configuration file; override its values as --config.key=value.")
  flags.DEFINE_string("workdir", None, "Folder for results and checkpoints; created where missing. Default: runs/CONFIG.")


def settings() -> tuple[ConfigDict, pathlib.Path]:
  """The configuration and the work folder of this run; by default runs/tiny_quickstart for configs/tiny/quickstart.py."""
  logging.set_verbosity(logging.WARNING)  # Orbax reports every file it writes.
  path = pathlib.Path(_config_file().split(":")[0])
  folder = pathlib.Path(flags.FLAGS.workdir or f"runs/{path.parent.name}_{path.stem}")
  folder.mkdir(parents=True, exist_ok=True)
  connect(flags.FLAGS.config)
  return flags.FLAGS.config, folder


def connect(config: ConfigDict) -> None:
  """Joins the other processes of the run that config.distributed describes, if it does: coordinator, host:port of process 0, or
  "auto" on a TPU slice or under a launcher that jax knows; processes; process, the number of this one; patience, seconds of silence
  after which a process counts as lost and the others end."""
  d = config.get("distributed")
  if d is None or not d.coordinator:
    return
  which = {} if d.coordinator == "auto" else dict(coordinator_address=d.coordinator, num_processes=d.processes, process_id=d.process)
  jax.distributed.initialize(**which, heartbeat_timeout_seconds=d.patience, shutdown_timeout_seconds=d.patience)


def leave(error: BaseException) -> None:
  """Ends this process with one message, at once: an ordinary exit would wait for the processes that are gone."""
  print(error, file=sys.stderr, flush=True)
  os._exit(1)


def mesh(config: ConfigDict) -> Mesh | None:
  """The mesh that config.mesh asks for, over the devices of all processes; None for one device."""
  sizes = dict(config.get("mesh") or {})
  return sharding.make_mesh(**sizes) if any(n > 1 for n in sizes.values()) else None


def record(experiment: str, target: Target | None, drafter: dict[str, Any] | None = None, **fields) -> dict[str, Any]:
  """A results record: what ran, where and on which versions, and `fields`; what they leave out did not come up.

  drafter: name and hash.
  """
  measured = {
      "seed": None, "dataset": None, "temperature": None, "concurrency": None, "schedule": None, "rule": None,
      "n_requests": 0, "n_rounds": 0,
      "speculation": {"on": False, "why": None}, "lossless": {"contract": None, "identical": None, "n": 0, "holds": None},
      "compile": {"count": None, "seconds": None}}
  return {
      "experiment": experiment, "config": _config_file(), "overrides": dict(config_flags.get_override_values(flags.FLAGS["config"])),
      "commit": report.commit(), "versions": report.versions(), "device": report.device(),
      "target": {"name": target and target.name, "hash": target and target.hash}, "drafter": drafter, **measured, **fields}


def _config_file() -> str:
  return config_flags.get_config_filename(flags.FLAGS["config"])
