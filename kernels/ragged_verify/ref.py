"""What the two attentions mean, in plain jnp; arguments as in `api`."""

import math

import jax
import jax.numpy as jnp


def ragged_verify(*, q, start, keys, values, width, slot=None, offset=None, window=None, layer=None, reach=None, scale=None):
  if layer is not None:
    keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
  keys, values = keys[..., :reach], values[..., :reach, :]
  if slot is None:
    slot, offset = jnp.divmod(jnp.arange(len(start) * width), width)
  rows = jnp.zeros((len(start), width, *q.shape[1:]), q.dtype).at[slot, offset].set(q).swapaxes(1, 2)
  column, position = jnp.arange(keys.shape[-1]), start[:, None, None] + jnp.arange(width)[:, None]
  seen = (column <= position) & _near(position, column, window)
  weights = _softmax(_scores(rows, keys, scale), seen[:, None, :, None])
  return _sum(weights, values).swapaxes(1, 2)[slot, offset].astype(q.dtype)


def block_attention(*, q, keys, values, high, k, v, keep, low=None, window=None, scale=None):
  column, position = jnp.arange(keys.shape[-1]), (high[..., None] + jnp.arange(q.shape[2]))[..., None]
  seen = (column < high[..., None, None]) & _near(position, column, window)
  if low is not None:
    seen &= column >= low[..., None, None]
  seen = jnp.concatenate([seen, jnp.ones((*seen.shape[:-1], q.shape[2]), bool)], -1) & keep[..., None, None]
  batch, blocks, slots, heads, groups, _ = q.shape
  q, k, v = q.transpose(0, 3, 1, 2, 4, 5), k.transpose(0, 3, 1, 4, 2), v.transpose(0, 3, 1, 2, 4)  # [B,K,A,…]
  flat = lambda x: x.reshape(batch, heads, blocks * slots, groups, -1)  # All blocks at once meet the context.
  scores = jnp.concatenate([_scores(flat(q), keys, scale).reshape(*q.shape[:-1], -1), _scores(q, k, scale)], -1)
  outside, inside = jnp.split(_softmax(scores, seen[:, None, :, :, None]), [len(column)], -1)
  return (_sum(flat(outside), values).reshape(q.shape) + _sum(inside, v)).transpose(0, 2, 3, 1, 4, 5).astype(q.dtype)


def write_rows(*, keys, values, k, v, start, layer=None):
  v = jnp.where(jnp.isfinite(v), v, 0)
  slots, at = jnp.arange(k.shape[0])[:, None], start[:, None] + jnp.arange(k.shape[1])
  to = (slots,) if layer is None else (layer, slots)
  put = lambda x, index, new: x.at[index].set(new.astype(x.dtype), mode="drop", unique_indices=True)
  return put(keys, (*to, slice(None), slice(None), at), k), put(values, (*to, slice(None), at), v)


def _near(position, column, window):
  return True if window is None else position - column < window


def _scores(q, keys, scale):
  """Of queries […,K,T,G,H] and keys […,K,H,S]."""
  flat = q.reshape(*q.shape[:-3], -1, q.shape[-1])
  scores = jnp.matmul(flat, keys.astype(q.dtype), preferred_element_type=jnp.float32)
  return (scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)).reshape(*q.shape[:-1], -1)


def _softmax(scores, seen):
  scores = jnp.where(seen, scores, -jnp.inf)
  top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
  weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
  return weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _sum(weights, values):
  """Values [...,K,S,H] by weights [...,K,T,G,S]."""
  flat = weights.astype(values.dtype).reshape(*weights.shape[:-3], -1, weights.shape[-1])
  return jnp.matmul(flat, values, preferred_element_type=jnp.float32).reshape(*weights.shape[:-1], -1)
