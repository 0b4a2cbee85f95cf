"""Losslessness by enumeration: every kind of q, every kind of schedule, both rules; and every classic mistake is caught."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from specdec_jax import verify
from specdec_jax.sampling import Role, adjusted, distribution, draw, make_sampling
from specdec_jax.schedule import by_threshold
from tests import enumeration
from tests.enumeration import VOCAB, emitted, error, outcomes, random_model, round_error, tables

P = random_model(1)
CAUGHT = 2e-3  # How far a mistake must move some probability to count as seen; what is right stays within 1e-6.


def one_hot(model):
  """Always the best id: a greedy drafter."""
  return lambda prefix: np.eye(VOCAB)[np.argmax(model(prefix))]


Q = random_model(101, 0.5)
KINDS = {  # What drafts are drawn from, and how verification is told.
    "dense": (Q, False), "sparse": (Q, True), "two candidates": (random_model(102, support=2), True),
    "one-hot": (one_hot(Q), False), "one-hot, sparse": (one_hot(Q), True),
    "reduced vocabulary": (lambda prefix: np.array([0.0, *random_model(103, vocab=2, support=2)(prefix)]), False),
    "the same as p": (P, False), "path-independent": (lambda prefix: Q(()), False)}


def confident(prefix):
  """Whether the next draft is verified, by a threshold on the survival of confidences that know the drafts before theirs."""
  c = jnp.asarray([[0.55 + 0.4 * np.random.default_rng([9, *prefix[:k]]).random() for k in range(len(prefix) + 1)]])
  return int(by_threshold(c, 0.4)[0]) > len(prefix)


SCHEDULES = {
    "all": None, "none": lambda prefix: False, "two": lambda prefix: len(prefix) < 2,
    "by earlier drafts": lambda prefix: sum(prefix) % 3 != 1, "threshold on survival": confident}


@pytest.mark.parametrize("rule", verify.RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind, rule):
  """Three positions emitted by a round of two drafts, four by one of three, under every schedule."""
  q, sparse = KINDS[kind]
  for depth in (2, 3):
    for schedule in SCHEDULES.values():
      assert round_error(P, tables(P, q, depth, sparse, schedule), rule) < 1e-6


@pytest.mark.parametrize("rule", verify.RULES)
def test_exact_at_depth_four(rule):
  for seed in range(2):
    p, q = random_model(seed), random_model(seed + 50, 0.5)
    assert round_error(p, tables(p, q, 4, False, SCHEDULES["by earlier drafts"]), rule) < 1e-6


def filtered(seed, **settings):
  """(the model of random logits under sampling settings, the logits [V] of a prefix)."""
  logits = functools.cache(lambda prefix: np.random.default_rng([seed, *prefix]).normal(size=(1, VOCAB)).astype(np.float32))

  @functools.cache
  def at(prefix):
    sampling = make_sampling(1, VOCAB, prompts=[[1]], **settings)
    return np.asarray(distribution(logits(prefix), sampling.after(jnp.asarray([prefix], jnp.int32).reshape(1, -1), len(prefix)))[0])

  return at, logits


SETTINGS = {
    "temperature": {"temperature": 0.6}, "top-k": {"temperature": 1.0, "top_k": 2}, "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.3}, "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.4},
    "bias": {"temperature": 1.0, "logit_bias": {0: 1.0}}, "banned": {"temperature": 1.0, "banned": [2]},
    "allowed": {"temperature": 1.0, "allowed": [0, 2]},
    "greedy": {"temperature": 0.0}, "greedy with penalty": {"temperature": 0.0, "presence_penalty": 2.0}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_exact_under_settings(settings):
  """The rows of a block processed at once, each with the block's earlier drafts counted, judge as one by one."""
  stale = []
  for seed in range(3, 13, 2):
    (p, logits), (q, _) = filtered(seed, **settings), filtered(seed + 1, **settings)
    t = tables(p, q, 2)
    rows = jnp.asarray(np.array([[logits(tuple(map(int, x[:k])))[0] for k in range(3)] for x in t.paths]))
    sampling = make_sampling(len(t.paths), VOCAB, prompts=[[1]] * len(t.paths), **settings)
    together = distribution(rows, sampling.along(jnp.asarray(t.paths)))
    np.testing.assert_allclose(together, t.p, atol=1e-6)
    for rule in verify.RULES:
      assert round_error(p, t, rule) < 1e-6
    at_start = distribution(rows, sampling)  # Mutant: the counts of the block's start for all its rows.
    stale.append(error(emitted(p, t, *outcomes(at_start, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths), "token")), p))
  assert (max(stale) > CAUGHT) == ("penalty" in str(settings))


def run(t, rule="token"):
  return tuple(map(np.asarray, outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths), rule)))


def first_token_from(path, prefix, n, size):
  """What follows when a recovered token and then a bonus are emitted: the bonus reads the row of the rejected draft."""
  if len(prefix) == size:
    return np.ones(())
  drafted = (*map(int, path[:n]), int(path[n])) if n < len(path) else prefix
  return np.stack([P(drafted)[v] * enumeration.rest(P, (*prefix, v), size) for v in range(VOCAB)])


def mutant(name, t):
  """(chance, after, follows) of one mistake."""
  chance, after = run(t)
  depth = t.paths.shape[1]
  p, q = np.asarray(t.p), np.pad(t.q, ((0, 0), (0, 1), (0, 0)))
  rejected = np.arange(depth + 1) < t.lengths[:, None]
  norm = lambda x: x / np.maximum(x.sum(-1, keepdims=True), 1e-9)
  at = np.take_along_axis(p[:, :depth], t.paths[..., None], -1)[..., 0]
  own = np.take_along_axis(q[:, :depth], t.paths[..., None], -1)[..., 0]

  def token_rule(keep):
    keep = np.where(np.arange(depth) < t.lengths[:, None], keep, 0.0)
    return np.concatenate([np.ones((len(p), 1)), np.cumprod(keep, 1)], 1) * (1 - np.pad(keep, ((0, 0), (0, 1))))

  if name == "recovery from p":
    return chance, np.where(rejected[..., None], p, after), None
  if name == "residual restricted to the candidates":
    return chance, np.where(rejected[..., None], norm(np.maximum(p - q, 0) * (q > 0) + 1e-9 * (q > 0)), after), None
  if name == "residual of absolute differences":
    return chance, np.where(rejected[..., None], norm(np.abs(p - q)), after), None
  if name == "everything accepted":
    return token_rule(np.ones_like(at)), after, None
  if name == "accepted by p alone":
    return token_rule(at), after, None
  if name == "ratio upside down":
    return token_rule(np.minimum(1, own / np.maximum(at, 1e-9))), after, None
  if name == "bonus from the row before":
    return chance, np.where(rejected[..., None], after, np.concatenate([p[:, :1], p[:, :-1]], 1)), None
  if name == "recovery where the schedule cut":
    return chance, np.where(
        (np.arange(depth + 1) == t.lengths[:, None])[..., None] & (t.lengths < depth)[:, None, None],
        norm(np.maximum(p - q, 0)), after), None
  if name == "bonus and recovery both emitted":
    return chance, after, first_token_from
  raise KeyError(name)


MUTANTS = (
    "recovery from p", "residual restricted to the candidates", "residual of absolute differences", "everything accepted",
    "accepted by p alone", "ratio upside down", "bonus from the row before", "recovery where the schedule cut",
    "bonus and recovery both emitted")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
  """Each classic mistake, made on purpose, moves the emitted distribution by far more than the tolerance."""
  t = tables(P, KINDS["two candidates"][0], 2, length=SCHEDULES["by earlier drafts"])
  assert error(emitted(P, t, *run(t)), P) < 1e-6
  chance, after, follows = mutant(name, t)
  assert error(emitted(P, t, chance, after, follows), P) > CAUGHT


@pytest.mark.parametrize("mistake, drawn, told", [
    ("q before filtering", {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0}),
    ("temperature of the draw alone", {"temperature": 0.5}, {"temperature": 1.0}),
    ("temperature of the ratio alone", {"temperature": 1.0}, {"temperature": 0.5}),
    ("penalty of the draw alone", {"temperature": 1.0, "presence_penalty": 1.5}, {"temperature": 1.0})])
@pytest.mark.parametrize("rule", verify.RULES)
def test_mutant_q_is_caught(mistake, drawn, told, rule):
  """Verification is told another q than the drafts were drawn from."""
  p, q, other = filtered(3, **drawn)[0], filtered(4, **drawn)[0], filtered(4, **told)[0]
  assert round_error(p, tables(p, q, 2), rule) < 1e-6
  assert round_error(p, tables(p, q, 2, claimed=other), rule) > CAUGHT


@pytest.mark.parametrize("rule", verify.RULES)
def test_peeking_schedule_is_caught(rule):
  """Mutant: a draft is dropped for what it is."""
  t = tables(P, Q, 2)
  peeking = np.where(t.paths[:, 0] == 1, 0, np.where(t.paths[:, 1] == 1, 1, 2)).astype(np.int32)
  chance, after = outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(peeking), rule)
  assert error(emitted(P, t, chance, after), P) > CAUGHT


@pytest.mark.parametrize("name", ["scale left out of the residual", "carried mass as the chance to stand"])
def test_block_mutant_is_caught(name):
  errors = []
  for seed in range(4):
    p, t = random_model(seed), tables(random_model(seed), random_model(seed + 20, 0.5), 2)
    chance, after = run(t, "block")
    assert error(emitted(p, t, chance, after), p) < 1e-6
    if name == "scale left out of the residual":
      after = np.stack([verify.next_distribution(t.p, t.claimed, jnp.full(len(t.paths), n), jnp.asarray(t.lengths)) for n in range(3)], 1)
    else:
      _, scales = map(np.asarray, verify.block_acceptance(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths)))
      chance = np.stack([(1 - scales[:, 1]) * (1 - scales[:, 2]), scales[:, 1] * (1 - scales[:, 2]), scales[:, 2]], 1)
    errors.append(error(emitted(p, t, chance, after), p))
  assert max(errors) > CAUGHT


def test_shared_noise_is_caught():
  """Mutant: the recovered token drawn with the draft's key. Frequencies, since noise has no enumeration (C17)."""
  n, p, q = 40_000, jnp.array([0.1, 0.6, 0.3]), jnp.array([0.6, 0.35, 0.05])
  many = lambda x: jnp.broadcast_to(x, (n, *x.shape))
  keys = jax.random.split(jax.random.key(11), (n, 2))
  drafts = draw(keys[:, 0], many(q), Role.DRAFT)
  verdict = jax.jit(verify.accept)(many(jnp.stack([p, p])), many(q[None]), drafts[:, None], jnp.ones(n, jnp.int32), keys)
  residual = verify.next_distribution(many(jnp.stack([p, p])), many(q[None]), jnp.zeros(n, jnp.int32), jnp.ones(n))
  share = lambda recovered: np.bincount(jnp.where(verdict.accepted == 1, drafts, recovered), minlength=3) / n
  bound = 4 * np.sqrt(p * (1 - p) / n)
  assert np.all(np.abs(share(verdict.next_token) - p) <= bound)
  assert np.abs(share(draw(keys[:, 0], residual, Role.DRAFT)) - p).max() > 5 * bound.max()


def test_block_rule_is_never_shorter():
  """Expected accepted drafts, also with lengths that a schedule picks; strictly more somewhere."""
  gains = []
  for seed in range(8):
    p, q = random_model(seed), random_model(seed + 100, 0.7)
    for schedule in (None, SCHEDULES["by earlier drafts"]):
      t = tables(p, q, 3, False, schedule)
      gains.append(enumeration.accepted(t, "block") - enumeration.accepted(t, "token"))
  assert min(gains) > -1e-6 and max(gains) > 0.05


@pytest.mark.parametrize("rule, sparse", [("token", True), ("block", False)])
def test_accept_follows_its_probabilities(rule, sparse):
  """The compiled `accept` draws what the enumeration adds up: frequencies of counts and next tokens, at every length."""
  n, depth, at = 10_000, 3, 11
  t = tables(random_model(2), random_model(102, 0.5), depth, sparse)
  many = lambda x: jnp.broadcast_to(jnp.asarray(x)[at], (n, *x.shape[1:]))
  judge = jax.jit(verify.accept, static_argnames="rule")
  for length in range(depth + 1):
    lengths = jnp.full(n, length)
    verdict = judge(
        many(t.p), jax.tree.map(many, t.claimed), many(t.paths), lengths,
        jax.random.split(jax.random.key(length), (n, depth + 1)), rule=rule)
    chance, after = (np.asarray(x)[at] for x in outcomes(t.p, t.claimed, jnp.asarray(t.paths), jnp.full(len(t.paths), length), rule))
    seen = np.zeros((depth + 1, VOCAB))
    np.add.at(seen, (np.asarray(verdict.accepted), np.asarray(verdict.next_token)), 1 / n)
    expected = chance[:, None] * after
    assert np.all(np.abs(seen - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)


def test_equal_distributions_stand_whole():
  """p = q: nothing is ever rejected, and no 0/0 becomes a number."""
  t = tables(P, P, 3)
  stand, scales = verify.block_acceptance(t.p, t.claimed, jnp.asarray(t.paths), jnp.asarray(t.lengths))
  np.testing.assert_allclose(stand, 1.0, atol=1e-5)
  np.testing.assert_allclose(scales, 1.0, atol=1e-5)


@functools.partial(jax.jit, static_argnames=("rule", "by_position"))
def rounds_of_many(seeds, p, q, rule, by_position):
  """The first 5 tokens of many requests, round after round through the real draws and `accept`; p, q [V,V]: by the last token."""
  count, depth = len(seeds), 3
  sampling = make_sampling(1, VOCAB, 1.0).replace(keys=jax.vmap(jax.random.key)(seeds))

  def one_round(_, carry):
    tokens, emitted_so_far, last = carry
    keys = (sampling.position_keys if by_position else sampling.round_keys)(emitted_so_far, depth + 1)
    drafts, x = [], last
    for k in range(depth):
      x = draw(keys[:, k], q[x], Role.DRAFT)
      drafts.append(x)
    drafts = jnp.stack(drafts, 1)
    before = jnp.concatenate([last[:, None], drafts], 1)
    verdict = verify.accept(p[before], q[before[:, :-1]], drafts, jnp.full(count, depth), keys, rule)
    new = jnp.where(jnp.arange(depth + 1) == verdict.accepted[:, None], verdict.next_token[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
    tokens = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice(row, x, (at,)))(tokens, new, emitted_so_far)
    return tokens, jnp.minimum(emitted_so_far + verdict.accepted + 1, 6), verdict.next_token

  start = jnp.zeros((count, 12), jnp.int32), jnp.ones(count, jnp.int32), jnp.zeros(count, jnp.int32)
  return jax.lax.fori_loop(0, 5, one_round, start)[0][:, 1:6]


def test_rounds_together():
  """Five tokens over several rounds, the real draws: exact where no noise comes twice. Mutant: the block rule with keys by output
  position draws and judges again, with the noise that made it stop, what it looked at and did not keep."""
  rng, n = np.random.default_rng(0), 40_000
  p, q = (rng.dirichlet(np.full(VOCAB, 0.7), VOCAB).astype(np.float32) for _ in range(2))
  exact = p[0]
  for _ in range(4):
    exact = exact[..., None] * p.reshape((1,) * (exact.ndim - 1) + (VOCAB, VOCAB))

  def chi_square(rule, by_position):
    tokens = np.asarray(rounds_of_many(jnp.arange(n, dtype=jnp.uint32), p, q, rule, by_position))
    seen = np.bincount(np.ravel_multi_index(tuple(tokens.T), (VOCAB,) * 5), minlength=VOCAB**5)
    often = exact.ravel() * n > 20
    return float(((seen - n * exact.ravel())[often] ** 2 / (n * exact.ravel()[often])).sum() / often.sum())

  right = [chi_square("token", True), chi_square("block", False)]
  assert max(right) < 1.5 and chi_square("block", True) > 10


def test_ids_that_the_target_does_not_have():
  """A drawn id outside the target's vocabulary is rejected like any other, dense and sparse; it is no reason to peek."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.3, 0.4])
  n = 40_000
  keys = jax.random.split(jax.random.key(1), (n, 2))
  many = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (n, *np.shape(x)))
  drafts = draw(keys[:, 0], many(q), Role.DRAFT)[:, None]
  sparse = verify.SparseDistribution(jnp.broadcast_to(jnp.arange(4), (n, 1, 4)), many(q[None]))
  for rule in verify.RULES:
    for told in (many(q[None]), sparse):
      verdict = verify.accept(many(np.stack([p, p])), told, drafts, jnp.ones(n, jnp.int32), keys, rule)
      first = np.bincount(jnp.where(verdict.accepted == 1, drafts[:, 0], verdict.next_token), minlength=3) / n
      assert np.all(np.abs(first - p) <= 4.5 * np.sqrt(p * (1 - p) / n))
  padded = verify.SparseDistribution(jnp.array([[[0, 1, 2, 7], [0, 1, 2, -1]]]), jnp.array([[[0.6, 0.4, 0.0, 0.0], [0.1, 0.2, 0.7, 0.0]]]))
  rows, drafted = jnp.asarray([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]]), jnp.array([[0, 1]])
  dense = jnp.stack([padded.row(jnp.array([k]), 3) for k in range(2)], 1)
  for mine, theirs in zip(verify.block_acceptance(rows, padded, drafted, jnp.array([2])),
                          verify.block_acceptance(rows, dense, drafted, jnp.array([2]))):
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


WIDE = 64
PAIRS = np.stack(np.meshgrid(np.arange(WIDE), np.arange(WIDE), indexing="ij"), -1).reshape(-1, 2).astype(np.int32)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**31), vocab=st.integers(1, WIDE), sharp_p=st.sampled_from([0.02, 0.3, 1.0, 20.0]),
    sharp_q=st.sampled_from([0.02, 0.3, 1.0, 20.0]), length=st.integers(0, 2), rule=st.sampled_from(verify.RULES), sparse=st.booleans())
def test_marginal_is_the_targets(seed, vocab, sharp_p, sharp_q, length, rule, sparse):
  """Any p and q over up to 64 ids, two path-dependent drafts of which 0 to 2 are verified: the first two tokens."""
  rng = np.random.default_rng(seed)

  def rows(count, sharpness):
    out = np.zeros((count, WIDE), np.float32)
    out[:, :vocab] = rng.dirichlet(np.full(vocab, sharpness), count)
    return out / out.sum(-1, keepdims=True, dtype=np.float64).astype(np.float32)

  p1, p2, q1, q2 = rows(1, sharp_p), rows(WIDE, sharp_p), rows(1, sharp_q), rows(WIDE, sharp_q)
  first = PAIRS[:, 0]
  each = lambda x: np.broadcast_to(x, (len(PAIRS), WIDE))
  q = jnp.asarray(np.stack([each(q1[0]), q2[first]], 1))
  if sparse:
    q = verify.SparseDistribution(jnp.broadcast_to(jnp.arange(WIDE - 1, -1, -1), q.shape), q[..., ::-1])
  chance, after = map(np.asarray, outcomes(
      jnp.asarray(np.stack([each(p1[0]), p2[first], p2[first]], 1)), q, jnp.asarray(PAIRS), jnp.full(len(PAIRS), length), rule))
  weight = (q1[0][first].astype(np.float64) * q2[first, PAIRS[:, 1]])[:, None]
  none, one, two = (weight * chance[:, n : n + 1] for n in range(3))
  joint = (none * after[:, 0]).sum(0)[:, None] * p2.astype(np.float64)  # A recovered token; the next one is the next round's.
  np.add.at(joint, first, one * after[:, 1])
  np.add.at(joint, (first, PAIRS[:, 1]), two[:, 0])
  expected = p1[0].astype(np.float64)[:, None] * p2
  np.testing.assert_allclose(joint, expected, atol=1e-6)
  np.testing.assert_allclose(joint.sum(1), p1[0], atol=1e-6)


def test_candidates_are_adjusted_like_the_whole():
  """Scores of candidates under bias and penalties equal those entries of the whole row."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
  sampling = make_sampling(
      2, 9, [1.0, 0.0], repetition_penalty=[1.3, 1.0], presence_penalty=0.4, frequency_penalty=0.2, logit_bias=[{2: 3.0}, None],
      banned=[[4], [0, 1]], prompts=[[3], [5, 6]]).after(jnp.array([[2, 2, 8], [7, 7, 1]]), jnp.array([3, 2]))
  ids = jnp.array([[8, 2, 4, 3], [1, 7, 5, 0]])
  whole = adjusted(logits, sampling)
  np.testing.assert_allclose(adjusted(jnp.take_along_axis(logits, ids, 1), sampling, ids), jnp.take_along_axis(whole, ids, 1))
  assert whole[0, 4] == whole[1, 0] == whole[1, 1] == -jnp.inf
  expected = logits[1, 7] - 0.4 - 2 * 0.2
  np.testing.assert_allclose(whole[1, 7], expected, rtol=1e-6)
  repeated = logits[0, 3] / 1.3 if logits[0, 3] > 0 else logits[0, 3] * 1.3
  np.testing.assert_allclose(whole[0, 3], repeated, rtol=1e-6)
