"""Cases on 8 forced CPU devices, for mesh_test.py, which runs them in a process of their own: python -m tests.mesh_cases NAME…"""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import tempfile
import threading
import traceback
import types

import grain
import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from configs.qwen3_4b import plan
from experiments import plan_mesh
from specdec_jax import counting, decode, hub, sharding
from specdec_jax.data import pipeline
from specdec_jax.drafters import BlockDrafter
from specdec_jax.hub import folder as folder_lib
from specdec_jax.hub import layout
from specdec_jax.kernels import OPS
from specdec_jax.kernels.base import TOLERANCE
from specdec_jax.training import losses, trainer
from specdec_jax.training.anchors import Labels
from specdec_jax.training.objective import FROZEN, Objective, initial
from specdec_jax.training.optimizer import adamw, learning_rate
from tests import toys

SHAPES = ((1, 1, 8), (8, 1, 1), (2, 2, 2))
PROMPTS = [[(7 * i + j * j) % 59 for j in range(2 + 3 * i)] for i in range(3)]  # No multiple of the devices.
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": [1, 2, 3]}


def on_mesh(model, mesh, transposed=False):
  """A target or a drafter with its parameters on a mesh."""
  params = sharding.create(lambda x: x, mesh, model.params, transposed=transposed)
  return dataclasses.replace(model, params=params, **({"mesh": mesh} if hasattr(model, "mesh") else {}))


def same_texts(shapes, target, drafter, **settings):
  run = lambda t, d: [c.tokens for c in specdec_jax.generate(t, d, PROMPTS, 12, ignore_eos=True, **settings)]
  expected = run(target, drafter)
  for shape in shapes:
    mesh = sharding.make_mesh(*shape)
    assert run(on_mesh(target, mesh), on_mesh(drafter, mesh)) == expected, shape


def decode_on_one_mesh():
  target = toys.target(vocab=64)
  same_texts(((2, 2, 2),), target, toys.block_drafter(target))


def recurrent_states_on_a_mesh():
  """A target whose layers are mostly recurrent; its memory lies head by head over the tensor axis, also where heads do not divide."""
  target = toys.target(vocab=64, **toys.HYBRID)
  drafter = toys.block_drafter(target)
  same_texts(((2, 2, 2), (1, 2, 4), (1, 1, 8)), target, drafter)
  mesh = sharding.make_mesh(1, 2, 4)
  with sharding.use(mesh):
    state = jax.jit(lambda: sharding.constrain_state(
        decode.init_state(decode.make_method(target, drafter, None, "fixed", "token", False), 2, 64)))()
  memory = state.cache.states[0].memory
  assert memory.sharding.shard_shape(memory.shape) == (1, 1, *memory.shape[2:])


def decode_on_every_mesh():
  """Greedy and sampled; block and serial drafters; 2 kv heads on 8 devices are kept whole."""
  target = toys.target(vocab=64, stacked=True)
  for settings in ({}, SAMPLED):
    same_texts(SHAPES, target, toys.block_drafter(target), **settings)
  same_texts(SHAPES[2:], target, toys.serial_drafter(target, "eagle3"), **SAMPLED)


def engine_on_a_mesh(kernels=None):
  """Requests that come and go; nothing compiles after warm-up; slots that the mesh does not divide are refused by name."""
  target = toys.target(vocab=64)
  drafter = toys.block_drafter(target)
  expected = [c.tokens for c in specdec_jax.generate(target, drafter, PROMPTS * 2, 12, ignore_eos=True)]
  mesh = sharding.make_mesh(2, 2, 2)
  target, drafter = (on_mesh(by_kernels(x, kernels), mesh) for x in (target, drafter))
  options = dict(max_length=60, schedule="fixed", needs=("greedy",), chunk=16, reaches=())
  engine = specdec_jax.Engine(target, drafter, slots=4, buckets={4: ()}, **options)
  engine.warm_up()
  compiled = 0

  def heard(event, seconds, **facts):
    nonlocal compiled
    compiled += event == "/jax/core/compile/backend_compile_duration"

  jax.monitoring.register_event_duration_secs_listener(heard)
  numbers = [engine.submit(p, 12, ignore_eos=True) for p in PROMPTS * 2]
  engine.run()
  assert [engine.result(n).tokens for n in numbers] == expected
  assert compiled == 0 and not any("compiled" in h for h in engine.stats()["health"]), (compiled, engine.stats()["health"])
  refused(
      "slots, and each of slot_buckets, must be multiples of the 4 devices",
      lambda: specdec_jax.Engine(target, drafter, slots=3, **options))


def engine_with_kernels():
  engine_on_a_mesh("tpu_interpret")


def refused(message, call):
  try:
    call()
  except ValueError as e:
    assert message in str(e), e
  else:
    raise AssertionError(f"not refused: {message}")


def sizes_that_do_not_divide():
  """C105: refused by the name of the array and the axis, or, of heads, kept whole."""
  mesh = sharding.make_mesh(2, 1, 4)
  shapes = lambda **changes: toys.target(**changes).params
  refused(
      "embedding [101, 32]: axis 0 of size 101 cannot be split over the 4 devices of mesh axis tensor",
      lambda: sharding.shardings(shapes(vocab=101), mesh))
  refused("mlp/down/kernel [46, 32]: axis 0 of size 46", lambda: sharding.shardings(shapes(vocab=64, mlp=46), mesh))
  refused(
      "axis 1 of size 30 cannot be split over the 4 devices of mesh axis fsdp",
      lambda: sharding.shardings(shapes(vocab=64, width=30), sharding.make_mesh(1, 4, 2)))
  refused("a batch of 3 rows cannot be split over the 2 devices of mesh axes data × fsdp", lambda: sharding.local_rows(mesh, 3))
  refused("needs 6 devices; there are 8", lambda: sharding.make_mesh(1, 2, 3))
  specs = sharding.shardings(shapes(vocab=64, heads=10, kv_heads=5), sharding.make_mesh(1, 4, 2))["layers"]["0"]["attention"]
  assert specs["q"]["kernel"].spec[:2] == ("fsdp", None) and specs["o"]["kernel"].spec[0] == "tensor"


def plans_are_traced():
  """What plan_mesh compiles takes the arguments that the engine gives, whatever changed in it; nothing is compiled."""
  config, mesh = plan.get_config(), sharding.make_mesh(1, 1, 8)
  models = plan_mesh.models(config, mesh, "reference")
  with sharding.use(mesh):
    names = [name for name, program, args in plan_mesh.decoding_steps(config, models, mesh) if program.trace(*args)]
    update, args = plan_mesh.training_step(config, models, mesh)
    update.trace(*args)
  assert names == ["draft", "verify 16", "verify 64", "verify 128", "commit"]


def loss_over_a_split_vocabulary():
  """Every term, gradients and best tokens, over chunks that do not divide a device's part, on three meshes; C83 over them."""
  rng = np.random.default_rng(0)
  rows, table, t_rows, t_table = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 8), (48, 8), (16, 5), (48, 5)))
  labels, whole = jnp.asarray(rng.integers(0, 48, 16)), jnp.asarray(rng.uniform(9, 10, 16), jnp.float32)

  def total(x, table):
    terms = losses.vocab_terms(x, table, t_rows, t_table, labels, 4, 4, whole)
    more = [losses.vocab_terms(x, table, t_rows, t_table, labels, best, 4) for best in (0, 1)]
    return terms.nll.sum() + 0.7 * terms.l1.sum() + 0.3 * terms.cross.sum(), (terms, more)

  values = np.array([[1.0, 1.0, 1.0], [5.0, 0.3, 0.3]] * 4, np.float32)  # Three tokens of loss 1 beside one of loss 5.
  counted = np.array([[True] * 3, [True, False, False]] * 4)
  gap = np.log(np.expm1(values))
  pairs = np.concatenate([np.stack([np.zeros_like(gap), gap], -1), np.full((8, 3, 14), -1e9, np.float32)], -1)[:, None]
  model = types.SimpleNamespace(
      table=lambda params: jnp.eye(16), config=types.SimpleNamespace(candidates=0, model=types.SimpleNamespace(logit_cap=None)))

  def token_mean(rows, shift):
    out = types.SimpleNamespace(rows=rows + shift, confidence=None)
    zeros = jnp.zeros((8, 1, 3), jnp.int32)
    return losses.block_loss(
        losses.BlockLoss(1.0, 0.0, 0.0, decay=None), model, None, out, rows, jnp.eye(16), Labels(zeros, zeros, counted[:, None]))[0]

  def both():
    return (
        jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(rows, table),
        jax.jit(jax.value_and_grad(token_mean, 1))(pairs, jnp.zeros(16)))

  expected, mean = both()
  assert abs(float(mean[0]) - 2.0) < 1e-5
  for shape in SHAPES:
    with sharding.use(sharding.make_mesh(*shape)):
      found, now = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), now, mean)


# Operation, case, rows that it is given, arguments that have no rows, mesh. 2 kv heads and 4 rows are split on 2 × 2 × 2; fewer stay whole.
SPREAD = (
    ("ragged_verify", "one_token", 4, (), (2, 2, 2)), ("ragged_verify", "tiles", None, (), (2, 2, 2)),
    ("ragged_verify", "stacked", None, (), (2, 2, 2)),
    ("block_attention", "bounds", 4, (), (2, 2, 2)), ("block_attention", "contexts", 3, (), (1, 2, 4)),
    ("write_rows", "straddling", 4, (), (2, 2, 2)), ("write_rows", "stacked", None, (), (2, 2, 2)),
    ("dynamic_conv", "many_blocks_bf16", None, (), (2, 2, 2)), ("dynamic_conv", "three_slots_four_taps", None, (), (2, 2, 2)),
    ("path_walk", "mixed temperatures", 4, ("predecessor", "successor"), (2, 2, 2)),
    ("markov_walk", "rnn_sampled_bf16", 8, ("previous", "table", "weights"), (4, 2, 1)))


def kernels_on_a_mesh(implementation="tpu_interpret"):
  """Values and gradients of every operation are those of its reference on one device; the kernel runs under a shard_map."""
  for name, case, rows, whole, shape in SPREAD:
    case = next(c for c in OPS[name].cases if c.name == case)
    arguments = case.make(jax.random.key(0))
    if rows:
      arguments = {k: x if k in whole else jnp.take(x, jnp.arange(rows) % len(x), 0) for k, x in arguments.items()}
    spread_as_the_reference(OPS[name], case, arguments, sharding.make_mesh(*shape), implementation)


def kernels_for_gpus_on_a_mesh():
  kernels_on_a_mesh("gpu_interpret")


def spread_as_the_reference(op, case, arguments, mesh, implementation):
  some = {k: arguments.pop(k) for k in case.differentiable}
  weigh = lambda x: jnp.sum(jnp.cos(jnp.arange(x.size).reshape(x.shape)) * x)

  def values_and_gradients(f, some):
    call = lambda some: f(**some, **arguments, **case.settings)
    return call(some), jax.grad(lambda some: weigh(call(some)))(some) if some else None

  with jax.default_matmul_precision("highest"):
    expected = jax.jit(functools.partial(values_and_gradients, op.reference))(some)
    run = jax.jit(functools.partial(values_and_gradients, functools.partial(op.call, implementation=implementation)))
    least = 3 if some else 1  # One for the values, two for the gradients.
    with sharding.use(mesh):
      assert spread_kernels(run.trace(some).jaxpr) >= least or (op.name, implementation) == ("write_rows", "gpu_interpret"), case
      found = run(some)
  close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype], err_msg=f"{op.name} {case}")
  jax.tree.map(lambda a, b: close(np.asarray(a, np.float32), np.asarray(b, np.float32)), found, expected)


def spread_kernels(jaxpr, inside: bool = False) -> int:
  """Kernel calls of a jaxpr that run on a device's part."""
  count = 0
  for e in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    count += inside and e.primitive.name == "pallas_call"
    count += sum(spread_kernels(inner, inside or e.primitive.name == "shard_map") for inner in counting.inner_jaxprs(e.params))
  return count


def by_kernels(model, implementation="tpu_interpret"):
  """A target or a drafter that runs kernels."""
  if hasattr(model, "decoder"):
    return dataclasses.replace(model, decoder=model.decoder.clone(kernels=implementation))
  return dataclasses.replace(model, model=dataclasses.replace(model.model, kernels=implementation))


def decoding_with_kernels(shapes=SHAPES[2:]):
  """The tokens of one device without kernels; flat rows of slots some of which idle are verified as there."""
  target = toys.target(vocab=64, stacked=True, windows=(5, None, 7))
  drafter = toys.block_drafter(target)
  texts = lambda t, d: [c.tokens for c in specdec_jax.generate(t, d, PROMPTS, 12, ignore_eos=True)]
  expected = texts(target, drafter)
  for shape in shapes:
    mesh = sharding.make_mesh(*shape)
    assert texts(on_mesh(by_kernels(target), mesh), on_mesh(by_kernels(drafter), mesh)) == expected, shape


def decoding_with_kernels_on_every_mesh():
  decoding_with_kernels(SHAPES)


def training_with_kernels():
  """Loss and gradients of a step are those of one device without kernels: attention, and convolutions whose base all rows share."""
  target = toys.target(vocab=64)
  drafter = toys.block_drafter(target, window=6, head="selector", candidates=4, own_embedding=False, confidence=False, conv=2, conv_group=4)
  rows = [packed_rows()[i] for i in range(8)]
  batch = {k: np.stack([r[k] for r in rows]) for k in rows[0]} | {"progress": np.float32(1)}
  split = lambda d: [{k: v for k, v in d.params.items() if (k in FROZEN) == frozen} for frozen in (False, True)]

  def step(target, drafter):
    objective = Objective(target, drafter.model, 4)
    run = lambda trainable, frozen, batch: objective(trainable, batch, jax.random.key(3), {"target": target.params, "frozen": frozen})
    with sharding.use(target.mesh):
      run = jax.jit(jax.value_and_grad(run, has_aux=True))
      arguments = (*split(drafter), sharding.place_rows(target.mesh, batch, 8))
      return run(*arguments), spread_kernels(run.trace(*arguments).jaxpr)

  ((expected, _), gradient), _ = step(target, drafter)
  for shape in SHAPES[1:]:
    mesh = sharding.make_mesh(*shape)
    ((found, _), by_kernel), kernels = step(on_mesh(target, mesh), on_mesh(by_kernels(drafter), mesh))
    assert kernels >= 3 + 4 * 2, kernels  # One attention and four convolutions, forward and backward.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), by_kernel, gradient)


def packed_rows():
  """Forty packed rows as a data set."""
  rng, segments = np.random.default_rng(0), np.array([1] * 14 + [2] * 8 + [0] * 2, np.int32)
  row = lambda: {
      "tokens": rng.integers(0, 59, 24).astype(np.int32), "segments": segments, "answer": (segments > 0) & (rng.random(24) < 0.9)}
  return grain.MapDataset.source([row() for _ in range(40)])


def train(folder, steps, mesh=None, before=lambda step: None, **options):
  """Trains a small drafter in `folder` up to `steps` of 20; this process reads its own part of each batch, after before(step)."""
  target = toys.target(vocab=64, stacked=True)
  model = BlockDrafter(toys.block_drafter(target, **options).config)
  target = target if mesh is None else on_mesh(target, mesh)
  trainable, frozen = initial(model, target, None, 0)
  objective = Objective(target, model, 4, loss=losses.BlockLoss(), ce_share=0.25)
  stream = pipeline.batches(packed_rows(), 8, 0, sharding.local_rows(mesh, 8))

  def batch_at(step):
    before(step)
    return {**stream[step], "progress": np.float32(step / 20)}

  trainer.fit(
      trainable, objective, adamw(learning_rate(1e-3, 20)), batch_at, steps, pathlib.Path(folder), 0,
      {"target": target.params, "frozen": frozen}, log_every=1, save_every=10, mesh=mesh)


def losses_of(folder):
  return [json.loads(line)["loss"] for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]


def training_on_every_mesh():
  """20 steps give one device's losses; a run saved on one mesh goes on on another with the same numbers."""
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    train(folder / "one", 20)
    expected = losses_of(folder / "one")
    for shape in SHAPES:
      train(folder / str(shape), 20, sharding.make_mesh(*shape))
      np.testing.assert_allclose(losses_of(folder / str(shape)), expected, rtol=1e-5, err_msg=str(shape))
    train(folder / "moved", 10, sharding.make_mesh(*SHAPES[2]))
    train(folder / "moved", 20, sharding.make_mesh(*SHAPES[0]))
    assert len(losses_of(folder / "moved")) == 20
    np.testing.assert_allclose(losses_of(folder / "moved"), expected, rtol=1e-5)


class Reads(folder_lib.Tensors):
  """Tensors that count what is read of them."""

  sizes: list[int] = []

  def read(self, name):
    raise AssertionError(f"{name} was read whole")

  def part(self, name, index):
    found = super().part(name, index)
    self.sizes.append(found.nbytes)
    return found


def loading():
  """A published folder lands as `load_target` and a copy give it, each byte read once and no tensor whole."""
  target = toys.target(vocab=64, attention_bias=True)
  with tempfile.TemporaryDirectory() as folder:
    hub.save_target(folder, target.config, target.params, None)
    for shape, stacked, transposed in (((2, 2, 2), True, False), ((1, 1, 8), False, True)):
      mesh = sharding.make_mesh(*shape)
      whole = specdec_jax.load_target(folder, stacked=stacked, transposed=transposed)
      Reads.sizes, plain = [], folder_lib.Tensors
      folder_lib.Tensors = Reads
      split = specdec_jax.load_target(folder, mesh=mesh, stacked=stacked, transposed=transposed)
      folder_lib.Tensors = plain
      jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)
      wanted = sharding.shardings(whole.params, mesh, transposed=transposed)
      assert jax.tree.all(jax.tree.map(lambda x, w: x.sharding.is_equivalent_to(w, x.ndim), split.params, wanted))
      assert sum(Reads.sizes) == sum(x.nbytes for x in jax.tree.leaves(whole.params))
      assert max(Reads.sizes) < whole.params["embedding"].nbytes
    drafter = toys.block_drafter(target)
    specdec_jax.export(drafter, folder + "/drafter")
    for replicated in (False, True):
      found = specdec_jax.load_drafter(folder + "/drafter", split, replicated)
      assert found.params["layers_0"]["mlp"]["down"]["kernel"].is_fully_replicated == replicated


def loading_a_gigabyte():
  """Bytes of a random checkpoint, of its largest tensor, and how much memory beyond the shards loading it took at most."""
  c = toys.model_config(vocab=32_768, width=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=4096, rotary=toys.Rotary(1e4, 64))
  with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(0)
    shapes = {name: e.shape for e in layout.decoder_entries(c) for name in e.names}
    folder_lib.save(pathlib.Path(folder), c.to_published(), {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()})
    memory = lambda: 1024 * int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
    mesh, seen, done = sharding.make_mesh(1, 1, 8), [memory()], threading.Event()
    watch = threading.Thread(target=lambda: [seen.append(memory()) for _ in iter(lambda: done.wait(0.002), True)])
    watch.start()
    try:
      target = specdec_jax.load_target(folder, mesh=mesh, stacked=True)
    finally:  # Or the process would wait for the thread for ever.
      done.set()
      watch.join()
    held = sum(x.nbytes for x in jax.tree.leaves(target.params))
    return {"checkpoint": held, "largest": max(4 * int(np.prod(s)) for s in shapes.values()), "beyond": max(seen) - seen[0] - held}


def main(names):
  jax.config.update("jax_num_cpu_devices", 8)
  out = {}
  for name in names:
    try:
      found = globals()[name]()
      out[name] = "ok" if found is None else found
    except Exception:
      out[name] = traceback.format_exc()
  print(json.dumps(out))


if __name__ == "__main__":
  main(sys.argv[1:])
