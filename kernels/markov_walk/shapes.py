"""Cases of markov_walk: small ones for tests, and the heads of a Qwen3-4B drafter and of the 1.92 B drafter of a 27 B target."""

import jax
import jax.numpy as jnp

from specdec_jax.kernels.base import Case

UNITS = {"markov": (0, 0), "gated": (1, 1), "rnn": (2, 3)}


def _case(
    name: str, batch: int, length: int, vocab: int, rank: int, kind: str, sampled: bool, dtype: str,
    faults=False, ties=False, large=False,
) -> Case:
  """faults: among the rows one with NaN, one with +∞, one without any id; the second row is greedy among sampled ones. ties: whole
  numbers without a bias, so that the best ones tie."""
  rows, columns = UNITS[kind]

  def make(key):
    keys = jax.random.split(key, 8)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape)
    base = 2 * normal(0, batch, length, vocab)
    if ties:
      base = jnp.round(base)
    if faults:
      base = base.at[0, -1, vocab // 2].set(jnp.nan).at[1, 0, 5].set(jnp.inf).at[2, 1].set(-jnp.inf).at[:, :, -40:].set(-jnp.inf)
    arguments = {
        "anchor": jax.random.randint(keys[1], (batch,), 0, vocab), "previous": normal(2, vocab, rank).astype(dtype),
        "table": (0.0 if ties else rank**-0.5) * normal(3, vocab, rank).astype(dtype), "base": base}
    if rows:
      arguments |= {
          "projected": normal(4, batch, length, columns * rank),
          "weights": ((rows * rank) ** -0.5 * normal(5, rows * rank, columns * rank)).astype(dtype)}
    if sampled:
      arguments |= {
          "temperature": jnp.where(jnp.arange(batch) % 3 == 1, 0.0, 0.6 + 0.1 * (jnp.arange(batch) % 8)),
          "keys": jax.random.split(keys[6], (batch, length))}
    return arguments

  wide = 4 * batch * length * vocab
  size = jnp.dtype(dtype).itemsize
  return Case(
      name, make, dtype, {"kind": kind}, large=large, flops=2 * batch * length * vocab * rank,
      bytes=wide * (1 + sampled) + vocab * rank * size)


def _large(target: str, vocab: int, batch: int, kind: str, sampled: bool) -> Case:
  return _case(
      f"{target}_{kind}_{'sampled' if sampled else 'greedy'}_batch{batch}", batch, 7, vocab, 256, kind, sampled, "bfloat16", large=True)


CASES = (
    _case("one_slot", 1, 1, 528, 128, "markov", False, "float32"),
    _case("ties_tail", 3, 3, 9232, 128, "markov", False, "float32", ties=True),
    _case("gated_sampled_faults", 3, 3, 9232, 128, "gated", True, "float32", faults=True),
    _case("rnn_sampled_bf16", 5, 3, 2064, 128, "rnn", True, "bfloat16"),
    _case("many_rows_bf16", 130, 3, 2064, 128, "markov", False, "bfloat16"),
    *(_large("4b", 151936, batch, "markov", sampled) for sampled in (False, True) for batch in (1, 16, 64)),
    _large("4b", 151936, 16, "gated", True),
    _large("27b", 248320, 1, "markov", False),
    _large("27b", 248320, 16, "rnn", True),
    _large("27b", 248320, 64, "markov", True),
)
