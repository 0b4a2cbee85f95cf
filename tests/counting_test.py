"""Operations, bytes and collectives by hand; presets against the published figures."""

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import counting, presets
from specdec_jax.drafters import drafter_model
from specdec_jax.models.decoder import Decoder

MODULE = ("""
HloModule jit_f, entry_computation_layout={(f32[8,4])->f32[8,4]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %gathered = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%x, %gathered)
}

%cond (arg: (s32[], f32[8,4])) -> pred[] {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%arg, %arg), direction=LT
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %loop = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)(2,1)}) while(%p), condition=%cond, body=%body, """
    """backend_config={"known_trip_count":{"n":"36"}}
  %start = (bf16[2,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %done = bf16[16,4]{1,0} all-gather-done(%start)
  ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}
""")


def test_products_count_as_often_as_they_run():
  def f(x, w):
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(lambda y: y @ w)(x), None), x, w)
    return jax.jit(lambda y: y @ y.T)(x)

  found = counting.work(jax.make_jaxpr(f)(jnp.zeros((8, 4)), jnp.zeros((3, 4, 4))))
  assert found.flops == 3 * 2 * 8 * 4 * 4 + 2 * 8 * 4 * 8
  assert found.bytes == 4 * (3 * (8 * 4 + 4 * 4 + 8 * 4) + 2 * 8 * 4 + 8 * 8)
  backward = counting.work(jax.make_jaxpr(jax.grad(lambda x, w: f(x, w).sum()))(jnp.zeros((8, 4)), jnp.zeros((3, 4, 4))))
  assert backward.flops > 1.9 * found.flops


def test_collectives_of_a_module():
  found = {(e.kind, e.group): e for e in counting.exchanges(MODULE, 8)}
  assert found["all-gather", 4].times == 36 and found["all-gather", 4].bytes == 128 and found["all-gather", 4].sent == 36 * 128 * 3 / 4
  assert found["all-gather", 8].bytes == 128 and found["all-reduce", 2].sent == 2 * 128 / 2


@pytest.mark.parametrize("name, parameters", [
    ("qwen3-4b", 4.02e9), ("qwen3-8b", 8.19e9), ("qwen3-14b", 14.77e9), ("smollm2-135m", 134.5e6)])
def test_presets_have_the_published_sizes(name, parameters):
  c = presets.target_config(name)
  init = lambda key: Decoder(c).init(key, jnp.zeros((1, 4), jnp.int32), method="init_all")
  assert sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))) == pytest.approx(parameters, rel=2e-3)


def test_the_published_drafter():
  """RELEASED_FORMATS §1.2: about 1.39e9 parameters for Qwen3-4B's DSpark, 0.78e9 of them copies, 0.078e9 the Markov factors."""
  shapes = jax.eval_shape(drafter_model(presets.drafter_config("qwen3-4b", "dspark")).init_params, jax.random.key(0))
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  assert size(shapes) == pytest.approx(1.39e9, rel=5e-3) and size(shapes["markov"]) == pytest.approx(0.078e9, rel=1e-2)
  assert size((shapes["embedding"], shapes["head"])) == pytest.approx(0.78e9, rel=5e-3)
  for kind in ("dflash", "dflash2", "eagle3"):
    assert presets.drafter_config("qwen3-14b", kind).taps == (1, 10, 19, 28, 37)
  with pytest.raises(ValueError, match="no published 'dspark' drafter for 'smollm2-135m'"):
    presets.drafter_config("smollm2-135m", "dspark")
