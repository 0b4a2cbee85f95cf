"""The losslessness contracts on whole decoding runs: every kind of drafter, every setting, malformed numbers, stop texts."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import decode, lossless, schedule
from specdec_jax.sampling import distribution, make_sampling
from tests import toys

SMALL = {"vocab": 7, "eos": ()}
PROMPTS = [[(7 * i + j * j) % 59 for j in range(2 + 3 * i)] for i in range(4)]


def drafters(target, mask_id):
  """One of every kind of q: dense and path-dependent, sparse over candidates, serial, over a reduced vocabulary, one-hot."""
  vocab = target.config.vocab
  block = lambda **options: toys.block_drafter(target, mask_id=mask_id, **{"block": 3, **options})
  return {
      "markov": block(), "rnn": block(head="rnn"), "no head": block(head="none", rank=0, confidence=False),
      "selector": block(head="selector", candidates=4, own_embedding=False, anchor_predicts=False, conv=2),
      "eagle3": toys.serial_drafter(target, "eagle3", steps=3), "mtp": toys.serial_drafter(target, "mtp", steps=2),
      "reduced vocabulary": toys.serial_drafter(target, "eagle3", steps=3, draft_vocab=vocab // 2),
      "one-hot": toys.scripted(np.tile(np.arange(128) % vocab, (2048, 1)), 3)}


KINDS = ("markov", "rnn", "no head", "selector", "eagle3", "mtp", "reduced vocabulary", "one-hot")


def some(*quick):
  """All kinds, those that are not `quick` for `make test-slow`."""
  return [k if k in quick else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_the_targets(kind, rule):
  """Contract 3: the first two tokens of many requests against the enumerated distribution, settings on."""
  target = toys.target(**SMALL)
  prompt, n, settings = [1, 2, 3], 2048, {"top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}
  sampling = lambda count: make_sampling(count, 7, 0.8, prompts=[prompt] * count, **settings)
  p1 = np.asarray(distribution(target.forward([prompt]).logits[:, -1], sampling(1))[0])
  after = target.forward([[*prompt, v] for v in range(7)]).logits[:, -1]
  p2 = np.asarray(distribution(after, sampling(7).after(jnp.arange(7)[:, None], 1)))
  expected = p1[:, None] * p2
  done = specdec_jax.generate(
      target, drafters(target, 6)[kind], [prompt] * n, 3, temperature=0.8, seed=list(range(n)), rule=rule, **settings)
  counts = np.zeros((7, 7))
  for c in done:
    counts[c.tokens[0], c.tokens[1]] += 1
  assert sum(a for c in done for _, a, _ in c.rounds) > 100, "some drafts should stand"
  bound = 4.5 * np.sqrt(expected * (1 - expected) / n)
  assert np.all(np.abs(counts / n - expected) <= bound + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_under_settings(kind):
  """Contract 1 with every setting that acts on greedy text, another one a request, and its effect on the text."""
  target = toys.target()
  first = specdec_jax.generate(target, None, PROMPTS[:1], 24, ignore_eos=True)[0].tokens
  settings = {
      "repetition_penalty": [1.0, 1.3, 1.0, 1.0], "frequency_penalty": [0.0, 0.0, 0.7, 0.0], "presence_penalty": [0.0, 0.0, 0.3, 0.0],
      "logit_bias": [{3: 4.0}, None, None, {9: -2.0}], "banned": [first[:1], None, [0, 1], None],
      "allowed": [None, None, None, list(range(5, 40))]}
  run = lambda d, **kw: [c.tokens for c in specdec_jax.generate(target, d, PROMPTS, 24, ignore_eos=True, **kw)]
  drafter = drafters(target, 59)[kind]
  drafter = dataclasses.replace(drafter, params=drafter.params[:4]) if kind == "one-hot" else drafter
  with_settings = run(None, **settings)
  assert run(drafter, **settings) == with_settings
  if kind == "selector":
    plain = run(None)
    assert all(a != b for a, b in zip(plain, with_settings))
    assert first[0] not in with_settings[0] and not {0, 1} & set(with_settings[2]) and set(with_settings[3]) <= set(range(5, 40))
    repeats = lambda tokens: len(tokens) - len(set(tokens))
    assert repeats(with_settings[1]) < repeats(plain[1]) and repeats(with_settings[2]) < repeats(plain[2])
    for prompt, tokens, i in zip(PROMPTS, with_settings, range(4)):  # The same text from whole passes, one by one.
      mine = {k: v[i] for k, v in settings.items()}
      mine = {k: [v] if isinstance(v, (list, dict)) else v for k, v in mine.items()}
      assert lossless.teacher_force(target, prompt, tokens, **mine).gap.max() < lossless.FLOAT32_NOISE


@pytest.mark.slow
def test_masks_and_logprobs():
  """One allowed id leaves no choice; a drafter that cannot draft it drafts nothing; log-probabilities stay the target's."""
  target = toys.target()
  drafter = drafters(target, 59)["reduced vocabulary"]
  outside = next(i for i in range(61) if i not in np.asarray(drafter.params["draft_ids"]))
  for d in (None, drafter):
    for temperature in (0.0, 1.0):
      done = specdec_jax.generate(target, d, PROMPTS[:2], 5, temperature, allowed=[[outside], None], logprobs=True)
      assert done[0].tokens == [outside] * 5 and done[0].finish_reason == "length" and not done[0].error
      assert {drafted for drafted, _, _ in done[0].rounds} == {0}
      forced = lossless.teacher_force(target, PROMPTS[0], done[0].tokens, 1.0)
      np.testing.assert_allclose(done[0].logprobs, forced.log_p, atol=1e-4)


@pytest.mark.parametrize("settings, message", [
    ({"banned": list(range(61))}, "request 0 may emit no token"), ({"allowed": []}, "may emit no token"),
    ({"banned": [61]}, "outside the vocabulary of 61"), ({"logit_bias": {1: float("nan")}}, "logit_bias of request 0 is nan for id 1"),
    ({"allowed": [[1], [2], [3]]}, "allowed has 3 entries for 2 requests"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be from"), ({"min_p": 1.5}, "min_p must be from"),
    ({"presence_penalty": [1.0] * 3}, "3 values for 2")], ids=str)
def test_wrong_settings_are_named(settings, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(toys.target(), None, PROMPTS[:2], 4, **settings)


def spoiled(params, token):
  """`params` with the embedding of one token NaN."""
  return {**params, "embedding": params["embedding"].at[token].set(jnp.nan)}


@pytest.mark.parametrize("kind, temperature", [
    ("selector", 1.0), *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        ("markov", 0.0), ("markov", 1.0), ("selector", 0.0), ("eagle3", 0.0), ("eagle3", 1.0)))])
def test_malformed_numbers_end_their_row(kind, temperature):
  """NaN after a token that one request emits: it ends there with its own error; its mates' texts do not change."""
  target = toys.target()
  drafter = drafters(target, 59)[kind]
  run = lambda t, d: specdec_jax.generate(t, d, PROMPTS, 24, temperature, seed=[1, 2, 3, 4], ignore_eos=True)
  plain = run(target, None)
  others = {t for c, prompt in zip(plain[1:], PROMPTS[1:]) for t in [*c.tokens, *prompt]} | set(PROMPTS[0])
  at, token = next((i, t) for i, t in enumerate(plain[0].tokens) if t not in others and i > 2)
  broken = dataclasses.replace(target, params=spoiled(target.params, token))
  done = run(broken, None)
  assert done[0].tokens == plain[0].tokens[: at + 1]
  assert (done[0].finish_reason, done[0].error) == (
      "error", f"the target gave no distribution for output token {at + 1} (NaN or infinite numbers)")
  assert [c.tokens for c in done[1:]] == [c.tokens for c in plain[1:]]
  drafted = run(target, drafter)
  others = {t for c in drafted[1:] for t in c.tokens} | {t for prompt in PROMPTS for t in prompt}
  at, token = next((i, t) for i, t in enumerate(drafted[0].tokens) if t not in others and i > 2)
  done = run(broken_target(target, token), dataclasses.replace(drafter, params=spoiled(drafter.params, token)))
  assert done[0].finish_reason == "error" and done[0].tokens == drafted[0].tokens[: at + 1] and "the target" in done[0].error
  for c, whole in zip(done[1:], drafted[1:]):  # A row may draft the token itself; its text is the same up to there.
    assert c.tokens == (whole.tokens if c.error is None else whole.tokens[: len(c.tokens)])
    assert c.error is None or "the drafter gave no distribution" in c.error
  assert sum(c.error is None for c in done[1:]) >= 2


def broken_target(target, token):
  return dataclasses.replace(target, params=spoiled(target.params, token))


def test_a_drafter_of_nan_is_named():
  """A drafter whose weights are NaN drafts nothing that stands, and every request says so instead of running slowly."""
  target = toys.target()
  drafter = drafters(target, 59)["markov"]
  nan = dataclasses.replace(drafter, params={**drafter.params, "final_norm": {"scale": drafter.params["final_norm"]["scale"] * jnp.nan}})
  for temperature in (0.0, 1.0):
    done = specdec_jax.generate(target, nan, PROMPTS, 8, temperature)
    plain = specdec_jax.generate(target, None, PROMPTS, 8, temperature)
    for c, p in zip(done, plain):
      assert c.finish_reason == "error" and "the drafter gave no distribution" in c.error
      assert not any(a for _, a, _ in c.rounds) and (temperature or c.tokens == p.tokens[: len(c.tokens)])


def test_values_that_are_no_numbers():
  """One channel of the value projection NaN: a masked row must not spread it, and its own row must not hide it."""
  target = toys.target()
  layers = target.params["layers"]
  kernel = layers["1"]["attention"]["kv"]["kernel"]
  spoil = kernel.at[:, 0, 1, 3].set(jnp.nan)
  params = {**target.params, "layers": {**layers, "1": {**layers["1"], "attention": {**layers["1"]["attention"], "kv": {"kernel": spoil}}}}}
  for d in (None, drafters(target, 59)["markov"]):
    done = specdec_jax.generate(dataclasses.replace(target, params=params), d, PROMPTS[:2], 4, ignore_eos=True)
    assert all(c.tokens == [] and "the target gave no distribution" in c.error for c in done)


def test_ended_requests_compete_for_nothing():
  """A budget shared by rank: when its neighbours have ended, a request gets all of it."""
  target = toys.target()
  drafter = toys.block_drafter(target, mask_id=59, block=5)
  budget = functools.partial(schedule.by_rank, budget=4)
  done = specdec_jax.generate(target, drafter, PROMPTS[:3], [2, 24, 2], ignore_eos=True, schedule=budget)
  assert {drafted for drafted, _, _ in done[1].rounds[4:]} == {4}


def test_malformed_prompt_ends_before_its_first_token():
  target = toys.target()
  done = specdec_jax.generate(broken_target(target, 58), None, [[58, 1], [1, 2]], 4, ignore_eos=True)
  assert done[0].tokens == [] and done[0].rounds == [] and "output token 0" in done[0].error
  assert done[1].tokens == specdec_jax.generate(target, None, [[1, 2]], 4, ignore_eos=True)[0].tokens


@pytest.mark.parametrize("kind", some())
def test_bfloat16_greedy_text(kind):
  """Contract 2: equal, or apart at a near tie; every position of every text within one bfloat16 step of the best."""
  target = toys.target()
  low = lambda tree: {
      k: low(v) if isinstance(v, dict) else v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in tree.items()}
  half = dataclasses.replace(target, params=low(target.params), dtype="bfloat16")
  drafter = drafters(target, 59)[kind]
  if kind == "one-hot":
    drafter = dataclasses.replace(drafter, params=drafter.params[:4])
  else:
    drafter = dataclasses.replace(drafter, params=low(drafter.params), model=dataclasses.replace(drafter.model, dtype="bfloat16"))
  ours, plain = (specdec_jax.generate(half, d, PROMPTS, 24, ignore_eos=True) for d in (drafter, None))
  assert all(d.near_tie for d in lossless.first_divergences(half, PROMPTS, ours, plain))
  assert lossless.identical(ours, plain) >= 2
  for prompt, c in zip(PROMPTS, ours):
    forced = lossless.teacher_force(half, prompt, c.tokens)
    assert np.all(forced.gap <= forced.tie)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["markov", "eagle3"])
def test_windows_and_long_prompts(kind):
  """C49: layers of a sliding window, drafts rejected across its edge; C51: prompts below and beyond the drafter's window, in
  one batch. The texts are those of whole passes without any cache."""
  target = toys.target(windows=(8, None, 8))
  drafter = {
      "markov": toys.block_drafter(target, mask_id=59, block=5), "eagle3": toys.serial_drafter(target, "eagle3", steps=5, window=6)}[kind]
  if kind == "markov":
    c = dataclasses.replace(drafter.config, model=dataclasses.replace(drafter.config.model, windows=(6,)))
    drafter = dataclasses.replace(drafter, config=c, model=dataclasses.replace(drafter.model, config=c))
  prompts = [[(5 * i + 3) % 59 for i in range(n)] for n in (3, 10, 40)]
  plain = specdec_jax.generate(target, None, prompts, 32, ignore_eos=True)
  done = specdec_jax.generate(target, drafter, prompts, 32, ignore_eos=True)
  assert [c.tokens for c in done] == [c.tokens for c in plain]
  assert any(a < d for c in done for d, a, _ in c.rounds) and len({tuple(c.tokens) for c in plain}) == 3
  for prompt, c in zip(prompts, plain):
    assert lossless.teacher_force(target, prompt, c.tokens).gap.max() < lossless.FLOAT32_NOISE
  assert [c.tokens for c in plain] != [c.tokens for c in specdec_jax.generate(
      dataclasses.replace(target, config=toys.target().config, decoder=toys.target().decoder), None, prompts, 32, ignore_eos=True)]


@pytest.mark.slow
def test_rows_do_not_hear_their_neighbours():
  """C21, C67: one request's sampled text is the same alone, beside rows that draft nothing or everything, that end early, and in
  another slot; so is every greedy text in a batch of mixed lengths."""
  target = toys.target()
  drafter = toys.block_drafter(target, mask_id=59, block=5)
  prompts = [[(7 * i + j * j) % 59 for j in range(1 + 9 * i)] for i in range(4)]
  run = lambda rows, seeds, caps=24, **kw: [c.tokens for c in specdec_jax.generate(
      target, drafter, [prompts[i] for i in rows], caps, seed=seeds, ignore_eos=True, **kw)]
  order = jnp.arange(4)
  whole = lambda confidence: jnp.full(len(confidence), 5)
  uneven = lambda confidence: jnp.where(order == 1, 5, jnp.where(order == 0, 0, 4))  # By slot, without a look at the drafts.
  assert run(range(4), [1, 7, 3, 4], temperature=1.0, schedule=uneven)[1] == run([1], [7], temperature=1.0, schedule=whole)[0]
  with pytest.raises(ValueError, match="another seed for each request"):
    run(range(4), 7, temperature=1.0, schedule=uneven)
  alone = run([1], [7], temperature=1.0)[0]
  assert run(range(4), [1, 7, 3, 4], caps=[2, 24, 5, 1], temperature=1.0)[1] == alone
  assert run([3, 2, 0, 1], [5, 6, 9, 7], temperature=[0.0, 1.3, 0.7, 1.0])[3] == alone
  assert run([3, 1, 0, 2], 0) == [run([i], 0)[0] for i in (3, 1, 0, 2)]


def test_stop_texts():
  """A stop text ends a request wherever tokens and rounds happen to cut it; the text ends before it, records where it does."""
  target = specdec_jax.load_target("tiny")
  drafter = specdec_jax.load_drafter("tiny/dspark", target)
  prompts = [
      f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"
      for q in ("How many coins are 12 and 30 coins?", "What is a list?")]
  plain = specdec_jax.generate(target, None, prompts, 40, logprobs=True)
  text = plain[0].text
  stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
  assert len(target.tokenizer.encode(stop)) > 1 and stop not in plain[1].text and text.index(stop) > 0
  for d in (None, drafter):
    done = specdec_jax.generate(target, d, prompts, 40, stop=[stop, "never there"], logprobs=True)
    assert (done[0].text, done[0].finish_reason) == (text[: text.index(stop)], "stop")
    n = len(done[0].tokens)
    assert done[0].tokens == plain[0].tokens[:n] and len(done[0].logprobs) == n
    assert stop in target.tokenizer.decode(done[0].tokens) and stop not in target.tokenizer.decode(done[0].tokens[:-1])
    assert sum(e for _, _, e in done[0].rounds) == n - 1 and all(a <= e for _, a, e in done[0].rounds)
    assert (done[1].tokens, done[1].text) == (plain[1].tokens, plain[1].text)
  ends = target.tokenizer.id("<|im_end|>")
  special = specdec_jax.generate(target, None, prompts[:1], 40, stop=["<|im_end|>"], ignore_eos=True, logit_bias={ends: 20.0})[0]
  assert special.tokens[-1] == ends and special.finish_reason == "stop"
  for wrong, message in (([""], "a stop text is empty"), (stop, "give a list"), (["a<|im_end|>"], "holds the special tokens"),
                         ([1.5], "neither a text nor"), ([99999], "neither a text nor")):
    with pytest.raises(ValueError, match=message):
      specdec_jax.generate(target, None, prompts, 4, stop=wrong)


def test_cut_rounds():
  rounds = [(7, 3, 4), (7, 7, 8), (7, 0, 1)]
  assert decode.cut_rounds(rounds, 13) == rounds
  assert decode.cut_rounds(rounds, 6) == [(7, 3, 4), (7, 2, 2)]
  assert decode.cut_rounds(rounds, 4) == [(7, 3, 4)]
  assert decode.cut_rounds(rounds, 0) == []


@pytest.mark.slow
def test_two_samples_tell_apart():
  """The test of samples sees another temperature and does not see another seed."""
  target = toys.target()
  sample = lambda temperature, start: [c.tokens for c in specdec_jax.generate(
      target, None, [[1, 2, 3]] * 512, 4, temperature, seed=list(range(start, start + 512)), ignore_eos=True)]
  plain = sample(1.0, 0)
  same, other = (lossless.two_samples(x, plain, 4) for x in (sample(1.0, 1000), sample(0.4, 1000)))
  assert min(same.p_value) > 1e-3 and min(other.p_value) < 1e-9
  assert max(same.total_variation) < 1.5 * max(same.noise_floor) and max(other.total_variation) > 1.5 * max(other.noise_floor)
