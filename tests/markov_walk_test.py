"""The walk of the bias heads: the drafter's own scan against the kernels, what the kernels are asked, and their copies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import specdec_jax
from specdec_jax.kernels import markov_walk
from specdec_jax.kernels.markov_walk import implementation_for, ref, tpu
from specdec_jax.kernels.markov_walk.noise import gumbel
from specdec_jax.kernels.markov_walk.shapes import CASES
from specdec_jax.sampling import make_sampling
from specdec_jax.sharding import AXES
from tests import toys

CASE = {case.name: case for case in CASES}
TARGET = {"vocab": 64, "eos": (63,)}


def drafter(kind, kernels, **changes):
  """A toy whose head is of a kind and size that the kernels take."""
  found = toys.block_drafter(toys.target(**TARGET), head=kind, rank=128, **changes)
  return dataclasses.replace(found, model=dataclasses.replace(found.model, kernels=kernels))


def test_a_vocabulary_that_a_mesh_splits_is_left_to_xla(caplog):
  for shape, expected in (((2, 4, 1), "tpu"), ((4, 1, 2), "reference")):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(shape, AXES)):
      assert implementation_for("tpu", 8, jnp.zeros((9232, 128)), None) == expected
  assert "markov_walk runs as plain XLA: the tensor axis of the mesh splits its vocabulary over 2 devices" in caplog.text


@pytest.mark.parametrize(("kind", "temperature"), [
    ("rnn", (0.9, 0.0, 1.3)), ("markov", 0.0), ("gated", (0.9, 0.0, 1.3)), ("rnn", 0.0), ("markov", (0.9, 0.0, 1.3)), ("gated", 0.0)])
@pytest.mark.slow
def test_text_is_the_same_with_the_kernel(kind, temperature):
  """All greedy, and a batch of greedy and sampled requests, from the same draws."""
  target, prompts = toys.target(**TARGET), [[3, 1, 4], [2, 2, 7], [5, 6, 7]]
  run = lambda kernels: specdec_jax.generate(
      target, drafter(kind, kernels), prompts, 12, ignore_eos=True, temperature=temperature, seed=[1, 2, 3])
  found, expected = run("tpu_interpret"), run("reference")
  assert [c.tokens for c in found] == [c.tokens for c in expected]
  assert [c.rounds for c in found] == [c.rounds for c in expected]


@functools.cache
def proposals(kernels, temperature, confidence):
  d = drafter("gated", kernels, confidence=confidence)
  base = jax.random.normal(jax.random.key(3), (3, 5, 32)) * jnp.array([1.0, jnp.nan, 1.0])[:, None, None]
  apply = lambda *args, method: d.model.network.apply({"params": d.params}, *args, method=method)
  sampling = make_sampling(3, 64, temperature, seed=[4, 5, 6])
  logits = apply(jnp.nan_to_num(base), method="base_logits").at[2, 1].set(-jnp.inf).at[1, 0, 5].set(jnp.nan)
  keys = sampling.position_keys(jnp.arange(3), 5)
  return jax.jit(lambda: d.model._walk(apply, jnp.nan_to_num(base), logits, jnp.array([7, 8, 9]), keys, sampling))()


@pytest.mark.parametrize(("temperature", "confidence"), [(0.0, False), ((0.8, 0.0, 1.2), True), ((0.8, 1.0, 0.0), False)])
def test_proposals_are_those_of_the_scan(temperature, confidence):
  """Drafts, q and confidences, also where a slot has NaN among its logits or no id at all."""
  found, expected = (proposals(k, temperature, confidence) for k in ("gpu_interpret", "reference"))
  assert found.drafts[1, 0] == -1 and found.drafts[2, 1] == -1
  np.testing.assert_array_equal(found.drafts, expected.drafts)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_other_settings_stay_on_the_scan():
  """With more than a temperature nothing asks for this kernel, whatever the field says."""
  d = drafter("markov", "tpu_interpret")
  sampling = make_sampling(1, 64, 1.0, top_k=5)
  text = jax.make_jaxpr(lambda keys: d.model.propose(
      d.params, d.model.init_state(1, 16), jnp.array([3]), jnp.array([0]), keys, sampling).drafts)(
          sampling.position_keys(jnp.array([0]), 5))
  assert "markov_walk" not in str(text) and "scan" in str(text)


def test_noise_is_that_of_jax_random():
  key = jax.random.key(7)
  low, high = jax.random.key_data(key)
  np.testing.assert_array_equal(jax.jit(gumbel)(low, high, jnp.arange(5000)), jax.random.gumbel(key, (5000,)))


@pytest.mark.parametrize("share", [0, 2])
def test_tiles_that_do_not_fit_are_streamed(share):
  """None and two of three tiles of W₂ stay in VMEM."""
  case = CASE["ties_tail"]
  arguments = case.make(jax.random.key(1)) | {"projected": None, "weights": None, "temperature": None, "keys": None}
  arguments["table"] = jax.random.normal(jax.random.key(2), arguments["table"].shape)
  run = jax.jit(lambda a: tpu.walk(**a, kind="markov", interpret=True, vmem=share * tpu.TILE * 128 * 4 + 100))
  for a, b in zip(jax.tree.leaves(run(arguments)), jax.tree.leaves(jax.jit(ref.markov_walk)(**arguments))):
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_copies_do_not_race():
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # The only place that tells.

  arguments = {k: v[:2] if k in ("anchor", "base") else v for k, v in CASE["ties_tail"].make(jax.random.key(1)).items()}
  nothing = {"projected": None, "weights": None, "temperature": None, "keys": None}
  found = tpu.walk(**arguments, **nothing, kind="markov", interpret=pltpu.InterpretParams(detect_races=True), vmem=2 * tpu.TILE * 128 * 4)
  np.testing.assert_array_equal(found.drafts, ref.markov_walk(**arguments).drafts)
  assert not interpreter.races.races_found


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": "lstm"}, "unknown kind 'lstm': one of markov, gated, rnn"),
    ({"anchor": jnp.zeros(2, jnp.int32)}, r"anchor must be \(1,\) for base"),
    ({"kind": "gated"}, r"projected must be \(1, 1, 128\) for base .* kind 'gated', not None"),
    ({"temperature": jnp.ones(1)}, r"keys must be \(1, 1\) for base"),
    ({"table": jnp.zeros((528, 128), jnp.bfloat16)}, "must both be float32 or both bfloat16, not float32 and bfloat16"),
    ({"base": jnp.zeros((1, 1, 528), jnp.bfloat16)}, "base must be float32, not bfloat16")])
def test_what_does_not_fit_is_named(change, message):
  with pytest.raises(ValueError, match=f"markov_walk: .*{message}"):
    markov_walk(**{**CASE["one_slot"].make(jax.random.key(0)), **change})


def test_where_no_kernel_runs(caplog):
  """What a kernel cannot do, and, if none was asked for, where it does not pay: on a CPU, or with a small vocabulary."""
  table = lambda vocab, rank: jax.ShapeDtypeStruct((vocab, rank), jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), (1, 1))
  assert implementation_for(None, 1, table(151936, 256), keys) == "reference"
  assert implementation_for("tpu", 1, table(151936, 256), keys) == "tpu"
  assert implementation_for("tpu", 1, table(50257, 256), keys) == "reference"
  assert implementation_for("gpu", 1, table(151936, 96), keys) == "reference"
  assert implementation_for("gpu", 1, table(151936, 256), jax.random.split(jax.random.key(0, impl="rbg"), (1, 1))) == "reference"
  assert all(text in caplog.text for text in (
      "multiple of 16, not 50257", "power of two from 16 to 512, not 96", "threefry2x32 keys and not rbg"))
  assert "one tile" in tpu.does_not_pay(table(4096, 256)) and tpu.does_not_pay(table(151936, 256)) is None
