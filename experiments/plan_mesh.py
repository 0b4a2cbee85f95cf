"""What training and decoding would take on devices that are not there: compiled ahead of time, counted from shapes.

  python -m experiments.plan_mesh --config=configs/qwen3_4b/plan.py:v5e

TPU topologies need libtpu, GPUs the CUDA plugin and ptxas (pip install -e '.[aot]' brings all of them); neither needs a device. A program
that needs more memory than a device has is refused by the TPU compiler; for GPUs its size is compared with the memory.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from rich import console as rich_console

from experiments import common
from specdec_jax import counting, decode, presets, report, sharding, slots
from specdec_jax.drafters import BlockDrafter, drafter_model
from specdec_jax.models.decoder import Decoder, head_table
from specdec_jax.models.target import Target
from specdec_jax.training import losses, trainer
from specdec_jax.training.objective import FROZEN, Objective
from specdec_jax.training.optimizer import adamw, learning_rate


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device, from its maker's data sheet: bytes of memory, bfloat16 operations/s, bytes/s of memory and of the links to others."""

  memory: float
  flops: float
  bandwidth: float
  links: float


CHIPS = {
    "v5e": Chip(16 * 2**30, 197e12, 819e9, 200e9), "v6e": Chip(32 * 2**30, 918e12, 1640e9, 448e9),
    "v5p": Chip(95 * 2**30, 459e12, 2765e9, 600e9), "h200": Chip(141e9, 989e12, 4.8e12, 450e9)}

# What libtpu looks for where there is no TPU to ask.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8"}

# Without a device XLA cannot try tiles of its Triton products, and ends where its guess fits none.
OPTIONS = {"tpu": None, "gpu": {"xla_gpu_enable_triton_gemm": False}}

H200 = pathlib.Path(__file__).parents[1] / "configs" / "kernels" / "h200.txtpb"  # XLA's description of it


def make_mesh(topology: str, shape) -> Mesh:
  """A mesh of absent devices: "v5e:2x4" and the like, or "h200:1x8". Raises RuntimeError that says what to install."""
  kind, _, grid = topology.partition(":")
  if kind not in CHIPS:
    raise ValueError(f"no chip {kind!r}: {', '.join(CHIPS)}")
  needs, how = ("jax_plugins.xla_cuda13", "jax[cuda13-local]' nvidia-cuda-nvcc 'flatbuffers") if kind == "h200" else ("libtpu", "jax[tpu]")
  if importlib.util.find_spec(needs.split(".")[0]) is None or importlib.util.find_spec(needs) is None:
    raise RuntimeError(f"compiling for {topology} needs the package {needs}: pip install '{how}' (no device is needed)")
  if kind == "h200":
    made = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=H200.read_text(), topology="1x" + grid if grid.count("x") == 1 else grid)
  else:
    made = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **({"chips_per_host_bounds": (1, 1, 1)} if grid == "1x1" else {}))
  if np.prod(shape) != len(made.devices):
    raise ValueError(f"a mesh of {tuple(shape)} does not fit the {len(made.devices)} devices of {topology}")
  return Mesh(np.array(made.devices).reshape(shape), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def shapes(tree, mesh: Mesh, rules=sharding.PARAMETERS, dtype: str | None = None):
  """`tree` as shapes with shardings; dtype: of what is floating-point, unchanged where None."""
  def one(x, where):
    kind = dtype if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jax.ShapeDtypeStruct(x.shape, kind, sharding=where)

  return jax.tree.map(one, tree, sharding.shardings(tree, mesh, rules))


@dataclasses.dataclass(frozen=True)
class Models:
  """Target and drafter of a plan: functions, and their parameters as shapes."""

  target: Target
  drafter: object
  trainable: dict
  frozen: dict


def models(config, mesh: Mesh, kernels: str) -> Models:
  """Nothing is computed: initialisers are traced for their shapes. kernels: the implementation; that of the backend would be this
  machine's."""
  c = presets.target_config(config.target)
  decoder = Decoder(c, stacked=c.uniform, kernels=kernels)
  params = jax.eval_shape(lambda key: decoder.init(key, jnp.zeros((1, 8), jnp.int32), method="init_all")["params"], jax.random.key(0))
  params = shapes(params, mesh, dtype="bfloat16")
  model = drafter_model(presets.drafter_config(config.target, config.drafter), dtype="bfloat16")
  model = dataclasses.replace(model, kernels=kernels) if isinstance(model, BlockDrafter) else model
  own = shapes(jax.eval_shape(model.init_params, jax.random.key(0)), mesh)
  return Models(
      Target(config.target, c, decoder, params, None, "", "bfloat16", mesh), model, {k: v for k, v in own.items() if k not in FROZEN},
      {"embedding": params["embedding"], "head": {"kernel": head_table(params)}})


def training_step(config, m: Models, mesh: Mesh):
  """(jitted update, its arguments): one optimizer step over `batch` sequences, `rows` at a time."""
  t = config.training
  loss = Objective(m.target, m.drafter, t.anchors, loss=losses.BlockLoss(**presets.LOSSES[config.drafter]))
  tx = adamw(learning_rate(presets.TRAINING["learning_rate"], 10_000))
  make = lambda params: trainer.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))
  state = shapes(jax.eval_shape(make, m.trainable), mesh)
  times = t.batch // t.rows
  where = NamedSharding(mesh, sharding.P(None, sharding.BATCH))
  row = lambda dtype: jax.ShapeDtypeStruct((times, t.rows, t.row_length), dtype, sharding=where)
  batch = {
      "tokens": row(jnp.int32), "segments": row(jnp.int32), "answer": row(bool), "progress": jax.ShapeDtypeStruct((times,), jnp.float32)}
  batch = {"batches": batch, "counts": jax.ShapeDtypeStruct((times,), bool)}
  out = jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh)
  return trainer.make_update(loss, tx, times, out), (state, batch, {"target": m.target.params, "frozen": m.frozen})


def decoding_steps(config, m: Models, mesh: Mesh):
  """(name, jitted program, static arguments, arguments) of a round: drafting, a verify call of each bucket, committing."""
  d, method = config.decoding, decode.Method(m.target.decoder, m.drafter, m.drafter.draft_length)
  length, vocab = decode.round_up(d.length + m.drafter.draft_length + 1, 128), m.target.vocab
  plain = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)
  weights = shapes({**m.trainable}, mesh, sharding.REPLICATED if d.replicated else sharding.PARAMETERS, "bfloat16") | m.frozen

  def made(f, *arguments):
    """Shapes of what f makes, which lie where a decode keeps them."""
    with sharding.use(mesh):
      return shapes(jax.eval_shape(f, *arguments), mesh, sharding.STATE)

  state = made(functools.partial(slots._empty, method, length, "bfloat16"), plain(d.slots), plain(d.slots, vocab), plain(d.slots))
  state = state.replace(counts=None)
  settings = jax.tree.map(lambda x: plain(*x.shape, dtype=x.dtype), slots.stack([None] * d.slots, "greedy", vocab))
  alive, most = plain(d.slots, dtype=bool), plain(d.slots)
  run = slots.PROGRAMS
  drafting = ("draft", run["draft"], (method, "greedy", vocab, length, weights, state, settings, alive, most, None, None))
  draft = made(functools.partial(slots._draft, *drafting[2][:4]), *drafting[2][4:])
  yield drafting
  cache, rest, verified = state.cache, state.replace(cache=None), None
  for bucket in d.buckets:
    args = (method, bucket, length, m.target.params, cache, rest, draft, alive)
    verified = made(functools.partial(slots._verify, *args[:3]), *args[3:])
    yield f"verify {bucket}", run["verify"], args
  yield "commit", run["commit"], (
      method, "greedy", vocab, weights, rest, verified.cache.replace(fed=()), verified.replace(cache=None),
      draft, settings, alive, verified.cache.fed)


def measure(name: str, program, args, plain, mesh: Mesh, chip: Chip, extra_bytes: float = 0.0, options=None) -> dict:
  """Compiles a program for the mesh and counts what it takes. plain: (program, arguments) without kernels, whose grids hide how often
  their products run; options: of the compiler."""
  began = time.time()
  with sharding.use(mesh):
    work = counting.work(plain[0].trace(*plain[1]).jaxpr)
    row = {"program": name, "flops": work.flops, "bytes": work.bytes + extra_bytes}
    try:
      compiled = program.lower(*args).compile(options)
    except jax.errors.JaxRuntimeError as e:
      if "RESOURCE_EXHAUSTED" not in str(e):
        raise
      return row | {"fits": False, "why": str(e).splitlines()[0][:300], "compile_seconds": time.time() - began}
  memory, devices = compiled.memory_analysis(), mesh.size
  size = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  found = counting.exchanges(compiled.as_text(), devices)
  by_kind = collections.defaultdict(lambda: {"count": 0, "bytes_sent": 0.0, "largest": 0})
  for e in found:
    k = by_kind[e.kind]
    k["count"] += e.times
    k["bytes_sent"] += e.sent
    k["largest"] = max(k["largest"], e.bytes)
  times = {"compute": row["flops"] / devices / chip.flops, "memory": row["bytes"] / devices / chip.bandwidth,
           "links": sum(e.sent for e in found) / chip.links}
  return row | {
      "fits": size < chip.memory, "device_bytes": size,
      "argument_bytes": memory.argument_size_in_bytes, "temporary_bytes": memory.temp_size_in_bytes,
      "collectives": dict(by_kind), "seconds": times, "roofline_seconds": max(times.values()), "bound": max(times, key=times.get),
      "compile_seconds": time.time() - began}


def programs(config, what: str, m: Models, mesh: Mesh):
  """(name, jitted program, arguments, bytes besides its products) of training or of decoding."""
  if what == "training":
    update, args = training_step(config, m, mesh)
    optimizer = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]) if isinstance(x.dtype, np.dtype))
    yield "training step", update, args, optimizer
  else:
    yield from ((*step, 0.0) for step in decoding_steps(config, m, mesh))


def plan(config, what: str, workdir: pathlib.Path) -> list[dict]:
  """One record a program of training or of decoding, appended to results.jsonl."""
  shape = tuple(config[what].mesh[a] for a in sharding.AXES)
  mesh, chip = make_mesh(config.topology, shape), CHIPS[config.topology.split(":")[0]]
  platform = "gpu" if config.topology.startswith("h200") else "tpu"
  m, plain = (models(config, mesh, kernels) for kernels in (platform, "reference"))
  records = []
  for (name, program, args, extra), (_, *without, _) in zip(programs(config, what, m, mesh), programs(config, what, plain, mesh)):
    found = measure(name, program, args, without, mesh, chip, extra, OPTIONS[platform]) | {
        "what": what, "topology": config.topology, "mesh": shape}
    records.append(common.record("plan_mesh", m.target, {"name": config.drafter, "hash": None}, notes=found.pop("why", ""), metrics=found))
    report.append(workdir / "results.jsonl", records[-1])
  return records


def _gigabytes(record) -> str:
  size = record["metrics"].get("device_bytes")
  return "n/a" if size is None else f"{size / 1e9:.2f}"


def _exchanged(record) -> str:
  kinds = record["metrics"].get("collectives", {})
  return "; ".join(f"{k} {v['count']}, {v['bytes_sent'] / 1e6:.0f}" for k, v in kinds.items()) or "none"


def _parts(record) -> str:
  return ", ".join(f"{1e3 * s:.2f}" for s in record["metrics"].get("seconds", {}).values())


def _roofline(record) -> str:
  m = record["metrics"]
  return f"{1e3 * m['roofline_seconds']:.2f} ({m['bound']})" if "bound" in m else "n/a"


COLUMNS = (
    ("program", "metrics.program", ""), ("devices", lambda r: "{topology}, {mesh[0]} × {mesh[1]} × {mesh[2]}".format(**r["metrics"]), ""),
    ("GB a device", _gigabytes, ""),
    ("fits", lambda r: "yes" if r["metrics"]["fits"] else f"no: {r['notes'] or 'more than its memory'}", ""),
    ("collectives (count, MB sent by a device)", _exchanged, ""), ("TFLOP", lambda r: f"{r['metrics']['flops'] / 1e12:.2f}", ""),
    ("GB moved", lambda r: f"{r['metrics']['bytes'] / 1e9:.1f}", ""),
    ("compute, memory, links (ms)", _parts, ""), ("roofline (ms)", _roofline, ""),
    ("compiled in (s)", "metrics.compile_seconds", ".0f"))


def main(argv):
  del argv
  for name, value in LIBTPU.items():
    os.environ.setdefault(name, value)
  jax.config.update("jax_platforms", "cpu")  # This process's own.
  config, workdir = common.settings()
  records = [r for what in config.what for r in plan(config, what, workdir)]
  screen = rich_console.Console()
  screen.width = max(screen.width, 200)
  screen.print(report.table(records, COLUMNS))
  (workdir / "plan.md").write_text(report.markdown(records, COLUMNS))


if __name__ == "__main__":
  common.define("configs/qwen3_4b/plan.py")
  app.run(main)
