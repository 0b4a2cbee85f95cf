"""Attention over the slot cache by the kernels: what they are asked wrongly, races, and decoding with them as without."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import decode
from specdec_jax.kernels import OPS
from specdec_jax.sampling import make_sampling
from specdec_jax.training.objective import FROZEN, Objective
from tests import toys

PROMPTS = [[7, 3, 12], [5, 9, 2, 40, 33, 8], [1]]


def by(target, drafter, kernels: str):
  """Both with an implementation."""
  swapped = dataclasses.replace(target, decoder=target.decoder.clone(kernels=kernels))
  return swapped, dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, kernels=kernels))


@pytest.mark.slow
def test_decoding_with_the_kernels_gives_the_same_tokens():
  target = toys.target(stacked=True, windows=(5, None, 7))
  drafter = toys.block_drafter(toys.target(), head="none", confidence=False, rank=0)
  texts = [specdec_jax.generate(*by(target, drafter, k), PROMPTS, 12, ignore_eos=True) for k in ("reference", "tpu_interpret")]
  assert [c.tokens for c in texts[0]] == [c.tokens for c in texts[1]]
  assert [c.rounds for c in texts[0]] == [c.rounds for c in texts[1]]


@pytest.mark.parametrize("kernels", ["tpu_interpret", "gpu_interpret"])
def test_training_with_the_kernels_gives_the_same_gradients(kernels):
  """Of packed texts, a window shorter than they are, and blocks that do not count."""
  target = toys.target(head_dim=16, rotary=toys.Rotary(1e4, 16))
  drafter = toys.block_drafter(target, window=6)
  tokens = jnp.arange(2 * 40).reshape(2, 40) * 7 % 59
  segments = jnp.array([[1] * 25 + [2] * 15, [1] * 9 + [0] * 31])
  batch = {"tokens": tokens, "segments": segments, "answer": segments > 0, "progress": jnp.float32(1)}
  constants = {"target": target.params, "frozen": {k: v for k, v in drafter.params.items() if k in FROZEN}}
  trainable = {k: v for k, v in drafter.params.items() if k not in FROZEN}

  def step(implementation):
    objective = Objective(target, by(target, drafter, implementation)[1].model, 12)
    run = lambda params, drawn: objective(params, batch, drawn, constants)
    return jax.jit(jax.value_and_grad(run, has_aux=True))(trainable, jax.random.key(3))

  (expected, _), gradient = step("reference")
  (found, _), by_kernel = step(kernels)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  chex.assert_trees_all_close(by_kernel, gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["tpu_interpret", "gpu_interpret"])
def test_flattened_rows_of_several_slots(kernels):
  """As the engine verifies: some slots idle, others with few drafts, not all rows of the cache in reach; values that are no numbers
  stay with the slot that they are in."""
  target = toys.target(stacked=True, windows=(5, None, 7), head_dim=16, rotary=toys.Rotary(1e4, 16))
  drafter = toys.scripted(np.arange(4 * 64).reshape(4, 64) % 59, 3)
  method = decode.make_method(target, drafter, None, "fixed", "token", False)
  state = decode.init_state(method, 4, 64, "float32")
  _, _, cache = target.decoder.apply({"params": target.params}, jnp.arange(4 * 20).reshape(4, 20) % 59, state.cache)
  cache = cache.replace(lengths=jnp.array([3, 20, 11, 7]), values=cache.values.at[1, 2, :, 4].set(0))
  state = state.replace(
      cache=cache, anchor=jnp.array([5, 6, 7, 8]), finish=jnp.array([decode.RUNNING, decode.STOP, decode.RUNNING, decode.RUNNING]))
  made = decode.draft(method, drafter.params, state, make_sampling(4, 61), decode.Limits(jnp.full(4, 9), jnp.full((4, 1), -1)))
  made = dataclasses.replace(made, lengths=jnp.array([3, 0, 0, 2]))
  broken = jax.tree.map(lambda x: x, target.params)
  broken["embedding"] = broken["embedding"].at[8].set(jnp.nan)  # The last slot's anchor.
  outputs = []
  for implementation in ("reference", kernels):
    with_kernel = dataclasses.replace(method, decoder=target.decoder.clone(kernels=implementation))
    outputs.append(jax.jit(lambda params, m=with_kernel: decode.verify_draft(m, params, state, made, 10, 32))(broken))
  plain, by_kernel = outputs
  for slot, tokens in ((0, 4), (2, 1)):
    np.testing.assert_allclose(by_kernel.logits[slot, :tokens], plain.logits[slot, :tokens], atol=1e-4)
    assert np.isfinite(by_kernel.logits[slot, :tokens]).all()
  assert np.isnan(by_kernel.logits[3, :3]).all() and np.isnan(plain.logits[3, :3]).all()
  for slot, rows in ((0, 3 + 4), (1, 20), (2, 11 + 1), (3, 7 + 3)):  # What was committed, and what is a token.
    np.testing.assert_allclose(by_kernel.cache.keys[:, slot, ..., :rows], plain.cache.keys[:, slot, ..., :rows], atol=1e-4)
    np.testing.assert_allclose(by_kernel.cache.values[:, slot, :, :rows], plain.cache.values[:, slot, :, :rows], atol=1e-4)


def small(op: str, name: str) -> dict:
  case = next(c for c in OPS[op].cases if c.name == name)
  return case.make(jax.random.key(0)) | case.settings


@pytest.mark.parametrize(("op", "case", "change", "message"), [
    ("ragged_verify", "tiles", {"keys": np.zeros((4, 2, 1100, 32))},
     r"ragged_verify: keys must be \(4, 2, 32, 1100\).*not \(4, 2, 1100, 32\)"),
    ("ragged_verify", "tiles", {"slot": None}, "slot and offset come together"),
    ("ragged_verify", "tiles", {"offset": np.zeros(3, np.int32)}, r"offset must be \(12,\)"),
    ("ragged_verify", "one_token", {"width": 2}, r"q must be \(8, 2, 2, 32\)"),
    ("ragged_verify", "one_token", {"layer": np.int32(0)}, r"values needs the axes \[Y,B,K,S,H\], not \(4, 2, 136, 32\)"),
    ("ragged_verify", "one_token", {"q": np.zeros((4, 4, 32))}, r"q needs the axes \[n,K,G,H\], not \(4, 4, 32\)"),
    ("ragged_verify", "one_token", {"start": np.zeros((4, 1), np.int32)}, r"start needs the axes \[B\], not \(4, 1\)"),
    ("block_attention", "contexts", {"values": np.zeros(32)}, r"values needs the axes \[B,K,S,H\], not \(32,\)"),
    ("write_rows", "stacked", {"k": np.zeros((3, 130, 32))}, r"k needs the axes \[B,T,K,H\], not \(3, 130, 32\)"),
    ("block_attention", "contexts", {"keep": np.ones(5, bool)}, r"block_attention: keep must be \(6, 1\)"),
    ("write_rows", "straddling", {"v": np.zeros((7, 2, 2, 32))}, r"write_rows: v must be \(7, 3, 2, 32\)"),
    ("write_rows", "straddling", {"implementation": "cuda"}, "write_rows: unknown implementation 'cuda'"),
])
def test_wrong_arguments_are_named(op, case, change, message):
  with pytest.raises(ValueError, match=message):
    OPS[op].call(**small(op, case) | change)


def test_what_the_kernels_cannot_do_runs_as_the_reference(caplog):
  arguments = small("block_attention", "contexts")
  wide = arguments | {n: jnp.repeat(arguments[n], 40, 2) for n in ("q", "k", "v")}
  expected = OPS["block_attention"].call(**wide, implementation="reference")
  np.testing.assert_array_equal(OPS["block_attention"].call(**wide, implementation="tpu"), expected)
  assert "160 slots of 2 heads a kv head: the kernel for tpu holds 128 queries" in caplog.text


def test_a_bfloat16_context_does_not_round_what_blocks_see_of_themselves():
  arguments = small("block_attention", "contexts")
  arguments |= {n: arguments[n].astype(jnp.bfloat16) for n in ("keys", "values")}
  run = lambda implementation: jax.jit(lambda a: OPS["block_attention"].call(**a, implementation=implementation))(arguments)
  np.testing.assert_allclose(run("tpu_interpret")[0], run("reference")[0], atol=1e-5)  # The block that has no context.


def test_no_key_of_a_column_that_is_not_seen_counts():
  """Columns behind a slot's last position and before its window hold what would show."""
  arguments = small("ragged_verify", "tiles")
  settings = {name: arguments.pop(name) for name in ("width", "window")}  # A window of 600 in 1100 columns.
  columns = jnp.arange(1100)
  start = arguments["start"][:, None, None, None]
  hidden = (columns >= start + 4) | (columns <= start - 600)
  changed = arguments | {"keys": jnp.where(hidden, jnp.nan, arguments["keys"])}
  for implementation in ("reference", "tpu_interpret", "gpu_interpret"):
    run = jax.jit(lambda a, i=implementation: OPS["ragged_verify"].call(**a, **settings, implementation=i))
    np.testing.assert_allclose(run(changed), run(arguments), atol=1e-5)


@pytest.mark.parametrize("kernels", ["tpu_interpret", "gpu_interpret"])
def test_blocks_that_do_not_count_have_no_gradient_and_give_none(kernels):
  arguments = small("block_attention", "contexts") | {"keep": jnp.zeros((6, 1), bool)}
  run = lambda some: jnp.sum(OPS["block_attention"].call(**arguments | some, implementation=kernels) ** 2 + 1)
  for gradient in jax.jit(jax.grad(run))({n: arguments[n] for n in ("q", "keys", "values", "k", "v")}).values():
    np.testing.assert_array_equal(gradient, 0)


def test_a_value_that_is_no_number_is_written_as_zero():
  arguments = small("write_rows", "straddling")
  broken = arguments | {"v": arguments["v"].at[1, 1, 0, 3].set(jnp.inf)}
  for implementation in ("reference", "tpu_interpret"):
    _, values = jax.jit(lambda a, i=implementation: OPS["write_rows"].call(**a, implementation=i))(broken)
    assert values[1, 0, 126, 3] == 0 and np.isfinite(values).all()
