"""The compiled loop: greedy equality with any drafts, seeds, ties, stops and caps, errors a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import decode
from specdec_jax.sampling import Role, distribution, make_sampling, next_token
from specdec_jax.schedule import by_threshold
from tests import toys

PROMPTS = [[(7 * i + j * j) % 59 for j in range(2 + 3 * i)] for i in range(8)]
NEW = 64


def reference(target, prompt, count):
  """Greedy continuation by whole forward passes: no cache, no loop, no drafter."""
  tokens = list(prompt)
  padded = np.zeros((1, 128), np.int32)
  for _ in range(count):
    padded[0, : len(tokens)] = tokens
    tokens.append(int(jnp.argmax(target.forward(padded).logits[0, len(tokens) - 1])))
  return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def plain():
  """Target-only greedy texts of PROMPTS, end of sequence ignored."""
  return [c.tokens for c in specdec_jax.generate(toys.target(), None, PROMPTS, NEW, ignore_eos=True)]


def script(plain, change):
  """A script [B,S] of the true texts by position, changed at the new tokens by `change`."""
  out = np.zeros((len(PROMPTS), 128), np.int64)
  for row, prompt, text in zip(out, PROMPTS, plain):
    row[: len(prompt)] = prompt
    row[len(prompt) : len(prompt) + NEW] = change(np.array(text))
  return out


def test_target_only_equals_whole_forward_passes(plain):
  target = toys.target()
  for prompt, text in zip(PROMPTS[:3], plain):
    assert text[:20] == reference(target, prompt, 20)
  assert len({tuple(t) for t in plain}) == len(PROMPTS), "the toy's texts should differ"


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_greedy_equality_whatever_is_drafted(plain, gamma):
  """C25: drafts forced to be right, wrong, random or placeholders; the text is the target's own."""
  rng = np.random.default_rng(gamma)
  target = toys.target()
  changes = {
      "right": lambda t: t, "wrong": lambda t: (t + 1) % 61,
      "random": lambda t: np.where(rng.random(len(t)) < 0.6, t, rng.integers(0, 61, len(t))),
      "placeholder": lambda t: np.where(rng.random(len(t)) < 0.7, t, -1)}
  for name, change in changes.items():
    done = specdec_jax.generate(target, toys.scripted(script(plain, change), gamma), PROMPTS, NEW, ignore_eos=True)
    assert [c.tokens for c in done] == plain, name
    rounds = done[0].rounds
    assert sum(e for _, _, e in rounds) == NEW - 1
    if name == "placeholder":
      assert {d for d, _, _ in rounds} > {0}  # Placeholders are no drafts.
    if name == "right":
      assert all(a == d for d, a, _ in rounds[:-1])
    if name == "wrong":
      assert all(a == 0 and e == 1 for _, a, e in rounds)


@pytest.mark.parametrize("options", [{}, {"block": 1, "taps": (-1, 1)}], ids=str)
def test_greedy_equality_block_drafter(plain, options):
  """C25 with the real block drafter; alone, in a batch, with short drafts, scheduled, layers stacked."""
  target = toys.target()
  drafter = toys.block_drafter(target, **options)
  run = lambda t, prompts, **kw: [c.tokens for c in specdec_jax.generate(t, drafter, prompts, NEW, ignore_eos=True, **kw)]
  assert run(target, PROMPTS) == plain
  if options:
    return
  assert run(target, PROMPTS, draft_length=2) == plain
  assert run(target, PROMPTS[3:4]) == plain[3:4]
  assert run(toys.target(stacked=True), PROMPTS) == plain
  half = specdec_jax.generate(target, drafter, PROMPTS, NEW, ignore_eos=True, schedule=functools.partial(by_threshold, threshold=0.3))
  assert [c.tokens for c in half] == plain
  assert len({d for c in half for d, _, _ in c.rounds}) > 1, "the threshold should cut some blocks"


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), pytest.param("block", marks=pytest.mark.slow), "sparse"])
def test_seed_belongs_to_the_request(kind):
  """C19: alone, in slot 3 of a batch, beside others that end at other times: the same sampled tokens."""
  target = toys.target()
  drafter = {"none": None, "block": toys.block_drafter(target), "sparse": toys.scripted(np.tile(np.arange(128) % 61, (4, 1)), 3)}[kind]
  one = dataclasses.replace(drafter, params=drafter.params[3:]) if kind == "sparse" else drafter
  sample = lambda d, prompts, seeds, **kw: specdec_jax.generate(target, d, prompts, 40, temperature=1.0, seed=seeds, ignore_eos=True, **kw)
  alone = sample(one, PROMPTS[3:4], [7])[0].tokens
  crowd = sample(drafter, PROMPTS[:4], [1, 2, 3, 7])[3].tokens
  assert alone == crowd
  other = [c.tokens for c in sample(drafter, [PROMPTS[3]] * 4, [7, 8, None, None])]
  assert other[0] == sample(drafter, [PROMPTS[3]] * 4, 7)[2].tokens
  assert len({tuple(t) for t in other}) == 4


def test_exact_ties():
  """C23: the lowest id, also beside a sampled row."""
  logits = jnp.array([[2.0, 2, 1], [2.0, 2, 1]])
  draft = lambda x: next_token(x, make_sampling(len(x), 3), jax.random.split(jax.random.key(0), len(x)), Role.DRAFT)[0].tolist()
  assert draft(logits) == [0, 0]
  assert draft(jnp.array([[1.0, 1, 0]])) == [0]
  for sampling in (make_sampling(2, 3, 0.0), make_sampling(2, 3, [0.0, 1.0])):
    np.testing.assert_array_equal(distribution(logits, sampling)[0], [1, 0, 0])
    np.testing.assert_array_equal(distribution(logits[:, None], sampling)[0, 0], [1, 0, 0])


def test_exact_ties_in_decoding():
  """C23: twin rows of the head tie at every position; the loop, the draft and the verification take the lower id."""
  target = toys.target(vocab=12, eos=())
  kernel = target.params["head"]["kernel"]
  twins = dataclasses.replace(target, params={**target.params, "head": {"kernel": jnp.concatenate([kernel[:6], kernel[:6]])}})
  drafter = toys.block_drafter(target, mask_id=11)
  drafter.params["markov"]["bias"] = jnp.tile(drafter.params["markov"]["bias"][:6], (2, 1))
  drafter = dataclasses.replace(drafter, params={**drafter.params, "head": twins.params["head"]})
  prompts = [[1, 2], [3, 4, 5]]
  plain = specdec_jax.generate(twins, None, prompts, 24)
  assert max(t for c in plain for t in c.tokens) < 6
  for temperature in (0.0, [0.0, 1.0]):
    assert specdec_jax.generate(twins, drafter, prompts, 24, temperature=temperature)[0].tokens == plain[0].tokens


def test_cap_and_stop_in_one_block():
  """C61, and a stop exactly at the cap."""
  limits = lambda cap: decode.Limits(jnp.array([cap]), jnp.array([[99, 98]]))
  cut = lambda block, cap, emitted=0: [
      int(x[0]) for x in decode.cut(jnp.array([block]), jnp.array([len(block)]), jnp.array([emitted]), limits(cap))]
  assert cut([10, 11, 99, 20, 21, 22], 5) == [3, decode.STOP]
  assert cut([10, 11, 12, 13, 14, 99], 5) == [5, decode.LENGTH]
  assert cut([10, 11, 12, 13, 99, 14], 5) == [5, decode.STOP]
  assert cut([10, 98, 99], 9) == [2, decode.STOP]  # Either of two ids.
  assert cut([10, 11], 9, emitted=6) == [2, decode.RUNNING]
  assert cut([10, 11], 9, emitted=8) == [1, decode.LENGTH]


@pytest.mark.parametrize("gamma", [1, 4])
def test_stops_in_every_place(plain, gamma):
  """C63: end of sequence drafted and rejected, drafted and accepted, recovered, bonus, first token; two ids; ignored."""
  target, prompt, text = toys.target(), PROMPTS[4:5], plain[4]
  cut_at = lambda ids: next((i + 1 for i, t in enumerate(text) if t in ids), NEW)
  right, wrong = (script(plain, f)[4:5] for f in (lambda t: t, lambda t: (t + 1) % 61))
  for rows in (right, wrong):  # Accepted or bonus, and recovered.
    for stop in ([text[9]], [text[10]], [text[11]], [text[13], text[30]], [text[0]]):
      done = specdec_jax.generate(target, toys.scripted(rows, gamma), prompt, NEW, stop=stop, ignore_eos=True)[0]
      assert (done.tokens, done.finish_reason) == (text[: cut_at(stop)], "stop")
      assert sum(e for _, _, e in done.rounds) == len(done.tokens) - 1
  assert done.rounds == []  # text[0] is the prefill's token: no round at all.
  absent = next(t for t in range(61) if t not in text)
  drafted = np.where(wrong >= 0, absent, wrong)  # A stop that is drafted everywhere and always rejected.
  done = specdec_jax.generate(target, toys.scripted(drafted, gamma), prompt, NEW, stop=[absent], ignore_eos=True)[0]
  assert (done.tokens, done.finish_reason) == (text, "length")
  owner = dataclasses.replace(target, config=dataclasses.replace(target.config, eos=(text[12],)))
  assert specdec_jax.generate(owner, toys.scripted(right, gamma), prompt, NEW)[0].tokens == text[: cut_at([text[12]])]
  assert specdec_jax.generate(owner, toys.scripted(right, gamma), prompt, NEW, ignore_eos=True)[0].tokens == text


def test_committed_counts_of_cut_rounds(plain):
  """C111: a perfect drafter under a cap of 3: one round that commits 2."""
  drafter = toys.scripted(script(plain, lambda t: t), 4)
  done = specdec_jax.generate(toys.target(), drafter, PROMPTS, 3, ignore_eos=True)
  assert [c.rounds for c in done] == [[(4, 2, 2)]] * 8


def test_mask_id_as_a_real_token(plain):
  """C65: the target's own text may hold the drafter's mask id; lengths are counters."""
  target = toys.target()
  text = plain[2]
  drafter = toys.block_drafter(target, mask_id=text[1])
  done = specdec_jax.generate(target, drafter, PROMPTS[2:3], NEW, ignore_eos=True)[0]
  assert done.tokens == text and text[1] in done.tokens


def test_logprobs_are_the_targets(plain):
  target = toys.target()
  for drafter in (None, toys.block_drafter(target)):
    done = specdec_jax.generate(target, drafter, PROMPTS[:2], 12, ignore_eos=True, logprobs=True)
    for prompt, c in zip(PROMPTS, done):
      whole = jax.nn.log_softmax(target.forward([prompt + c.tokens]).logits[0], -1)
      expected = [whole[len(prompt) - 1 + i, t] for i, t in enumerate(c.tokens)]
      np.testing.assert_allclose(c.logprobs, expected, atol=1e-4)


def test_rewound_caches_equal_a_fresh_prefill(plain):
  """C47, invariant 4: after mixed accepted counts the caches of target and drafter equal those of the committed text."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  method = decode.make_method(target, drafter, None, "fixed", "token", False)
  sampling = make_sampling(2, 61)
  limits = decode.Limits(jnp.array([40, 40]), jnp.array([[-1], [-1]]))
  lengths = jnp.array([5, 8])
  prompts = jnp.asarray(np.array([PROMPTS[1] + [0] * 11, PROMPTS[2] + [0] * 8]), jnp.int32)
  state = decode.init_state(method, 2, 64)
  state, output = decode.prefill(method, target.params, drafter.params, state, prompts, lengths, sampling, limits)
  texts = [output.tokens[b, :1].tolist() for b in range(2)]
  step, extend = jax.jit(decode.decode_round, static_argnums=0), jax.jit(drafter.model.extend)
  whole = jax.jit(lambda *args: target.decoder.apply({"params": target.params}, *args, taps=method.taps))
  for _ in range(4):
    state, output, _ = step(method, target.params, drafter.params, state, sampling, limits)
    for text, new, count in zip(texts, output.tokens, output.count):
      text += new[:count].tolist()
  for b in range(2):
    text = PROMPTS[1 + b] + texts[b][:-1]
    assert state.cache.lengths[b] == state.drafter.lengths[b] == len(text)
    _, taps, cache = whole(jnp.array([text]), target.init_cache(1, 64))
    fresh = extend(drafter.params, drafter.model.init_state(1, 64), taps, None, jnp.arange(len(text))[None], jnp.array([len(text)]))
    for mine, theirs in ((state.cache, cache), (state.drafter, fresh)):
      for x, y in zip(mine.keys, theirs.keys):
        np.testing.assert_allclose(x[b, ..., : len(text)], y[0, ..., : len(text)], atol=1e-5)
      for x, y in zip(mine.values, theirs.values):
        np.testing.assert_allclose(x[b, :, : len(text)], y[0, :, : len(text)], atol=1e-5)


def test_draft_lengths_by_request(plain):
  """C41: one compilation for all lengths; a request without drafts has none, and no text changes."""
  target = toys.target()
  drafter, wanted = toys.block_drafter(target), [0, 1, 2, 3, 4, 5, 0, 3]
  run = lambda lengths: specdec_jax.generate(target, drafter, PROMPTS, NEW, draft_length=lengths, ignore_eos=True)
  done = run(wanted)
  assert [c.tokens for c in done] == plain
  assert [{d for d, _, _ in c.rounds} for c in done] == [{n} for n in wanted]
  before = decode.compiled()
  assert [c.tokens for c in run(wanted[::-1])] == plain and decode.compiled() == before
  for wrong in ([1] * 7, [6] * 8, [-1] * 8, [0.5] * 8):
    with pytest.raises(ValueError, match="draft_length must be 8 integers from 0 to 5"):
      run(wrong)


def test_bad_prompts_leave_their_mates_alone(plain):
  target = toys.target()
  prompts = [PROMPTS[0], [], [1] * 250, [61], PROMPTS[4], PROMPTS[5]]
  for drafter in (None, toys.block_drafter(target)):
    done = specdec_jax.generate(target, drafter, prompts, [NEW] * 5 + [0], ignore_eos=True)
    assert [done[0].tokens, done[4].tokens] == [plain[0], plain[4]]
    assert [c.finish_reason for c in done] == ["length", "error", "error", "error", "length", "error"]
    assert not any(c.tokens for c in done if c.error) and "prompt 5 asks for 0 new tokens" in done[5].error
    assert "prompt 1 is empty" in done[1].error
    assert "prompt 2 of 250 tokens and 64 new ones" in done[2].error
    assert "outside the vocabulary of 61: [61]" in done[3].error


def test_wrong_settings_are_named():
  target = toys.target()
  drafter = toys.block_drafter(target, head="none", rank=0, confidence=False)
  run = lambda *args, **kw: specdec_jax.generate(target, *args, **kw)
  for message, call in {
      "prompt 0 is empty": lambda: run(None, [[]]),
      "no prompts": lambda: run(None, []),
      "max_new_tokens must be at least 1": lambda: run(None, [[1]], 0),
      "max_new_tokens must be an integer, or 1 of them": lambda: run(None, [[1]], [4, 4]),
      "give a list of texts": lambda: run(None, "text"),
      "need a drafter": lambda: run(None, [[1]], draft_length=4),
      "do not fit the 256 positions": lambda: run(None, [[1] * 250]),
      "draft_length must be from 1 to 5": lambda: run(drafter, [[1]], draft_length=6),
      "unknown acceptance rule 'typical'": lambda: run(drafter, [[1]], rule="typical"),
      "unknown schedule 'best'": lambda: run(drafter, [[1]], schedule="best"),
      "gives no confidences, so": lambda: run(toys.scripted(np.zeros((1, 9)), 3), [[1]], schedule=lambda c: c),
      "gives no confidences to record": lambda: run(toys.scripted(np.zeros((1, 9)), 3), [[1]], record=True),
      "no tokenizer": lambda: run(None, ["text"]),
      "temperature must be from 0.0": lambda: run(None, [[1]], temperature=-1.0),
      "top_p must be from": lambda: run(None, [[1]], temperature=1.0, top_p=0.0),
      "seed has 2 values for 1 requests": lambda: run(None, [[1]], seed=[1, 2]),
  }.items():
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
      call()


def test_nothing_compiles_twice():
  """The same shapes with other prompts, seeds, caps and stops reuse both executables."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  run = lambda seed: specdec_jax.generate(target, drafter, PROMPTS[:2], 9 + seed, temperature=0.7, seed=seed, stop=[seed])
  run(1)
  before = decode._prefill._cache_size(), decode._decode._cache_size()
  run(2)
  run(3)
  assert (decode._prefill._cache_size(), decode._decode._cache_size()) == before
