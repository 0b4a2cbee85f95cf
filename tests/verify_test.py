"""Acceptance by enumeration: every draft, both branches, probabilities added and compared with the target's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verify
from specdec_jax.sampling import Role, distribution, draw, make_sampling
from specdec_jax.verify import SparseDistribution

TRIALS = 100_000


def dense(q):
  return jnp.asarray(q, jnp.float32)[None, None]


def marginal(p, q, proposals=None):
  """The exact distribution of the first emitted token; p [V], q [V] or a sparse one, drafts from `proposals` (default q)."""
  p = np.asarray(p, np.float32)
  rows = jnp.asarray(np.stack([p, p]))[None]  # The row behind the draft is not reached at this position.
  q = q if isinstance(q, SparseDistribution) else dense(q)
  weights = np.asarray(q.row(jnp.zeros(1, jnp.int32), len(p))[0] if isinstance(q, SparseDistribution) else q[0, 0])
  weights = weights if proposals is None else np.asarray(proposals)
  out = np.zeros(len(p))
  recovered = np.asarray(verify.next_distribution(rows, q, jnp.array([0]), jnp.array([1]))[0])
  for x in range(len(p)):
    alpha = float(verify.acceptance(rows, q, jnp.array([[x]]))[0, 0])
    out[x] += weights[x] * alpha
    out += weights[x] * (1 - alpha) * recovered
  return out


def alpha(p, q):
  return float(np.minimum(p, q).sum())


def test_plain_rule():
  """C01."""
  p, q = [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]
  np.testing.assert_allclose(marginal(p, q), p, atol=1e-6)
  residual = verify.next_distribution(jnp.asarray([[p, p]]), dense(q), jnp.array([0]), jnp.array([1]))
  np.testing.assert_allclose(residual[0], [0, 0.75, 0.25], atol=1e-6)
  rates = [float(verify.acceptance(jnp.asarray([[p, p]]), dense(q), jnp.array([[x]]))[0, 0]) for x in range(3)]
  assert np.dot(q, rates) == pytest.approx(0.6) == pytest.approx(alpha(p, q))


def test_recovery_from_the_residual_not_the_target():
  """C03: redrawing a rejected token from p gives (0.64, 0.36)."""
  p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
  np.testing.assert_allclose(marginal(p, q), p, atol=1e-6)
  wrong = q * np.minimum(1, p / q) + (q * (1 - np.minimum(1, p / q))).sum() * p
  np.testing.assert_allclose(wrong, [0.64, 0.36])


def test_temperature_on_both_sides():
  """C05."""
  sampling = make_sampling(1, 3, temperature=0.5)
  q = distribution(jnp.array([[2.0, 1, 0]]), sampling)[0]
  p = distribution(jnp.array([[1.0, 2, 0]]), sampling)[0]
  np.testing.assert_allclose(q, [0.8668, 0.1173, 0.0159], atol=1e-4)
  np.testing.assert_allclose(p, [0.1173, 0.8668, 0.0159], atol=1e-4)
  np.testing.assert_allclose(marginal(p, q), p, atol=1e-6)
  assert alpha(p, q) == pytest.approx(0.2505, abs=1e-4)
  hot = distribution(jnp.array([[2.0, 1, 0]]), make_sampling(1, 3, temperature=1.0))[0]
  np.testing.assert_allclose(marginal(p, hot, proposals=q), [0.1529, 0.8443, 0.0028], atol=1e-4)


@pytest.mark.parametrize("ids, probs", [([1, 3, 4], [0.5, 0.3, 0.2]), ([1, 3, 4, 1], [0.3, 0.3, 0.2, 0.2])])
def test_sparse_q(ids, probs):
  """C07: the residual covers the whole vocabulary; masses of equal ids add."""
  p = np.array([0.10, 0.20, 0.15, 0.25, 0.10, 0.20], np.float32)
  q = SparseDistribution(jnp.array([[ids]]), jnp.array([[probs]]))
  np.testing.assert_allclose(marginal(p, q), p, atol=1e-6)
  residual = verify.next_distribution(jnp.asarray([[p, p]]), q, jnp.array([0]), jnp.array([1]))[0]
  np.testing.assert_allclose(residual, [2 / 9, 0, 1 / 3, 0, 0, 4 / 9], atol=1e-6)
  assert alpha(p, np.asarray(q.row(jnp.array([0]), 6)[0])) == pytest.approx(0.55)


def test_one_hot_draft():
  """C09."""
  p = [0.6, 0.3, 0.1]
  for q in ([1.0, 0, 0], SparseDistribution(jnp.array([[[0]]]), jnp.ones((1, 1, 1)))):
    np.testing.assert_allclose(marginal(p, q), p, atol=1e-6)
  residual = verify.next_distribution(jnp.asarray([[p, p]]), dense([1.0, 0, 0]), jnp.array([0]), jnp.array([1]))
  np.testing.assert_allclose(residual[0], [0, 0.75, 0.25], atol=1e-6)


@pytest.mark.parametrize("accepted", range(4))
def test_exactly_one_extra_token(accepted):
  """C11: K = 3, forced accept counts; p and q one-hot, so that everything is decided."""
  hot = lambda ids: jax.nn.one_hot(jnp.array([ids]), 9)
  p = hot([0, 1, 2, 7])
  drafts = jnp.array([[0, 1, 2]]).at[0, accepted:].set(8)
  verdict = verify.accept(p, hot(drafts[0]), drafts, jnp.array([3]), jax.random.split(jax.random.key(0), (1, 4)))
  assert verdict.accepted[0] == accepted
  assert verdict.next_token[0] == [0, 1, 2, 7][accepted]


def test_padded_vocabulary():
  """C13: ids beyond the real vocabulary have probability 0 in p, q, residual and bonus."""
  key = jax.random.key(3)
  for temperature in (0.0, 1.0):
    sampling = make_sampling(1, 5, temperature=temperature)
    padded = lambda k, width: jnp.concatenate([jax.random.normal(k, (1, 2, 5)), jnp.full((1, 2, width - 5), 50.0)], -1)
    p, q = distribution(padded(key, 8), sampling), distribution(padded(jax.random.fold_in(key, 1), 16), sampling)
    assert float(p[..., 5:].sum()) == float(q[..., 5:].sum()) == 0
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(marginal(p[0, 0, :5], q[0, 0, :5]), p[0, 0, :5], atol=1e-6)
    many, keys = 400, jax.random.split(jax.random.key(7), (400, 2))
    drafts = jnp.argmax(q[:, :1], -1).astype(jnp.int32).repeat(many, 0)
    for wide in (q[:, :1], q[:, :1, :5]):  # Wider, or narrower, than the target's.
      verdict = verify.accept(p.repeat(many, 0), wide.repeat(many, 0), drafts, jnp.ones(many, jnp.int32), keys)
      assert int(verdict.next_token.max()) < 5 and np.any(verdict.accepted == 0) == np.any(p[0, 0, drafts[0, 0]] < q[0, 0, drafts[0, 0]])


def frequencies(p, q, recovery=None):
  """Emitted first tokens of TRIALS rounds through the real `accept`; `recovery`: another role for the recovered token."""
  p, q = jnp.asarray(p), jnp.asarray(q)
  keys = jax.random.split(jax.random.key(11), (TRIALS, 2))
  many = lambda x: jnp.broadcast_to(x, (TRIALS, *x.shape))
  drafts = draw(keys[:, 0], many(q), Role.DRAFT)
  verdict = jax.jit(verify.accept)(many(jnp.stack([p, p])), many(q[None]), drafts[:, None], jnp.ones(TRIALS, jnp.int32), keys)
  recovered = verdict.next_token
  if recovery is not None:
    recovered = draw(
        keys[:, 0], verify.next_distribution(
            many(jnp.stack([p, p])), many(q[None]), jnp.zeros(TRIALS, jnp.int32), jnp.ones(TRIALS)), recovery)
  return np.bincount(jnp.where(verdict.accepted == 1, drafts, recovered), minlength=len(p)) / TRIALS


def test_independent_draws():
  """C17: with the draft's noise reused for the recovery the frequencies would be (0.100, 0.541, 0.358)."""
  p, q = np.array([0.1, 0.6, 0.3], np.float32), np.array([0.6, 0.35, 0.05], np.float32)
  bound = 4 * np.sqrt(p * (1 - p) / TRIALS)
  assert np.all(np.abs(frequencies(p, q) - p) <= bound)
  np.testing.assert_allclose(frequencies(p, q, recovery=Role.DRAFT), [0.100, 0.541, 0.358], atol=0.008)


def test_zero_probabilities():
  """C27: q(x) = 0 with p(x) > 0 stands, p(x) = 0 never does; no NaN."""
  rows = jnp.array([[[0.2, 0.0, 0.8], [1, 0, 0]]])
  q = dense([0.0, 0.0, 1.0])
  assert float(verify.acceptance(rows, q, jnp.array([[0]]))[0, 0]) == 1
  assert float(verify.acceptance(rows, q, jnp.array([[1]]))[0, 0]) == 0
  verdict = verify.accept(rows, q, jnp.array([[1]]), jnp.array([1]), jax.random.split(jax.random.key(0), (1, 2)))
  assert verdict.accepted[0] == 0 and verdict.next_token[0] == 0  # max(p − q, 0) leaves token 0 only.
  same = jnp.array([[[0.5, 0.5], [1, 0]]])
  assert np.all(np.isfinite(verify.next_distribution(same, dense([0.5, 0.5]), jnp.array([0]), jnp.array([1]))))


@pytest.mark.parametrize("placeholder", [-1, 9])
def test_placeholder_drafts(placeholder):
  """C29: K = 4, two real drafts: the rest is never accepted nor an index, and the bonus comes from r2."""
  p = jax.nn.one_hot(jnp.array([[0, 1, 2, 8, 8]]), 9)  # -1 as an index would read token 8 of a row.
  drafts = jnp.array([[0, 1, placeholder, placeholder]])
  q = jax.nn.one_hot(jnp.array([[0, 1, 2, 8]]), 9)
  verdict = verify.accept(p, q, drafts, jnp.array([4]), jax.random.split(jax.random.key(0), (1, 5)))
  assert verdict.accepted[0] == 2 and verdict.next_token[0] == 2


def test_mixed_lengths_and_rows_are_independent():
  """Verified lengths 0 … 3 in one batch: a row's verdict is that of the row alone."""
  key = jax.random.key(5)
  p = jax.nn.softmax(jax.random.normal(key, (4, 4, 7)), -1)
  q = jax.nn.softmax(jax.random.normal(jax.random.fold_in(key, 1), (4, 3, 7)), -1)
  drafts = jax.random.randint(key, (4, 3), 0, 7)
  keys, lengths = jax.random.split(key, (4, 4)), jnp.arange(4)
  whole = verify.accept(p, q, drafts, lengths, keys)
  assert np.all(whole.accepted <= lengths)
  for b in range(4):
    one = verify.accept(p[b : b + 1], q[b : b + 1], drafts[b : b + 1], lengths[b : b + 1], keys[b : b + 1])
    assert (one.accepted[0], one.next_token[0]) == (whole.accepted[b], whole.next_token[b])


def test_two_positions_joint():
  """Two drafts with a path-dependent second p and q: the joint distribution of two emitted tokens is the target's."""
  rng = np.random.default_rng(0)
  p1, p2 = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3), 3)
  q1, q2 = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3), 3)
  joint = np.zeros((3, 3))
  for x, y in itertools.product(range(3), range(3)):
    rows = jnp.asarray([[p1, p2[x], p2[x]]], jnp.float32)
    q = jnp.asarray([[q1, q2[x]]], jnp.float32)
    a1, a2 = (float(v) for v in verify.acceptance(rows, q, jnp.array([[x, y]]))[0])
    after = lambda k, rows=rows, q=q: np.asarray(verify.next_distribution(rows, q, jnp.array([k]), jnp.array([2]))[0])
    weight = q1[x] * q2[x][y]
    joint += weight * (1 - a1) * after(0)[:, None] * p2  # The token after a recovered one is the next round's: exact p.
    joint[x] += weight * a1 * (1 - a2) * after(1)
    joint[x, y] += weight * a1 * a2
  np.testing.assert_allclose(joint, p1[:, None] * p2, atol=1e-6)


def test_wrong_arguments_are_named():
  """C15: there is no acceptance mode that is not exact, and no switch that would allow one."""
  p, q = jnp.ones((1, 2, 3)) / 3, jnp.ones((1, 1, 3)) / 3
  drafts, lengths, keys = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jax.random.split(jax.random.key(0), (1, 2))
  with pytest.raises(ValueError, match="unknown acceptance rule 'typical'"):
    verify.accept(p, q, drafts, lengths, keys, rule="typical")
  with pytest.raises(ValueError, match="need q of as many rows"):
    verify.accept(p, jnp.ones((1, 3, 3)) / 3, drafts, lengths, keys)
  with pytest.raises(ValueError, match=r"p \[B,L\+1,V\]"):
    verify.accept(p[:, :1], q, drafts, lengths, keys)


def test_a_draft_without_a_number_never_stands():
  """q that is NaN: rejected, and the next token comes from the target."""
  p = jnp.asarray([[[0.1, 0.9], [0.5, 0.5]]])
  q = jnp.full((1, 1, 2), jnp.nan)
  drafts = jnp.zeros((1, 1), jnp.int32)
  assert float(verify.acceptance(p, q, drafts)[0, 0]) == 0.0
  np.testing.assert_allclose(verify.next_distribution(p, q, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)), p[:, 0])
