"""Filters and keyed draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.sampling import Role, best_value, distribution, draw, make_sampling

LOGITS = jnp.log(jnp.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))


@pytest.mark.parametrize("settings, expected", [
    ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
    ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0]),
    ({"top_p": 0.71}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
    ({"top_p": 1e-6}, [1, 0, 0, 0, 0]),
    ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),  # 0.4 / 0.85 < 0.5: top-p counts what top-k left.
    ({"top_k": 3, "top_p": 0.47}, [1, 0, 0, 0, 0]),
], ids=str)
def test_filters(settings, expected):
  np.testing.assert_allclose(distribution(LOGITS, make_sampling(1, 5, 1.0, **settings))[0], expected, atol=1e-5)


def test_rows_have_their_own_settings():
  """One batch of greedy, hot, top-k and top-p rows equals the rows alone; extra axes stand between B and V."""
  temperature, top_k, top_p = [0.0, 2.0, 1.0, 0.5], [0, 0, 2, 0], [1.0, 1.0, 1.0, 0.6]
  logits = jax.random.normal(jax.random.key(0), (4, 3, 9)) * 2
  both = distribution(logits, make_sampling(4, 9, temperature, top_k, top_p))
  for i in range(4):
    alone = distribution(logits[i : i + 1], make_sampling(1, 9, temperature[i], top_k[i], top_p[i]))
    np.testing.assert_allclose(both[i], alone[0], atol=1e-6)
  np.testing.assert_allclose(both.sum(-1), 1, atol=1e-5)


def test_unused_filters_are_not_compiled():
  assert make_sampling(2, 9, [0.0, 0.0], top_k=5, top_p=0.5).temperature is None
  s = make_sampling(2, 9, [0.0, 1.0], top_k=[5, 0], top_p=[0.5, 1.0])
  assert s.top_k is None and s.top_p is None  # Only the greedy row asked for them.


def test_draws_follow_the_distribution_and_their_role():
  n, p = 50_000, np.array([0.5, 0.0, 0.3, 0.2], np.float32)
  keys = jax.random.split(jax.random.key(1), n)
  many = jnp.broadcast_to(p, (n, 4))
  samples = {role: np.asarray(draw(keys, many, role)) for role in Role}
  for x in samples.values():
    counts = np.bincount(x, minlength=4)
    assert counts[1] == 0
    assert np.all(np.abs(counts / n - p) <= 4 * np.sqrt(p * (1 - p) / n))
  same = np.mean(samples[Role.DRAFT] == samples[Role.RECOVER])
  assert same == pytest.approx(float((p**2).sum()), abs=0.01)  # Independent draws agree by chance only.
  mixed = draw(keys[:2], many[:2], jnp.array([Role.BONUS, Role.RECOVER]))
  assert mixed.tolist() == [samples[Role.BONUS][0], samples[Role.RECOVER][1]]


def test_keys_depend_on_seed_and_output_position_only():
  one, two = make_sampling(1, 9, 1.0, seed=7), make_sampling(3, 9, 1.0, seed=[1, 2, 7])
  a = jax.random.key_data(one.position_keys(jnp.array([5]), 4))
  b = jax.random.key_data(two.position_keys(jnp.array([0, 9, 7]), 2))
  np.testing.assert_array_equal(a[0, 2:], b[2])
  fresh = make_sampling(2, 9, 1.0, seed=None)
  data = jax.random.key_data(fresh.keys)
  assert (data[0] != data[1]).any()


def test_top_p_of_a_neighbour_cuts_no_tail():
  """A float32 running sum over a large vocabulary passes 1 early; a row without top-p keeps its last token all the same."""
  logits = jnp.tile(jnp.concatenate([jnp.full((1, 50_000), 2.0), jnp.full((1, 100), -9.0)], 1), (2, 1))
  both = distribution(logits, make_sampling(2, 50_100, 1.0, top_p=[1.0, 0.5]))
  assert float(both[0].min()) > 0
  np.testing.assert_allclose(both[0], jax.nn.softmax(logits[0]), rtol=1e-6)


def test_one_nan_in_a_wide_row_is_seen():
  """XLA's CPU backend loses it from the maximum of a product that it fuses."""
  x = np.zeros((3, 9232), np.float32)
  x[1, 17] = np.nan
  found = jax.jit(lambda x: best_value(x + x[:1] * 0.5))(x)
  np.testing.assert_array_equal(found, [0.0, np.nan, 0.0])
