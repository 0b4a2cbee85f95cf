"""The dynamic convolution: what it replaces by hand, wrong input, and a drafter that runs its kernels."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax.kernels import dynamic_conv
from specdec_jax.kernels.dynamic_conv import ref
from tests import toys


def by_hand(x, base, dynamic, slots, group):
  """Token by token and channel by channel."""
  out = np.zeros_like(x)
  for t, d in np.ndindex(x.shape):
    for o in range(min(len(base), t % slots + 1)):
      out[t, d] += (base[o, d] + dynamic[t, o, d // group]) * x[t - o, d]
  return out


def test_the_reference_is_the_sum_over_taps_within_a_block():
  draw = np.random.default_rng(0).standard_normal
  x, base, dynamic = draw((12, 6)), draw((3, 6)), draw((12, 3, 2))
  args = {k: jnp.asarray(v, jnp.float32) for k, v in (("x", x), ("base", base), ("dynamic", dynamic))}
  np.testing.assert_allclose(ref.dynamic_conv(**args, slots=4), by_hand(x, base, dynamic, 4, 3), atol=1e-5)
  row = args | {"x": args["x"][None], "dynamic": args["dynamic"][None], "residual": args["x"][None]}
  np.testing.assert_allclose(ref.dynamic_conv(**row, slots=1)[0], x + by_hand(x, base, dynamic, 1, 3), atol=1e-5)


def test_wrong_shapes_are_named():
  x, base, dynamic = jnp.ones((2, 6, 8)), jnp.ones((2, 8)), jnp.ones((2, 6, 2, 4))
  good = {"x": x, "base": base, "dynamic": dynamic, "slots": 3}
  assert dynamic_conv(**good).shape == x.shape
  for change, text in (
      ({"slots": 4}, "6 tokens are no multiple of the 4 slots"), ({"base": base[:, :4]}, r"base is \(2, 4\) where x has 8 channels"),
      ({"base": base[None]}, r"axes \[taps, D\]"), ({"part": 0}, r"with a part \[parts, taps, D\]"),
      ({"part": 2, "base": base[None]}, "no such part"),
      ({"base": jnp.ones((5, 8))}, "1 to 4 taps"), ({"dynamic": dynamic[:, :, :1]}, r"dynamic is \(2, 6, 1, 4\): its axes"),
      ({"dynamic": dynamic[..., :3]}, "8 channels do not split into 3 groups"), ({"residual": x[:1]}, r"residual is \(1, 6, 8\)")):
    with pytest.raises(ValueError, match=text):
      dynamic_conv(**{**good, **change})


@pytest.mark.parametrize(("group", "width", "dtype", "reason"), [
    (3, 6, jnp.float32, "groups of 3 channels"), (8, 16, jnp.float16, "x, dynamic and residual are of float16"),
    (8, 16, None, "of bfloat16, float32")])
def test_what_the_kernel_cannot_do_runs_as_the_reference(group, width, dtype, reason, caplog):
  args = {
      "x": jnp.ones((6, width), dtype or jnp.bfloat16), "base": jnp.ones((2, width)), "dynamic": jnp.ones((6, 2, width // group), dtype)}
  out = dynamic_conv(**args, slots=3, implementation="tpu_interpret")
  np.testing.assert_array_equal(out, ref.dynamic_conv(**args, slots=3))
  assert reason in caplog.text


@pytest.mark.slow
def test_a_drafter_that_runs_the_kernels_drafts_the_same():
  target = toys.target()
  drafter = toys.block_drafter(
      target, head="selector", candidates=4, conv=2, conv_group=8, confidence=False, anchor_predicts=False, own_embedding=False)
  assert np.abs(drafter.params["layers_0"]["attention_conv"]["dynamic"]["kernel"]).max() > 0.1  # Coefficients are predicted.
  run = lambda kernels: specdec_jax.generate(
      target, dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, kernels=kernels)), [[3, 1, 4], [2] * 9], 8,
      temperature=[0.0, 1.0], seed=[1, 2], ignore_eos=True)
  found, expected = run("tpu_interpret"), run("reference")
  assert [c.tokens for c in found] == [c.tokens for c in expected] and [c.rounds for c in found] == [c.rounds for c in expected]
