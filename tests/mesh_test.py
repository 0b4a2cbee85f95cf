"""Meshes of 8 forced CPU devices against one device: texts, losses, loading, refusals."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import specdec_jax
from tests import mesh_cases, toys

ROOT = pathlib.Path(__file__).parents[1]
FAST = (
    "sizes_that_do_not_divide", "loading", "plans_are_traced", "loss_over_a_split_vocabulary", "kernels_on_a_mesh", "decoding_with_kernels",
    "training_with_kernels")
SLOW = (
    "decode_on_one_mesh", "decode_on_every_mesh", "engine_on_a_mesh", "recurrent_states_on_a_mesh", "training_on_every_mesh",
    "decoding_with_kernels_on_every_mesh", "engine_with_kernels", "kernels_for_gpus_on_a_mesh")


def run(*names):
  done = subprocess.run(
      [sys.executable, "-m", "tests.mesh_cases", *names], env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT,
      capture_output=True, text=True, timeout=900)
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


@pytest.mark.slow
def test_loading_a_gigabyte_holds_one_tensor_more_than_the_shards():
  found = run("loading_a_gigabyte")["loading_a_gigabyte"]
  assert found["checkpoint"] > 1e9 and found["beyond"] <= found["largest"], found


def together(folder, steps, lost):
  """(exit code, output, errors) of two processes that train and decode together."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{s.getsockname()[1]}"
  start = lambda k: subprocess.Popen(
      [sys.executable, "-m", "tests.mesh_process", coordinator, str(k), str(folder), str(steps), str(lost)], cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  both = [start(k) for k in range(2)]
  out = [p.communicate(timeout=1800) for p in both]
  return [(p.returncode, *o) for p, o in zip(both, out)]


@pytest.mark.slow
def test_two_processes(tmp_path):
  """They train and decode as one device does. One that is lost ends the other with one message; both go on from the checkpoint."""
  mesh_cases.train(tmp_path / "one", 20)
  began = time.time()
  (code, _, said), (gone, _, _) = together(tmp_path / "two", 20, 13)
  assert (code, gone) == (1, 9), said
  assert "another one is gone" in said and "resume from step 10" in said and "Traceback" not in said, said
  print(f"ended after {time.time() - began:.0f} s")
  found = together(tmp_path / "two", 20, -1)
  assert [f[0] for f in found] == [0, 0], found
  np.testing.assert_allclose(mesh_cases.losses_of(tmp_path / "two"), mesh_cases.losses_of(tmp_path / "one"), rtol=1e-5)
  target = toys.target(vocab=64)
  alone = specdec_jax.generate(target, toys.block_drafter(target), mesh_cases.PROMPTS, 12, ignore_eos=True, **mesh_cases.SAMPLED)
  assert [json.loads(f[1].splitlines()[-1]) for f in found] == [[c.tokens for c in alone]] * 2
