"""The decoder: packed rows, caches, windows, the two layer layouts, and what the compiled loop must not contain."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode
from specdec_jax.sampling import make_sampling
from tests import toys

TOKENS = (np.arange(40).reshape(2, 20) * 7 + 3) % 59


def run(target, tokens, cache=None, **kw):
  return jax.jit(functools.partial(target.decoder.apply, **kw))({"params": target.params}, jnp.asarray(tokens), cache)


def test_packed_texts_equal_texts_alone():
  target = toys.target()
  segments = np.array([[1] * 7 + [2] * 9 + [0] * 4])
  row = run(target, TOKENS[:1], segments=segments)[0][0]
  for part in (slice(0, 7), slice(7, 16)):
    alone = run(target, TOKENS[:1, part])[0][0]
    np.testing.assert_allclose(row[part], alone, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("windows", [(None,) * 3, (4, None, 6)], ids=str)
def test_chunks_through_the_cache_equal_one_pass(stacked, windows):
  target = toys.target(stacked=stacked, windows=windows)
  whole, taps, _ = run(target, TOKENS, taps=(-1, 0, 2))
  cache, parts, tapped = target.init_cache(2, 32), [], []
  for chunk in np.split(TOKENS, [8, 9, 12], axis=1):
    hidden, t, cache = run(target, chunk, cache, taps=(-1, 0, 2))
    cache = cache.replace(lengths=cache.lengths + chunk.shape[1])
    parts.append(hidden)
    tapped.append(t)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)
  np.testing.assert_allclose(jnp.concatenate(tapped, 1), taps, atol=2e-5)


def test_windows_matter():
  near, far = toys.target(windows=(4, 4, 4)), toys.target()
  a, b = run(near, TOKENS)[0], run(far, TOKENS)[0]
  np.testing.assert_allclose(a[:, :4], b[:, :4], atol=1e-5)
  assert np.abs(a[:, 6:] - b[:, 6:]).max() > 1e-2


def test_slots_of_mixed_lengths_equal_slots_alone():
  """Rows of a batch stand at different positions; a rewound slot forgets what was rolled back."""
  target = toys.target()
  cache = target.init_cache(2, 40)
  _, _, cache = run(target, TOKENS, cache)
  cache = cache.replace(lengths=jnp.array([5, 17]))  # Rolled back by setting a length.
  more = np.array([[9, 8, 7], [6, 5, 4]])
  both = run(target, more, cache)[0]
  for b, n in enumerate((5, 17)):
    alone = run(target, np.concatenate([TOKENS[b : b + 1, :n], more[b : b + 1]], 1))[0][0, n:]
    np.testing.assert_allclose(both[b], alone, atol=1e-5)


def test_stacked_and_unrolled_are_one_model():
  one, same = toys.target(), toys.target(stacked=True)
  for a, b in zip(run(one, TOKENS, taps=(0, 1))[:2], run(same, TOKENS, taps=(0, 1))[:2]):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_copy_of_the_cache_in_the_loop(stacked, batch):
  """The cache is updated in place: no copy of its size, in whatever order of axes, in the compiled decoding loop."""
  target = toys.target(stacked=stacked)
  method = decode.make_method(target, None, None, "fixed", "token", False)
  state, transcript = decode.init_state(method, batch, 128), decode.init_transcript(method, batch, 40)
  limits = decode.Limits(jnp.full(batch, 40), jnp.full((batch, 1), -1))
  text = decode._decode.lower(
      method, target.params, None, state, transcript, make_sampling(batch, 61), limits, jnp.int32(9)).compile().as_text()
  buffer = state.cache.keys if stacked else state.cache.keys[0]
  size = sorted(buffer.shape)
  shapes = re.findall(r" = f32\[([\d,]+)\]\S* (copy|transpose)\(", text)
  assert "f32[" + ",".join(map(str, buffer.shape)) + "]" in text
  assert not [op for op in shapes if sorted(map(int, op[0].split(","))) == size]


def test_forward_refuses_wrong_inputs():
  target = toys.target()
  for message, call in {
      "token ids must be 0 … 60, found -1": lambda: target.forward([[1, -1]]),
      "found 0 … 61": lambda: target.forward([[0, 61]]),
      "with at least one token": lambda: target.forward(np.zeros((1, 0), np.int32)),
      r"integers \[B,T\]": lambda: target.forward([1, 2]),
      r"mask has shape \(1, 2\)": lambda: target.forward([[1, 2, 3]], [[1, 1]]),
      r"taps \[3\] do not exist": lambda: target.forward([[1]], taps=(3,)),
  }.items():
    with pytest.raises(ValueError, match=message):
      call()
