"""Targets whose layers differ: gated delta nets beside attention (Qwen3.5), two kinds of attention (Gemma 4)."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import decode
from specdec_jax.models import delta
from specdec_jax.models.decoder import Decoder
from specdec_jax.models.delta import State, Update
from specdec_jax.sampling import make_sampling
from tests import toys

TOKENS = (np.arange(40).reshape(2, 20) * 7 + 3) % 59
PROMPTS = [[(7 * i + j * j) % 59 for j in range(2 + 5 * i)] for i in range(4)]
NEW = 32
FORMS = {"hybrid": toys.HYBRID, "gemma": toys.GEMMA}
both = pytest.mark.parametrize("form", FORMS)


def target(form: str, **changes):
  return toys.target(**FORMS[form], **changes)


@functools.cache
def plain(form: str):
  """Greedy texts of PROMPTS by the target alone."""
  return [c.tokens for c in specdec_jax.generate(target(form), None, PROMPTS, NEW, ignore_eos=True)]


def script(texts, change=lambda t: t):
  out = np.zeros((len(PROMPTS), 128), np.int64)
  for row, prompt, text in zip(out, PROMPTS, texts):
    row[: len(prompt)] = prompt
    row[len(prompt) : len(prompt) + NEW] = change(np.array(text))
  return out


@functools.partial(jax.jit, static_argnums=(0, 5))
def run(decoder, params, tokens, cache=None, segments=None, taps=()):
  return decoder.apply({"params": params}, tokens, cache, segments, taps)


def apply(t, tokens, cache=None, **kw):
  return run(t.decoder, t.params, jnp.asarray(tokens), cache, **kw)


# The recurrence.


def test_toy_recurrence_is_rewound():
  """C55: s = 0.5 s + x, fed anchor and two drafts of 1: what stands after 0, 1 and 2 accepted drafts; 0 rows change nothing."""
  state = State(jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, 1, 1)))
  update = Update(jnp.array([[[5.0], [6.0], [7.0]]]), jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1, 1)), jnp.full((1, 3, 1), np.log(0.5)))
  for rows, memory, last in ((1, 1.0, 5.0), (2, 1.5, 6.0), (3, 1.75, 7.0), (0, 0.0, 0.0)):
    after = state.after(update, jnp.array([rows]))
    np.testing.assert_allclose([after.memory[0, 0, 0, 0], after.inputs[0, 0, 0]], [memory, last], rtol=1e-6)


def token_by_token(q, k, v, beta, decay, memory):
  """The recurrence as it is written: decay, correct, read."""
  out, groups = [], v.shape[2] // q.shape[2]
  q, k = np.repeat(q, groups, 2), np.repeat(k, groups, 2)
  for t in range(q.shape[1]):
    memory = memory * np.exp(decay[:, t])[..., None, None]
    u = beta[:, t, :, None] * (v[:, t] - np.einsum("bnk,bnkv->bnv", k[:, t], memory))
    memory = memory + k[:, t, :, :, None] * u[:, :, None]
    out.append(np.einsum("bnk,bnkv->bnv", q[:, t], memory))
  return np.stack(out, 1), memory


@pytest.mark.parametrize("count", [1, 7, 150])
def test_chunks_equal_the_recurrence(count):
  """Outputs, and the state behind each number of tokens; heads that differ in number and size, and a state to begin with."""
  rng = np.random.default_rng(count)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  q, k = (np.array(delta.unit(normal(2, count, 2, 5))) for _ in range(2))
  v, beta, decay, memory = normal(2, count, 4, 3), rng.random((2, count, 4)), -rng.random((2, count, 4)), normal(2, 4, 5, 3)
  k[:, count // 2] = k[:, 0]  # Keys that come again.
  beta, decay = beta.astype(np.float32), decay.astype(np.float32)
  wanted, _ = token_by_token(q, k, v, beta, decay, memory)
  out, u = jax.jit(delta.delta_rule)(q, k, v, beta, decay, memory)
  np.testing.assert_allclose(out, wanted, atol=2e-5)
  state = State(jnp.zeros((2, 1, 1)), jnp.asarray(memory))
  for rows in {0, 1, count // 2, count}:
    after = state.after(Update(jnp.zeros((2, count, 1)), jnp.asarray(k), u, jnp.asarray(decay)), jnp.array([rows, rows]))
    np.testing.assert_allclose(
        after.memory, token_by_token(*(x[:, :rows] for x in (q, k, v, beta, decay)), memory)[1] if rows else memory, atol=2e-5)


def test_a_state_behind_a_long_call_is_as_exact_as_behind_a_short_one():
  """Decays that add up to thousands: what the last tokens leave must not be a difference of such sums."""
  rng = np.random.default_rng(0)
  k, decay = np.array(delta.unit(rng.standard_normal((1, 2048, 1, 4)))), -rng.gamma(0.5, 10.0, (1, 2048, 2))
  u, memory = rng.standard_normal((1, 2048, 2, 3)), np.zeros((2, 4, 3))
  for t in range(2000):
    memory = memory * np.exp(decay[0, t])[:, None, None] + k[0, t, 0, :, None] * u[0, t][:, None]
  single = lambda x: jnp.asarray(x, jnp.float32)
  state = State(jnp.zeros((1, 1, 1)), jnp.zeros((1, 2, 4, 3)))
  after = state.after(Update(jnp.zeros((1, 2048, 1)), single(k), single(u), single(decay)), jnp.array([2000]))
  np.testing.assert_allclose(after.memory[0], memory, atol=2e-6 * np.abs(memory).max())


def test_packed_texts_longer_than_a_chunk(monkeypatch):
  """Texts in one row, padding around and between them, equal themselves alone; borders in and between chunks."""
  monkeypatch.setattr(delta, "CHUNK", 4)
  t = target("hybrid")
  segments = np.array([[0] * 3 + [1] * 6 + [2] * 7 + [0] * 4])
  in_chunks_of_4 = jax.jit(lambda params: t.decoder.apply({"params": params}, jnp.asarray(TOKENS[:1]), segments=jnp.asarray(segments)))
  row = in_chunks_of_4(t.params)[0][0]
  monkeypatch.setattr(delta, "CHUNK", 64)
  for part in (slice(3, 9), slice(9, 16)):
    np.testing.assert_allclose(row[part], apply(t, TOKENS[:1, part])[0][0], atol=2e-5)


# The cache.


@both
def test_chunks_through_the_cache_equal_one_pass(form):
  t = target(form)
  whole, taps, _ = apply(t, TOKENS, taps=(-1, 0, 2))
  cache, parts, tapped = t.init_cache(2, 32), [], []
  for chunk in np.split(TOKENS, [8, 9, 12], axis=1):
    hidden, found, cache = apply(t, chunk, cache, taps=(-1, 0, 2))
    cache = cache.commit(jnp.full(2, chunk.shape[1]))
    parts.append(hidden)
    tapped.append(found)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=5e-5)
  np.testing.assert_allclose(jnp.concatenate(tapped, 1), taps, atol=2e-5 * float(jnp.abs(taps).max()))


@both
def test_rewound_states_equal_a_fresh_prefill(form):
  """C47, C57: rows of a batch that keep other numbers of the tokens of one verify call, none among them; then the next tokens."""
  t = target(form)
  for kept in ([0, 3], [1, 2], [4, 4]):
    _, _, cache = apply(t, TOKENS[:, :12], t.init_cache(2, 32))
    cache = cache.commit(jnp.array([7, 12]))  # The first one's prompt is padded.
    _, _, cache = apply(t, TOKENS[:, 12:16], cache)
    cache = cache.commit(jnp.array(kept))
    hidden = apply(t, TOKENS[:, 16:], cache)[0]
    for b, (n, k) in enumerate(zip((7, 12), kept)):
      text = np.concatenate([TOKENS[b, :n], TOKENS[b, 12 : 12 + k], TOKENS[b, 16:], TOKENS[b]])[None, :20]
      alone, _, fresh = apply(t, text, t.init_cache(1, 32))
      fresh = fresh.commit(jnp.array([n + k]))
      for x, y in zip(jax.tree.leaves(cache.states), jax.tree.leaves(fresh.states)):
        np.testing.assert_allclose(x[b], y[0], atol=1e-4 * float(jnp.abs(y).max()))
      np.testing.assert_allclose(hidden[b], alone[0, n + k : n + k + 4], atol=1e-4)


def test_a_rejected_row_of_no_numbers_leaves_no_trace():
  """NaN in one drafted row, whatever it does to itself, is neither in rows before it nor in the states they leave."""
  t = target("hybrid")
  table = t.params["embedding"].at[58].set(jnp.nan)
  broken = {**t.params, "embedding": table}
  _, _, cache = apply(t, TOKENS[:, :6], t.init_cache(2, 32))
  cache = cache.commit(jnp.full(2, 6))
  clean, _, after = apply(t, TOKENS[:, 6:10], cache)
  tokens = TOKENS[:, 6:10].copy()
  tokens[0, 2] = 58
  hidden, _, verified = run(t.decoder, broken, jnp.asarray(tokens), cache)
  np.testing.assert_allclose(hidden[0, :2], clean[0, :2], atol=1e-6)
  np.testing.assert_allclose(hidden[1], clean[1], atol=1e-6)
  assert not np.isfinite(hidden[0, 2]).any()
  for x, y in zip(jax.tree.leaves(verified.commit(jnp.array([2, 4])).states), jax.tree.leaves(after.commit(jnp.array([2, 4])).states)):
    np.testing.assert_allclose(x, y, atol=1e-6)


# Decoding.


@both
def test_target_only_equals_whole_forward_passes(form):
  t, tokens = target(form), list(PROMPTS[1])
  for _ in range(12):
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(tokens)] = tokens
    tokens.append(int(jnp.argmax(t.forward(padded).logits[0, len(tokens) - 1])))
  assert tokens[len(PROMPTS[1]) :] == plain(form)[1][:12]
  assert len({tuple(x) for x in plain(form)}) == len(PROMPTS)


@both
def test_greedy_equality_whatever_is_drafted(form):
  """C25, C49: right, wrong and random drafts, past the windows; C57: other numbers of drafts in every row, and rows in another order."""
  t, rng = target(form), np.random.default_rng(0)
  for name, change in {
      "right": lambda x: x, "wrong": lambda x: (x + 1) % 61,
      "random": lambda x: np.where(rng.random(len(x)) < 0.7, x, rng.integers(0, 61, len(x)))}.items():
    done = specdec_jax.generate(t, toys.scripted(script(plain(form), change), 3), PROMPTS, NEW, ignore_eos=True)
    assert [c.tokens for c in done] == plain(form), name
    if name == "right":
      assert all(a == d for c in done for d, a, _ in c.rounds[:-1])
  rows = script(plain(form), lambda x: np.where(rng.random(len(x)) < 0.7, x, 7))
  for order in (np.arange(4), np.array([2, 0, 3, 1])):
    lengths = np.array([0, 2, 1, 3])[order]
    done = specdec_jax.generate(
        t, toys.scripted(rows[order], 3), [PROMPTS[i] for i in order], NEW, draft_length=lengths, ignore_eos=True)
    assert [c.tokens for c in done] == [plain(form)[i] for i in order]
    assert [{d for d, _, _ in c.rounds} for c in done] == [{n} for n in lengths]


@both
def test_greedy_equality_block_drafter(form):
  t = target(form)
  drafter = toys.block_drafter(t)
  assert [c.tokens for c in specdec_jax.generate(t, drafter, PROMPTS, NEW, ignore_eos=True)] == plain(form)


@pytest.mark.slow
def test_states_after_rounds_equal_a_fresh_prefill():
  """C47 in the loop: after rounds of mixed accepted counts, rows that stand still included."""
  t = target("hybrid")
  rng = np.random.default_rng(1)
  drafter = toys.scripted(script(plain("hybrid"), lambda x: np.where(rng.random(len(x)) < 0.6, x, 7))[1:3], 3)
  method = decode.make_method(t, drafter, None, "fixed", "token", False)
  sampling, limits = make_sampling(2, 61), decode.Limits(jnp.array([40, 5]), jnp.array([[-1], [-1]]))
  lengths = jnp.array([len(p) for p in PROMPTS[1:3]])
  prompts = np.zeros((2, 16), np.int32)
  for row, p in zip(prompts, PROMPTS[1:3]):
    row[: len(p)] = p
  state, output = jax.jit(decode.prefill, static_argnums=0)(
      method, t.params, drafter.params, decode.init_state(method, 2, 64), jnp.asarray(prompts), lengths, sampling, limits)
  texts = [output.tokens[b, :1].tolist() for b in range(2)]
  step = jax.jit(decode.decode_round, static_argnums=0)
  for _ in range(6):
    state, output, _ = step(method, t.params, drafter.params, state, sampling, limits)
    for text, new, count in zip(texts, output.tokens, output.count):
      text += new[:count].tolist()
  assert len(texts[1]) == 5 and len(texts[0]) > 8
  n = int(state.cache.lengths[0])
  text = (PROMPTS[1] + texts[0])[:n]
  _, _, cache = apply(t, [text], t.init_cache(1, 64))
  fresh = cache.commit(jnp.array([n]))
  for x, y in zip(jax.tree.leaves(state.cache.states), jax.tree.leaves(fresh.states)):
    np.testing.assert_allclose(x[0], y[0], atol=1e-4 * float(jnp.abs(y).max()))


@pytest.mark.slow
def test_acceptance_does_not_decay():
  """A perfect drafter over 512 tokens: every draft of every round, that is, no error adds up in the states."""
  t = target("hybrid", max_positions=1024)
  text = specdec_jax.generate(t, None, PROMPTS[1:2], 512, ignore_eos=True)[0].tokens
  drafter = toys.scripted(np.array([PROMPTS[1] + text + [0] * 16]), 7)
  done = specdec_jax.generate(t, drafter, PROMPTS[1:2], 512, ignore_eos=True)[0]
  assert done.tokens == text and all(a == d for d, a, _ in done.rounds[:-1])


# The engine.


@pytest.mark.slow
def test_engine_serves_the_solo_texts():
  """Prompts read in chunks, slots re-ordered, rows flattened, a request cancelled, more requests than slots."""
  t = target("hybrid")
  engine = specdec_jax.Engine(
      t, toys.block_drafter(t), slots=4, max_length=64, schedule="fixed", slot_buckets=(2,), buckets={2: (2, 7), 4: (13,)}, reaches=(128,),
      needs=("greedy",), chunk=16)
  assert engine.plan["rewind_bytes"] == 2 * 6 * 4 * (56 + 16 + 24 + 4)  # 2 layers, 6 tokens: inputs, keys, corrections, decays.
  numbers = [engine.submit(p, NEW, ignore_eos=True) for p in PROMPTS]
  extra = engine.submit(PROMPTS[0], NEW)
  for _ in range(5):
    engine.step()
  engine.cancel(extra)
  engine.run()
  assert [engine.result(n).tokens for n in numbers] == plain("hybrid")
  assert engine.result(extra).finish_reason == "cancelled"


def test_flattened_rows_are_the_padded_ones():
  t = target("hybrid")
  drafter = toys.block_drafter(t)
  method = decode.make_method(t, drafter, 3, "fixed", "token", False)
  state, _ = jax.jit(decode.read, static_argnums=0)(
      method, t.params, drafter.params, decode.init_state(method, 3, 32), jnp.array([PROMPTS[1][:6]] * 3), jnp.array([6, 4, 1]))
  state = state.replace(anchor=jnp.array([3, 9, 27]), finish=jnp.array([decode.RUNNING, decode.STOP, decode.RUNNING]))
  made = decode.no_draft(3)
  made = made.replace(proposal=made.proposal.replace(drafts=jnp.arange(9).reshape(3, 3)), lengths=jnp.array([2, 0, 1]))
  verify = jax.jit(decode.verify_draft, static_argnums=(0, 4, 5))
  padded, flat = verify(method, t.params, state, made, None, None), verify(method, t.params, state, made, 6, 10)
  kept = jnp.array([3, 0, 2])
  for b, rows in ((0, 3), (2, 2)):
    np.testing.assert_allclose(flat.logits[b, :rows], padded.logits[b, :rows], atol=5e-5)
  for x, y in zip(jax.tree.leaves(flat.cache.commit(kept).states), jax.tree.leaves(padded.cache.commit(kept).states)):
    np.testing.assert_allclose(x, y, atol=1e-5)


class Forgetful(delta.DeltaNet):
  rewinds = False


class Stuck(Decoder):
  @nn.nowrap
  def mixer(self, i):
    return Forgetful if i in self.config.recurrent else super().mixer(i)


def test_what_cannot_be_rewound_is_refused():
  """C59: at start, naming the layers; features for training may be had."""
  t = target("hybrid")
  stuck = dataclasses.replace(t, decoder=Stuck(t.config, stacked=False))
  for call in (lambda: specdec_jax.generate(stuck, None, PROMPTS), lambda: specdec_jax.Engine(stuck)):
    with pytest.raises(ValueError, match=r"toy cannot be decoded.*Forgetful \(layers 0, 1\)"):
      call()
  np.testing.assert_allclose(stuck.forward(TOKENS, taps=(1,)).taps, t.forward(TOKENS, taps=(1,)).taps, atol=1e-6)


def test_layers_of_several_forms_are_not_stacked():
  t = target("hybrid")
  with pytest.raises(ValueError, match="several forms, so they cannot be stacked"):
    specdec_jax.hub.load.default_layout(t.config, True, None)
  assert specdec_jax.hub.load.default_layout(t.config, None, None)[0] is False
  assert dataclasses.replace(t.config, recurrent=(), delta=None).uniform
