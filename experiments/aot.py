"""Compiles every kernel for TPUs and a GPU on a machine that has none, and compares what comes out with the recorded table.

  make aot        (in a virtual environment of its own, with libtpu and the CUDA compiler)
  python -m experiments.aot --config=configs/kernels/aot.py --workdir=runs/aot

TPU: instruction bundles of the kernels in the schedule that libtpu makes (static: a loop's body counts once). GPU: registers and
spilled bytes that ptxas reports for the PTX that XLA makes (sm_90a). Ends with exit code 1 where a kernel does not compile, spills more
or takes more bundles than the table records; a table that should change is written to the work folder, to be committed.
"""

import concurrent.futures
import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import jax
from absl import app
from rich import console as rich_console
from rich import table as rich_table

from experiments import common


def jobs(config) -> list[tuple[str, str, str]]:
  """(operation, large case, "forward" or "backward") of everything to compile: `cases` of every operation, spread over its list; 0: all."""
  from specdec_jax.kernels import OPS

  out = []
  for op in OPS.values():
    large = [c for c in op.cases if c.large]
    step = len(large) / (config.cases or len(large))
    for case in {large[int(i * step)].name: large[int(i * step)] for i in range(config.cases or len(large))}.values():
      out += [(op.name, case.name, way) for way in (("forward", "backward") if case.differentiable else ("forward",))]
  return out


def lowered(implementation: str, topology, op: str, case: str, way: str):
  """One job lowered for one device of `topology`."""
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from specdec_jax.kernels import OPS

  op = OPS[op]
  case = next(c for c in op.cases if c.name == case)
  mesh = Mesh(np.array(topology.devices[:1]), ("device",))
  place = NamedSharding(mesh, PartitionSpec())
  arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), case.shapes())
  call = lambda a: op.call(**a, **case.settings, implementation=implementation)

  def gradient(a):
    loss = lambda some: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(call({**a, **some})))
    return jax.grad(loss)({k: a[k] for k in case.differentiable})

  with jax.set_mesh(mesh):
    return jax.jit(call if way == "forward" else gradient).lower(arguments)


@functools.cache
def topology(platform: str, target: str):
  """The devices of a TPU topology, by name, or of a GPU, by XLA's description; one chip of them is compiled for."""
  from jax.experimental import topologies

  if platform == "tpu":
    return topologies.get_topology_desc(platform="tpu", topology_name=target, chips_per_host_bounds=(1, 1, 1))
  return topologies.get_topology_desc(platform="cuda", topology_name="gpu", target_config=target, topology="1x1x1")


def inspect_tpu(text: str, dump: pathlib.Path) -> dict:
  """Kernel calls of a compiled program and their bundles."""
  names = set(re.findall(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', text))
  found = [f for name in names for f in dump.glob(f"*-{name}-*schedule-analysis_final_bundles.txt")]
  return {"calls": len(names), "bundles": sum(int(re.search(r"total scheduled bundles:\s+(\d+)", f.read_text())[1]) for f in found)}


def inspect_gpu(text: str, dump: pathlib.Path) -> dict:
  """Kernel calls of a compiled program, the most registers of any and all spilled bytes."""
  report = ""
  for ptx in (f for f in dump.glob("*.ptx") if f.stat().st_size):  # A module without kernels leaves an empty file.
    done = subprocess.run([ptxas(), "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull], capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(f"ptxas refuses {ptx.name}: {done.stderr[-500:]}")
    report += done.stderr
  numbers = lambda pattern: [int(n) for n in re.findall(pattern, report)]
  return {"calls": text.count("__gpu$xla.gpu.triton"), "registers": max(numbers(r"Used (\d+) registers"), default=0),
          "spilled": sum(numbers(r"(\d+) bytes spill"))}


def ptxas() -> str:
  """The CUDA assembler: of the package nvidia-cuda-nvcc, or on the path. Raises FileNotFoundError."""
  spec = importlib.util.find_spec("nvidia")
  places = [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else ())] + [pathlib.Path("/usr/local/cuda")]
  found = [str(f) for p in places for f in p.glob("**/bin/ptxas")] + [f for f in [shutil.which("ptxas")] if f]
  if not found:
    raise FileNotFoundError("ptxas is not installed: pip install nvidia-cuda-nvcc (make aot)")
  return found[0]


def dump_folder(root: str) -> pathlib.Path:
  """Where the compilers of this process write what they made."""
  return pathlib.Path(root) / str(os.getpid())


def prepare(root: str) -> None:
  """Settings of a worker process, which the compilers read when they are loaded."""
  folder = dump_folder(root)
  folder.mkdir()
  os.environ |= {
      "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_ACCELERATOR_TYPE": "v5litepod-8", "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}",
      "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"}


def work(root: str, platform: str, target: str, job) -> dict:
  """What one job compiles to, in a worker process; what went wrong stands under "error"."""
  folder = dump_folder(root)
  try:
    text = lowered(platform, topology(platform, target), *job).compile().as_text()
    return {"tpu": inspect_tpu, "gpu": inspect_gpu}[platform](text, folder)
  except Exception as error:  # A job that fails must not hide the others.
    return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
  finally:
    shutil.rmtree(folder)
    folder.mkdir()


def worse(found: dict, recorded: dict | None, comparable: bool) -> str | None:
  """Why a result fails, or None: an error, no kernel in the program (unless the table says that there is none, where XLA does it
  as well), more spilled bytes than recorded, or, where the compilers are those of the table, more bundles."""
  if "error" in found:
    return found["error"]
  if not found["calls"] and (recorded or {}).get("calls") != 0:
    return "no kernel in the compiled program"
  before = {"spilled": 0, **(recorded or {})}
  for name in ("bundles", "spilled") if comparable else ("spilled",):
    if found.get(name, 0) > before.get(name, float("inf")):
      return f"{name} {found[name]}, recorded {before[name]}"
  return None


def main(argv):
  del argv
  jax.config.update("jax_platforms", "cpu")
  os.environ["JAX_PLATFORMS"] = "cpu"  # Of the workers, which read it when they import jax.
  config, workdir = common.settings()
  path = pathlib.Path(config.table)
  versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
  table = json.loads(path.read_text()) if path.exists() else {"versions": versions, "kernels": {}}
  recorded = table["kernels"]
  found, failures = {}, []
  context = multiprocessing.get_context("spawn")
  for name, (platform, target) in config.targets.items():  # Compilers of one platform in a process.
    with tempfile.TemporaryDirectory() as root, concurrent.futures.ProcessPoolExecutor(config.processes, context, prepare, (root,)) as pool:
      waiting = {job: pool.submit(work, root, platform, target, job) for job in jobs(config)}
      for job, future in waiting.items():
        key = "/".join(job)
        found.setdefault(key, {})[name] = result = future.result()
        reason = worse(result, recorded.get(key, {}).get(name), versions == table["versions"])
        failures += [f"{key} on {name}: {reason}"] if reason else []
  shown = rich_table.Table("kernel", *config.targets)
  cell = lambda r: r.get("error") or ", ".join(f"{v} {k}" for k, v in r.items() if k != "calls")
  for key, results in found.items():
    shown.add_row(key, *(cell(results[name]) for name in config.targets))
  screen = rich_console.Console()
  screen.width = max(screen.width, 140)
  screen.print(shown)
  (workdir / "aot.json").write_text(json.dumps({"versions": versions, "kernels": {**recorded, **found}}, indent=1, sort_keys=True) + "\n")
  screen.print(f"table: {workdir / 'aot.json'}; recorded: {path}" + ("" if found == {k: recorded.get(k) for k in found} else " (differs)"))
  if failures:
    raise SystemExit("\n".join(failures))


if __name__ == "__main__":
  common.define("configs/kernels/aot.py")
  app.run(main)
