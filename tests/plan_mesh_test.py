"""Programs compiled for devices that are not there; needs the compiler of one kind, no device."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("package, config", [
    ("libtpu", "configs/qwen3_4b/plan.py:v5e"), ("jax_plugins.xla_cuda13", "configs/qwen3_4b/plan.py:h200"),
    ("libtpu", "configs/qwen3_14b/plan.py")])
def test_plan(tmp_path, package, config):
  if importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None:
    pytest.skip(f"the package {package} is not installed: there is no compiler for this topology")
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # Not the quick compilation of the other tests.
  done = subprocess.run(
      [sys.executable, "-m", "experiments.plan_mesh", f"--config={config}", f"--workdir={tmp_path}"], cwd=ROOT, env=environment,
      capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  lines = (tmp_path / "plan.md").read_text().splitlines()
  rows = [line for line in lines if line.startswith(("| training", "| draft", "| verify", "| commit"))]
  assert len(rows) == 6 and all(" yes |" in r for r in rows), rows
