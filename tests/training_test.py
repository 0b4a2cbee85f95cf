"""Anchors, visibility by gradient, losses, exact resume, and the stop at a bad loss."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specdec_jax.drafters.base import DraftOutputs
from specdec_jax.models.decoder import head_table
from specdec_jax.training import anchors, features, losses, trainer
from specdec_jax.training.optimizer import adamw, learning_rate
from tests import toys

TOKENS = jnp.asarray((np.arange(36).reshape(2, 18) * 11 + 5) % 59, jnp.int32)
SEGMENTS = jnp.asarray([[1] * 10 + [2] * 8, [1] * 13 + [0] * 5], jnp.int32)
ANSWER = jnp.asarray([[False] * 3 + [True] * 7 + [False] * 2 + [True] * 6, [False] * 4 + [True] * 9 + [False] * 5])


def blocks(picked, keep, length=5, tokens=TOKENS):
  target = toys.target()
  run = jax.jit(features.target_features, static_argnums=(0, 4))
  taps, hidden, positions = run(target.decoder, target.params, tokens, SEGMENTS, (0, 1))
  return (hidden, *anchors.make_blocks(tokens, SEGMENTS, positions, ANSWER, taps, jnp.asarray(picked), jnp.asarray(keep), length, length))


def test_anchor_candidates_and_sampling():
  allowed = anchors.candidates(ANSWER, SEGMENTS)
  assert np.flatnonzero(allowed[0]).tolist() == [3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 16]
  assert np.flatnonzero(allowed[1]).tolist() == list(range(4, 12))
  seen = np.zeros(18, int)
  for seed in range(200):
    picked, keep = anchors.sample_anchors(jax.random.key(seed), allowed, 9)
    assert keep.sum(1).tolist() == [9, 8] and int(picked[1, 8]) == 0
    for row in range(2):
      mine = np.asarray(picked[row])[np.asarray(keep[row])]
      assert np.all(np.diff(mine) > 0) and np.all(np.asarray(allowed)[row, mine])
    np.add.at(seen, np.asarray(picked[0]), 1)
  hit = seen[np.asarray(allowed[0])]
  assert hit.min() > 140 and hit.sum() == 1800  # Every candidate alike: 164 of 200.


def test_labels_stop_at_the_end_of_the_text():
  _, batch, labels = blocks([[4, 8, 14], [10, 0, 0]], [[True] * 3, [True, False, False]])
  assert labels.tokens[0, 0].tolist() == TOKENS[0, 5:10].tolist()
  assert batch.tokens[0, 0].tolist() == TOKENS[0, 4:9].tolist()
  assert labels.supervised[0].sum(-1).tolist() == [5, 1, 3]  # To the segment's end, to the row's end.
  assert labels.supervised[1].sum(-1).tolist() == [2, 0, 0]
  assert batch.block_positions[0, :, 0].tolist() == [4, 8, 4]  # Positions count from the text's start.


def test_block_sees_its_own_context_only():
  """C75, by gradient: features at or behind the anchor, of another text or another block never reach a block."""
  target = toys.target()
  drafter = toys.block_drafter(target, block=3)
  _, batch, _ = blocks([[2, 6, 13]] * 2, [[True] * 3] * 2, 3)

  def output(feature_rows, block):
    out = drafter.model.block_outputs(drafter.params, batch.replace(features=feature_rows))
    return jnp.sum(out.hidden[0, block] ** 2)

  reach = jax.jit(jax.grad(output), static_argnums=1)
  for block, context in enumerate((range(0, 2), range(0, 6), range(10, 13))):
    touched = np.flatnonzero(np.abs(reach(batch.features, block)[0]).sum((-1, -2)))
    assert touched.tolist() == list(context)


def test_block_is_bidirectional_and_reads_its_anchor_only():
  target = toys.target()
  drafter = toys.block_drafter(target, block=3)
  _, batch, _ = blocks([[2, 6]] * 2, [[True] * 2] * 2, 3)
  run = jax.jit(drafter.model.block_outputs)
  base = run(drafter.params, batch).hidden[0]
  changed = lambda at: run(drafter.params, batch.replace(tokens=batch.tokens.at[0, 1, at].add(1))).hidden[0]
  moved = np.abs(changed(0) - base).max(-1)
  assert np.all(moved[0] < 1e-6) and np.all(moved[1] > 1e-4)  # The anchor moves every slot of its own block.
  np.testing.assert_allclose(changed(1), base, atol=1e-6)  # A later true token is no input of the backbone.


def test_training_blocks_equal_decoding_blocks():
  """The same block, once packed among others in training, once through the context cache: the same logits."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  _, batch, _ = blocks([[4, 8]] * 2, [[True, True]] * 2)
  out = jax.jit(drafter.model.block_outputs)(drafter.params, batch)
  model, n = drafter.model, 8
  state = jax.jit(model.extend)(
      drafter.params, model.init_state(1, 32), batch.features[:1, :n], None, batch.positions[:1, :n], jnp.array([n]))
  hidden = jax.jit(model.network.apply, static_argnames="method")(
      {"params": drafter.params}, list(zip(state.keys, state.values)), batch.tokens[:1, 1:, 0], n + jnp.arange(5)[None, None],
      jnp.array([[n]]), jnp.ones((1, 1), bool), method="hidden")
  np.testing.assert_allclose(hidden[0, 0], out.hidden[0, 1], atol=1e-5)


def test_confidence_loss_does_not_train_the_drafter():
  """C45."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  hidden, batch, labels = blocks([[4, 8]] * 2, [[True, True]] * 2)
  rows, table = features.target_rows(hidden, labels.index), head_table(target.params)

  def loss(params):
    out = drafter.model.block_outputs(params, batch)
    return losses.block_loss(losses.BlockLoss(0.0, 0.0, 1.0), drafter.model, params, out, rows, table, labels)[0]

  gradient = jax.jit(jax.grad(loss))(drafter.params)
  norms = {name: float(optax.tree.norm(g)) for name, g in gradient.items()}
  assert norms.pop("confidence") > 1e-3
  assert set(norms.values()) == {0.0}
  silent = toys.block_drafter(target, confidence=False)
  assert "confidence" not in adamw(learning_rate(1e-3, 10)).init(silent.params)[1][0].mu  # Absent from the optimizer state.


def test_loss_terms_by_hand():
  """Two slots, two tokens: CE, L1, BCE and their weights from the formulas."""
  p_draft, p_target = np.array([[0.6, 0.4], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.25, 0.75]])
  labels = anchors.Labels(jnp.array([[[0, 1]]]), jnp.zeros((1, 1, 2), jnp.int32), jnp.ones((1, 1, 2), bool))
  c = np.array([0.3, -1.0])
  logs = lambda p: jnp.log(p)[None, None]  # Logits as rows of an identity table.
  out = DraftOutputs(logs(p_draft), logs(p_draft), confidence=jnp.asarray(c)[None, None])
  model = types.SimpleNamespace(
      table=lambda params: jnp.eye(2), config=types.SimpleNamespace(candidates=0, model=types.SimpleNamespace(logit_cap=None)))
  total, m = losses.block_loss(losses.BlockLoss(0.1, 0.9, 1.0, decay=4.0), model, None, out, logs(p_target), jnp.eye(2), labels)
  w = np.exp(-np.arange(2) / 4)
  mean = lambda x: (x * w).sum() / (w.sum() + 1e-6)
  accept, s = np.array([0.7, 0.75]), 1 / (1 + np.exp(-c))
  expected = {"ce_loss": mean(-np.log([0.6, 0.5])), "l1_loss": mean(np.array([0.6, 0.5])),
              "confidence_loss": mean(-accept * np.log(s) - (1 - accept) * np.log(1 - s)), "tau_probabilistic": 1 + 0.7 + 0.7 * 0.75}
  for name, value in expected.items():
    assert float(m[name]) == pytest.approx(value, rel=1e-5), name
  assert float(total) == pytest.approx(0.1 * expected["ce_loss"] + 0.9 * expected["l1_loss"] + expected["confidence_loss"], rel=1e-5)


def test_next_token_loss_weights():
  target = toys.target()
  batch = {"tokens": TOKENS, "segments": SEGMENTS, "answer": ANSWER}
  loss, m = losses.next_token_loss(target.decoder, 0.0, target.params, batch, None, None)
  rows = [(0, slice(0, 10)), (0, slice(10, 18)), (1, slice(0, 13))]
  nats, count = 0.0, 0
  for row, part in rows:
    logits = jax.nn.log_softmax(target.forward(TOKENS[row : row + 1, part]).logits[0], -1)
    for i in range(part.stop - part.start - 1):
      if ANSWER[row, part.start + i + 1]:
        nats -= float(logits[i, TOKENS[row, part.start + i + 1]])
        count += 1
  assert int(m["count"]) == count
  assert float(loss) == pytest.approx(nats / count, rel=1e-5)


def test_clipping_bfloat16_gradients_of_many_parameters():
  """A running sum in bfloat16 would stand still at 256."""
  tx, grads = adamw(lambda step: 0.1, clip=1.0), {str(i): jnp.ones((), jnp.bfloat16) for i in range(400)}
  _, state = tx.update(grads, tx.init(grads), grads)
  np.testing.assert_allclose(state[1][0].mu["0"], 0.1 / 20, rtol=0.01)


def test_schedule_of_the_learning_rate():
  tx = adamw(learning_rate(0.5, 100, 0.1, 0.2), clip=1e9)
  params = {"w": jnp.zeros(())}
  state, steps = tx.init(params), []
  for _ in range(100):
    change, state = tx.update({"w": jnp.ones(())}, state, params)
    steps.append(-float(change["w"]))
  assert steps[0] == pytest.approx(0.05, rel=1e-3) and steps[4] == pytest.approx(0.25, rel=1e-3) and (
      max(steps) == pytest.approx(0.5, rel=1e-3))
  assert steps[99] == pytest.approx(0.1, rel=0.02)


def quadratic(params, batch, key, constants):
  noise = jax.random.normal(key, ())
  return jnp.sum((params["w"] - batch) ** 2) * constants + noise * params["w"][0], {"noise": noise}


def fit(folder, steps, total=12, **kw):
  tx = adamw(learning_rate(0.1, total))
  return trainer.fit(
      {"w": jnp.arange(3.0)}, quadratic, tx, lambda i: np.float32(i % 5), steps, folder, 3, jnp.float32(2), log_every=1, save_every=6, **kw)


def test_resume_gives_the_same_numbers(tmp_path):
  """C91 in small: parameters, optimizer, keys and data position go on exactly where they stopped."""
  whole = fit(tmp_path / "whole", 12)
  fit(tmp_path / "parts", 6)
  parts = fit(tmp_path / "parts", 12)
  np.testing.assert_array_equal(whole["w"], parts["w"])
  assert list((tmp_path / "whole" / "tensorboard").glob("events*"))
  logs = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("whole", "parts")]
  drop = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows]
  assert drop(logs[0]) == drop(logs[1]) and len(logs[0]) == 12
  assert len({r["noise"] for r in logs[0]}) == 12


def test_a_work_folder_belongs_to_one_training(tmp_path):
  """C77: a mask id, or anything else, that differs from the checkpoint's is refused on resume; so is a checkpoint of unknown
  origin."""
  facts = {"drafter": {"mask_token_id": 3, "layer_types": ["full"]}, "steps": 4}
  fit(tmp_path, 6, facts=facts)
  fit(tmp_path, 6, facts=facts)
  with pytest.raises(ValueError, match="drafter.mask_token_id is 3, not 4; steps is 4, not 5"):
    fit(tmp_path, 6, facts={"drafter": {"mask_token_id": 4, "layer_types": ["full"]}, "steps": 5})
  (tmp_path / "claim.json").unlink()
  with pytest.raises(ValueError, match="unknown origin"):
    fit(tmp_path, 6, facts=facts)


def test_an_evaluation_that_fails_is_done_again(tmp_path):
  """It comes before its checkpoint; a resumed run logs every step once and goes on counting seconds."""
  def evaluate(step, params, broken):
    if broken:
      raise KeyboardInterrupt
    return {"found": step}

  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path, 12, evaluate=functools.partial(evaluate, broken=True))
  fit(tmp_path, 6, evaluate=functools.partial(evaluate, broken=False))
  with (tmp_path / "metrics.jsonl").open("a") as log:
    log.write('{"step": 9, "loss": 1}\n{"ste')  # A killed run got further than its checkpoint.
  fit(tmp_path, 12, evaluate=functools.partial(evaluate, broken=False))
  rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12] and (
      [r["step"] for r in rows if "found" in r] == [6, 12])
  seconds = [r["seconds"] for r in rows if "seconds" in r]
  assert seconds == sorted(seconds)


def test_bad_loss_stops_with_the_step(tmp_path):
  def explode(params, batch, key, constants):
    return jnp.sum(params["w"]) / batch, {}

  with pytest.raises(trainer.NonFiniteLoss, match="at step 4"):
    trainer.fit({"w": jnp.ones(2)}, explode, adamw(learning_rate(0.1, 9)), lambda i: np.float32(3 - i), 9, tmp_path, log_every=1)


def test_drafter_learns():
  """Twenty steps on one batch bring the loss down; the target's parameters are constants."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  hidden, batch, labels = blocks([[4, 7]] * 2, [[True, True]] * 2)
  rows, table = features.target_rows(hidden, labels.index), head_table(target.params)

  def loss(params, *_):
    out = drafter.model.block_outputs(params, batch)
    return losses.block_loss(losses.BlockLoss(), drafter.model, params, out, rows, table, labels)

  tx = optax.adam(1e-2)
  update = trainer.make_update(loss, tx)
  params = jax.tree.map(functools.partial(jnp.array, copy=True), drafter.params)
  state = trainer.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))
  history = []
  for _ in range(60):
    state, m = update(state, None, None)
    history.append(float(m["loss"]))
  assert history[-1] < 0.7 * history[0]


@pytest.mark.slow
def test_loss_over_vocabulary_chunks():
  """The same terms and gradients whatever the chunk; a chunk size that does not divide the vocabulary."""
  rng = np.random.default_rng(0)
  rows, table, t_rows, t_table = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 8), (50, 8), (6, 5), (50, 5)))
  labels = jnp.asarray(rng.integers(0, 50, 6))

  def total(x, table, chunk):
    terms = losses.vocab_terms(x, table, t_rows, t_table, labels, 4, chunk)
    return terms.nll.sum() + 0.7 * terms.l1.sum() + 0.3 * terms.cross.sum(), terms

  (_, whole), expected = jax.value_and_grad(total, (0, 1), has_aux=True)(rows, table, 4096)
  q, p = jax.nn.softmax(rows @ table.T), jax.nn.softmax(t_rows @ t_table.T)
  np.testing.assert_allclose(whole.l1, jnp.abs(q - p).sum(-1), rtol=1e-5)
  np.testing.assert_allclose(whole.cross, -(p * jnp.log(q)).sum(-1), rtol=1e-5)
  np.testing.assert_allclose(whole.nll, -jnp.log(q[jnp.arange(6), labels]), rtol=1e-5)
  np.testing.assert_array_equal(whole.ids, jnp.argsort(-q, -1)[:, :4])
  np.testing.assert_array_equal(whole.target_best, jnp.argmax(p, -1))
  for chunk in (7, 25):
    (_, terms), gradient = jax.value_and_grad(total, (0, 1), has_aux=True)(rows, table, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), terms, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, expected)


def test_loss_memory_is_flat_in_the_vocabulary():
  """At V = 32,000 the compiled step's working memory is that of 8,000: no V-wide row is kept."""
  def temporary(vocab, chunk=2000):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    loss = lambda x, t, y, u, z: losses.vocab_terms(x, t, y, u, z, 1, chunk).l1.sum()
    lowered = jax.jit(jax.grad(loss)).lower(
        shape(256, 16), shape(vocab, 16), shape(256, 16), shape(vocab, 16), jax.ShapeDtypeStruct((256,), jnp.int32))
    return lowered.compile().memory_analysis().temp_size_in_bytes

  small, large = temporary(8_000), temporary(32_000)
  tables = 2 * 24_000 * 16 * 4  # Copies of the two tables, cut into chunks, may grow.
  assert large < small + 1.5 * tables < 256 * 32_000 * 4
  assert temporary(32_000, 32_000) > 256 * 32_000 * 4


def test_loss_in_float32():
  """C85: bfloat16 inputs, V = 32,000, overlap near 1: the gradient is within 1 % of float64."""
  rng = np.random.default_rng(1)
  table = jnp.asarray(rng.normal(size=(32_000, 16)), jnp.bfloat16)
  rows = jnp.asarray(rng.normal(size=(4, 16)), jnp.bfloat16)
  near = (rows.astype(jnp.float32) + 0.01 * rng.normal(size=(4, 16))).astype(jnp.bfloat16)
  loss = lambda x: losses.vocab_terms(x, table, near, table, jnp.zeros(4, jnp.int32)).l1.sum()
  ours = np.asarray(jax.grad(lambda x: loss(x.astype(jnp.bfloat16)))(rows.astype(jnp.float32)), np.float64)
  wide = lambda x: np.asarray(x, np.float64)
  def softmax(u):
    e = np.exp(u - u.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
  q, p = softmax(wide(rows) @ wide(table).T), softmax(wide(near) @ wide(table).T)
  assert np.minimum(q, p).sum(-1).min() > 0.96
  sign = np.sign(q - p)
  exact = (q * (sign - (q * sign).sum(-1, keepdims=True))) @ wide(table)
  assert np.linalg.norm(ours - exact) < 0.01 * np.linalg.norm(exact)


_DEVICES = ("""
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from specdec_jax.training import losses
from specdec_jax.training.anchors import Labels
import types
# Device A: three tokens of loss 1, device B: one token of loss 5; a table of two tokens gives any loss.
values = np.array([[1.0, 1.0, 1.0], [5.0, 0.3, 0.3]] * 2, np.float32)
counted = np.array([[True] * 3, [True, False, False]] * 2)
gap = np.log(np.expm1(values))  # -log softmax([0, gap])[0] = value
rows = np.stack([np.zeros_like(gap), gap], -1)[:, None]
model = types.SimpleNamespace(table=lambda params: jnp.eye(2), """
    """config=types.SimpleNamespace(candidates=0, model=types.SimpleNamespace(logit_cap=None)))
def loss(rows, counted, shift):
  out = types.SimpleNamespace(rows=rows + shift, confidence=None)
  labels = Labels(jnp.zeros((4, 1, 3), jnp.int32), jnp.zeros((4, 1, 3), jnp.int32), counted[:, None])
  return losses.block_loss(losses.BlockLoss(1.0, 0.0, 0.0, decay=None), model, None, out, rows, jnp.eye(2), labels)[0]
found = []
for n in (1, 2, 4):
  mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
  put = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
  value, gradient = jax.jit(jax.value_and_grad(loss, 2))(put(rows), put(counted), jnp.zeros(2))
  found.append((float(value), np.asarray(gradient)))
assert abs(found[0][0] - 2.0) < 1e-5, found
for value, gradient in found[1:]:
  assert abs(value - found[0][0]) < 1e-6 and np.abs(gradient - found[0][1]).max() < 1e-6, found
""")


def test_token_mean_across_devices():
  """C83: sums first, divided last, over all devices: 2.0, where a mean of means gives 3.0; 1, 2 and 4 devices agree."""
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
      [sys.executable, "-c", _DEVICES], env=environment, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]


def test_accumulated_gradients_are_those_of_the_whole_batch():
  """Windows of micro-batches, the last one shorter: the parameters after it are those of steps over whole windows."""
  loss = lambda params, batch, key, constants: (jnp.mean((params["w"] * batch["x"] - batch["y"]) ** 2), {})
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 7, 4)).astype(np.float32)  # Seven micro-batches of four: windows of 3, 3 and 1.
  tx = adamw(learning_rate(0.1, 3))
  update = trainer.make_update(loss, tx)
  accumulate = trainer.make_update(loss, tx, micro_batches=3)
  init = lambda: trainer.TrainState(jnp.zeros((), jnp.int32), {"w": jnp.ones(())}, tx.init({"w": jnp.ones(())}), jax.random.key(0))
  whole, parts = init(), init()
  for first in (0, 3, 6):
    window = slice(first, first + 3)
    whole, _ = update(whole, {"x": x[window].reshape(-1), "y": y[window].reshape(-1)}, None)
    parts, metrics = accumulate(parts, trainer.window([{"x": a, "y": b} for a, b in zip(x[window], y[window])], 3), None)
  np.testing.assert_allclose(parts.params["w"], whole.params["w"], rtol=1e-5)
  assert int(parts.step) == 3 and float(metrics["loss"]) > 0
