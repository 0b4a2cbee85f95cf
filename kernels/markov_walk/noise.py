"""The noise of jax.random.gumbel inside a kernel, bit for bit up to the logarithm."""

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TINY = float(np.finfo(np.float32).tiny)


def gumbel(low: jax.Array, high: jax.Array, index: jax.Array) -> jax.Array:
  """Elements `index` of jax.random.gumbel(key, (V,)) under partitionable keys; (low, high): the key's data, uint32."""
  a, b = threefry(low, high, jnp.uint32(0), index.astype(jnp.uint32))
  mantissa = jax.lax.shift_right_logical(a ^ b, jnp.uint32(9)) | jnp.uint32(0x3F800000)
  uniform = jnp.maximum(jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0, TINY)
  return -jnp.log(-jnp.log(uniform))


def threefry(key0, key1, x0, x1):
  """Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
  rotate = lambda x, n: (x << jnp.uint32(n)) | jax.lax.shift_right_logical(x, jnp.uint32(32 - n))
  keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for group in range(5):
    for n in ROTATIONS[group % 2]:
      x0 = x0 + x1
      x1 = rotate(x1, n) ^ x0
    x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
  return x0, x1
