"""Every kernel against its reference, in interpret mode or on the accelerator there is: values and gradients, for every case of its
shapes.py (C107)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.kernels import OPS, default_implementation
from specdec_jax.kernels.base import TOLERANCE, choose, ways
from specdec_jax.sharding import AXES

IMPLEMENTATIONS = (default_implementation(),) if default_implementation() != "reference" else (
    "tpu_interpret", pytest.param("gpu_interpret", marks=pytest.mark.slow))
PAIRS = [pytest.param(op, case, id=f"{op.name}-{case}") for op in OPS.values() for case in op.cases if not case.large]


def close(found, expected, dtype):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    if jnp.issubdtype(b.dtype, jnp.floating):
      a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
      assert np.isfinite(a[np.isfinite(b)]).all()
      np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    else:
      np.testing.assert_array_equal(a, b)


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision("highest"):
    yield


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_values_and_gradients_are_those_of_the_reference(op, case, implementation):
  arguments = case.make(jax.random.key(0))
  run = lambda f, **more: jax.jit(lambda a: f(**a, **case.settings, **more))(arguments)
  found, expected = run(op.call, implementation=implementation), run(op.reference)
  close(found, expected, case.dtype)
  if case.differentiable:
    weights = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(jax.tree.leaves(expected))]

    def gradient(f, **more):
      rest = {k: v for k, v in arguments.items() if k not in case.differentiable}
      loss = lambda a: sum(
          jnp.sum(w * x.astype(jnp.float32))
          for w, x in zip(weights, jax.tree.leaves(f(**a, **rest, **case.settings, **more))))
      return jax.jit(jax.grad(loss))({k: arguments[k] for k in case.differentiable})

    close(gradient(op.call, implementation=implementation), gradient(op.reference), case.dtype)


def test_an_unknown_implementation_is_named():
  with pytest.raises(ValueError, match="conv: unknown implementation 'cuda': one of reference, tpu"):
    choose("conv", "cuda", lambda platform: None)


def test_what_a_kernel_cannot_do_runs_as_the_reference_and_says_so_once(caplog):
  for _ in range(2):
    assert choose("conv", "tpu", lambda platform: f"no kernel for {platform} and 5 channels") == "reference"
  assert caplog.text.count("conv runs as plain XLA: no kernel for tpu and 5 channels") == 1


def test_meshes_that_kernels_run_on(caplog):
  """The library's, and where a device sees its own part only; what is not wholly in a device's hands is left to XLA."""
  on = lambda mesh: jax.sharding.use_abstract_mesh(mesh)
  chosen = lambda: choose("walk", "tpu", lambda platform: None)
  mesh, manual = jax.sharding.AbstractMesh((2, 2, 2), AXES), jax.sharding.AxisType.Manual
  with on(mesh):
    assert chosen() == "tpu" and ways("tensor") == 2 and ways(AXES) == 8
  with on(mesh.update(axis_types=(manual,) * 3)):
    assert chosen() == "tpu" and ways(AXES) == 1
  with on(mesh.update(axis_types=(manual, *mesh.axis_types[1:]))):
    assert chosen() == "reference" and ways(AXES) == 1
  with on(jax.sharding.AbstractMesh((2,), ("model",))):
    assert chosen() == "reference" and ways("tensor") == 1
  assert "walk runs as plain XLA: the mesh axes data alone are manual" in caplog.text
  assert "walk runs as plain XLA: a mesh with axes model: kernels are split along data, fsdp, tensor" in caplog.text
