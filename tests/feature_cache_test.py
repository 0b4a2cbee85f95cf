"""Features on disk: what comes back, what is refused, what it would cost."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.qwen3_4b import cache as qwen3_4b
from experiments.plan_cache import plan
from specdec_jax.data import feature_cache, packing
from specdec_jax.training import features
from tests import toys

TAPS = (0, 1)
ROWS = packing.pack([([1, 2, 3], [4, 5, 6, 7]), ([8] * 9, [9] * 3), ([1, 5], [2, 2, 2])], 16)


def compute(target):
  run = jax.jit(lambda t, s: features.target_features(target.decoder, target.params, t, s, TAPS)[:2])
  return lambda tokens, segments: run(tokens, segments)


@pytest.mark.parametrize("dtype, step", [("bfloat16", 2**-8), ("int8", 1 / 254)])
def test_what_was_written_comes_back(tmp_path, dtype, step):
  """To half a step of the stored form: of each value in bfloat16, of a vector's largest in int8; in any order of rows."""
  target = toys.target()
  cache = feature_cache.write(tmp_path, target, TAPS, ROWS, dtype, 2, compute(target))
  order = np.arange(len(ROWS.tokens))[::-1]
  taps, hidden = feature_cache.restore(cache.rows(order))
  exact_taps, exact_hidden = compute(target)(ROWS.tokens[order], ROWS.segments[order])
  for ours, exact in ((taps, exact_taps), (hidden, exact_hidden)):
    ours, exact = np.asarray(ours), np.asarray(exact)
    scale = np.abs(exact).max(-1, keepdims=True) if dtype == "int8" else np.abs(exact)
    assert np.all(np.abs(ours - exact) <= step * scale * 1.01 + 1e-7) and np.abs(ours - exact).max() > 0
  stored = sum(f.stat().st_size for f in tmp_path.glob("*.bin"))
  assert stored == feature_cache.bytes_per_token(target.config.width, len(TAPS), dtype) * ROWS.tokens.size


def test_a_cache_of_something_else_is_refused(tmp_path):
  """Another target, other taps, rows or dtype: each named. A cache that was cut off is none."""
  target = toys.target()
  feature_cache.write(tmp_path, target, TAPS, ROWS, "int8", 4, compute(target))
  other = dataclasses.replace(ROWS, tokens=ROWS.tokens + 1)
  for arguments, message in (
      ((dataclasses.replace(target, hash="1"), TAPS, ROWS, "int8"), "target is 0, not 1"), ((target, (0, 2), ROWS, "int8"), "taps is"),
      ((target, TAPS, other, "int8"), "tokens is"), ((target, TAPS, ROWS, "bfloat16"), "dtype is int8")):
    with pytest.raises(feature_cache.FeatureCacheError, match=message):
      feature_cache.open_cache(tmp_path, *arguments)
  def stop(tokens, segments):
    raise RuntimeError("killed")
  with pytest.raises(RuntimeError, match="killed"):
    feature_cache.write(tmp_path, target, TAPS, ROWS, "int8", 4, stop)
  with pytest.raises(FileNotFoundError, match="no complete feature cache"):
    feature_cache.open_cache(tmp_path, target, TAPS, ROWS, "int8")


def test_the_published_plan():
  """Five taps of Qwen3-4B and the last hidden state: 30,720 bytes a token in bfloat16, 38 TB; int8 about half of it."""
  cached, small, live = plan(qwen3_4b.get_config())
  assert cached["bytes_per_token"] == 30_720 and cached["bytes"] == pytest.approx(38e12, rel=0.02)
  assert small["bytes"] == pytest.approx(0.5 * cached["bytes"], rel=0.01) and live["bytes"] == 0
  assert live["target_hours"] == pytest.approx(10 * cached["target_hours"])
