"""Meshes of 8 forced CPU devices against one device: texts, losses, loading, refusals."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAST = ("sizes_that_do_not_divide", "loading", "loss_over_a_split_vocabulary", "decode_on_one_mesh")
SLOW = ("decode_on_every_mesh", "engine_on_a_mesh", "training_on_every_mesh")


def run(*names):
  done = subprocess.run(
      [sys.executable, "-m", "tests.mesh_cases", *names], env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fast():
  return run(*FAST)


@pytest.mark.parametrize("case", FAST)
def test_case(fast, case):
  assert fast[case] == "ok", fast[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_slow_case(case):
  found = run(case)
  assert found[case] == "ok", found[case]
