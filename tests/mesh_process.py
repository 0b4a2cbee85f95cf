"""One of two processes with four forced CPU devices each, for mesh_test.py: python -m tests.mesh_process COORDINATOR PROCESS FOLDER
STEPS LOST: trains together, process 1 leaving without a word before step LOST; then both decode."""

import json
import os
import sys
import time

import jax
import ml_collections

import specdec_jax
from experiments import common
from specdec_jax import sharding
from specdec_jax.training import trainer
from tests import mesh_cases, toys


def main(coordinator, process, folder, steps, lost):
  jax.config.update("jax_num_cpu_devices", 4)
  common.connect(ml_collections.ConfigDict(dict(distributed=dict(coordinator=coordinator, processes=2, process=int(process), patience=10))))
  mesh = sharding.make_mesh(2, 2, 2)

  def before(step):
    if process == "1" and step == int(lost):
      time.sleep(5)  # For the checkpoint before to be whole.
      os._exit(9)

  try:
    mesh_cases.train(folder, int(steps), mesh, before)
  except trainer.ProcessLost as e:
    common.leave(e)
  target = toys.target(vocab=64)
  drafter = mesh_cases.on_mesh(toys.block_drafter(target), mesh)
  done = specdec_jax.generate(mesh_cases.on_mesh(target, mesh), drafter, mesh_cases.PROMPTS, 12, ignore_eos=True, **mesh_cases.SAMPLED)
  print(json.dumps([c.tokens for c in done]))


if __name__ == "__main__":
  main(*sys.argv[1:])
