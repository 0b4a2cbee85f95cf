"""Every drafter kind and every combination of block parts: exact text, training equal to decoding, trainable, publishable."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import specdec_jax
from specdec_jax.config import HEADS, ConfigError, DrafterConfig, drafter_config
from specdec_jax.drafters.heads import BiasHead, SelectorHead
from specdec_jax.drafters.serial import SerialBatch
from specdec_jax.hub import save_target
from specdec_jax.hub.layout import TensorError
from specdec_jax.models.decoder import head_table
from specdec_jax.sampling import make_sampling
from specdec_jax.training import anchors, features, losses
from specdec_jax.training.objective import FROZEN, Objective
from tests import toys

TOKENS = jnp.asarray((np.arange(36).reshape(2, 18) * 11 + 5) % 59, jnp.int32)
SEGMENTS = jnp.asarray([[1] * 10 + [2] * 8, [1] * 13 + [0] * 5], jnp.int32)
ANSWER = SEGMENTS > 0
FEATURES = jax.jit(features.target_features, static_argnums=(0, 4))
OURS = {"own_embedding": False}
SELECTOR = {"head": "selector", "rank": 6, "candidates": 4, **OURS}
BLOCKS = {
    "dflash": {"head": "none", "rank": 0, "confidence": False, "anchor_predicts": False, **OURS},
    "gated": {"head": "gated"}, "rnn + conv": {"head": "rnn", "conv": 2, "conv_group": 8, **OURS},
    "dflash2": {**SELECTOR, "conv": 2, "conv_group": 8, "confidence": False, "anchor_predicts": False},
    "selector + confidence": {**SELECTOR, "confidence": True}, "windowed": {"window": 6}}
SERIAL = {"eagle3": {}, "mtp": {"steps": 1}, "eagle3 reduced, windowed": {"draft_vocab": 40, "window": 3}}


def make(name, target=None):
  target = target or toys.target()
  if name in SERIAL:
    return toys.serial_drafter(target, name.split()[0], **SERIAL[name])
  options = dict(BLOCKS[name])
  window = options.pop("window", None)
  drafter = toys.block_drafter(target, **options)
  if window is None:
    return drafter
  c = dataclasses.replace(drafter.config, model=dataclasses.replace(drafter.config.model, windows=(window,)))
  return dataclasses.replace(drafter, config=c, model=dataclasses.replace(drafter.model, config=c))


QUICK = ("dflash2", "rnn + conv", "eagle3 reduced, windowed")  # Between them every part; the others are slow.


MOST_SLOW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in [*BLOCKS, *SERIAL]]


@pytest.mark.parametrize("name", MOST_SLOW)
def test_text_is_the_targets(name):
  """Greedy: token for token, a batch of mixed lengths. Sampled: a request's tokens do not depend on its neighbours."""
  target, prompts = toys.target(), [[3, 1, 4], [2] * 9, [5, 6, 7, 8, 9]]
  drafter = make(name)
  text = lambda d, p=prompts, **kw: [c.tokens for c in specdec_jax.generate(target, d, p, 20, ignore_eos=True, **kw)]
  assert text(drafter) == text(None)
  crowd = text(drafter, temperature=1.0, seed=[1, 2, 3])
  assert text(drafter, [prompts[2]] * 3, temperature=1.0, seed=3)[1] == crowd[2]


@pytest.mark.parametrize("name", MOST_SLOW)
def test_drafts_come_from_q(name):
  """q sums to 1, holds every draft, and 512 first drafts follow it."""
  target, n = toys.target(), 512
  drafter = make(name)
  model, sampling = drafter.model, make_sampling(n, 61, 1.0, seed=list(range(n)))
  prompt = jnp.broadcast_to(TOKENS[:1, :8], (n, 8))
  taps = target.forward(TOKENS[:1, :8], taps=model.taps).taps
  state = jax.jit(model.extend)(
      drafter.params, model.init_state(n, 24), jnp.broadcast_to(taps, (n, *taps.shape[1:])), prompt,
      jnp.broadcast_to(jnp.arange(8), (n, 8)), jnp.full((n,), 8))
  keys = sampling.position_keys(jnp.zeros((n,), jnp.int32), model.draft_length)
  proposal = jax.jit(model.propose)(drafter.params, state, jnp.full((n,), 7), jnp.full((n,), 8), keys, sampling)
  dense = proposal.q if not hasattr(proposal.q, "ids") else jax.vmap(
      lambda i, p: jnp.zeros((*p.shape[:-1], 61)).at[jnp.arange(len(i))[:, None], i].add(p))(proposal.q.ids, proposal.q.probs)
  np.testing.assert_allclose(dense.sum(-1), 1.0, atol=1e-5)
  assert np.take_along_axis(np.asarray(dense), np.asarray(proposal.drafts)[..., None], -1).min() > 0
  first = np.asarray(dense[0, 0])
  seen = np.bincount(np.asarray(proposal.drafts)[:, 0], minlength=61) / n
  assert 0.5 * np.abs(seen - first).sum() < 2.5 * np.sqrt(np.count_nonzero(first > 1e-4) / (2 * np.pi * n))


@pytest.mark.parametrize("name", ["rnn + conv", "selector + confidence"])
def test_confidence_does_not_know_its_own_draft(name):
  """C31: what may end a block before draft k is decided before k is drawn: another draw at k leaves the confidences up to
  and with k as they were, and does change those behind it. A rule on the draft's own probability cannot be stated: a
  schedule gets these confidences and nothing else."""
  target, n, k = toys.target(), 16, 2
  drafter = make(name)
  model, sampling = drafter.model, make_sampling(n, 61, 1.0, seed=list(range(n)))
  prompt, taps = jnp.broadcast_to(TOKENS[:1, :8], (n, 8)), target.forward(TOKENS[:1, :8], taps=model.taps).taps
  state = jax.jit(model.extend)(
      drafter.params, model.init_state(n, 24), jnp.broadcast_to(taps, (n, *taps.shape[1:])), prompt,
      jnp.broadcast_to(jnp.arange(8), (n, 8)), jnp.full((n,), 8))
  keys = sampling.position_keys(jnp.zeros((n,), jnp.int32), model.draft_length)
  propose = jax.jit(model.propose)
  one, other = (
      propose(drafter.params, state, jnp.full((n,), 7), jnp.full((n,), 8), x, sampling) for x in (keys, keys.at[:, k].set(keys[::-1, k])))
  np.testing.assert_array_equal(one.drafts[:, :k], other.drafts[:, :k])
  np.testing.assert_array_equal(one.confidence[:, : k + 1], other.confidence[:, : k + 1])
  changed = one.drafts[:, k] != other.drafts[:, k]
  assert changed.sum() > 4 and np.all(one.confidence[changed, k + 1] != other.confidence[changed, k + 1])


def test_training_equals_decoding():
  """Teacher-forced logits of a block are those that decoding gives when the true tokens are drafted."""
  target = toys.target()
  taps, _, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, (0, 1))
  for name in ("rnn + conv", "dflash2"):
    drafter = make(name)
    c, model = drafter.config, drafter.model
    batch, _ = anchors.make_blocks(
        TOKENS, SEGMENTS, positions, ANSWER, taps, jnp.asarray([[0, 7]] * 2), jnp.ones((2, 2), bool), c.draft_length, c.block)
    out = jax.jit(model.block_outputs)(drafter.params, batch)
    apply = functools.partial(jax.jit(model.network.apply, static_argnames="method"), {"params": drafter.params})
    state = jax.jit(model.extend)(drafter.params, model.init_state(1, 24), taps[:1, :7], None, positions[:1, :7], jnp.array([7]))
    inputs = (
        list(zip(state.keys, state.values)), TOKENS[:1, 7:8], 7 + jnp.arange(c.block)[None, None], jnp.array([[7]]),
        jnp.ones((1, 1), bool))
    hidden = apply(*inputs, method="hidden")[:, 0]
    np.testing.assert_allclose(hidden[0], out.hidden[0, 1], atol=1e-5)
    logits, taught = apply(hidden, method="base_logits"), out.rows[0, 1] @ model.table(drafter.params).T
    if c.head == "rnn":
      carry, rows = jnp.zeros((1, c.rank)), []
      for k in range(c.draft_length):
        carry, row, _ = apply(carry, hidden[:, k], logits[:, k], batch.tokens[:1, 1, k], method="predict")
        rows.append(row)
      logits = jnp.stack(rows, 1)
    np.testing.assert_allclose(logits[0], taught, atol=1e-4)


def test_serial_training_equals_decoding():
  """Step s of column i is what decoding drafts s tokens after the pair i, when it drafts the true tokens."""
  target = toys.target()
  for name in ("eagle3", "eagle3 reduced, windowed", "mtp"):
    drafter = make(name)
    model = drafter.model
    outputs, extend, propose = (jax.jit(f) for f in (model.block_outputs, model.extend, model.propose))
    logits = jax.jit(functools.partial(model.network.apply, {"params": drafter.params}, method="logits"))
    taps, _, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, model.taps)
    taught = logits(outputs(drafter.params, SerialBatch(taps, TOKENS, SEGMENTS, positions)).hidden)[0, 6]
    state = extend(drafter.params, model.init_state(1, 24), taps[:1, :7], TOKENS[:1, :7], positions[:1, :7], jnp.array([7]))
    sampling = make_sampling(1, 61, 1.0)
    q = propose(drafter.params, state, TOKENS[:1, 7], jnp.array([7]), sampling.position_keys(jnp.array([0]), model.draft_length), sampling)
    np.testing.assert_allclose(q.q[0, 0], jax.nn.softmax(taught[0]), atol=1e-5)
    # In two pieces, with rejected rows between: the same state.
    piece = extend(drafter.params, model.init_state(1, 24), taps[:1, :6], TOKENS[:1, :6], positions[:1, :6], jnp.array([4]))
    piece = extend(drafter.params, piece, taps[:1, 4:9], TOKENS[:1, 4:9], positions[:1, 4:9], jnp.array([3]))
    again = propose(
        drafter.params, piece, TOKENS[:1, 7], jnp.array([7]), sampling.position_keys(jnp.array([0]), model.draft_length), sampling)
    np.testing.assert_allclose(again.q, q.q, atol=1e-5)
    # Every further step, with the drafts as the true tokens; two rows more, so that the window cuts the past.
    drafted = TOKENS.at[0, 8 : 8 + model.draft_length].set(q.drafts[0])
    one = jnp.ones_like(SEGMENTS)
    taps, _, positions = FEATURES(target.decoder, target.params, drafted, one, model.taps)
    taught = logits(outputs(drafter.params, SerialBatch(taps, drafted, one, positions)).hidden)[0, 6]
    np.testing.assert_allclose(q.q[0], jax.nn.softmax(taught), atol=1e-5)


@pytest.mark.slow
def test_every_combination_is_one_config_away():
  """Convolution × head × confidence × slot convention: all describe themselves, all give a loss with a gradient."""
  target = toys.target()
  taps, hidden, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, (0, 1))
  model_config = dataclasses.replace(target.config, layers=1, windows=(None,))
  for conv, head, confidence, anchor_predicts in itertools.product((0, 2), HEADS, (False, True), (False, True)):
    c = DrafterConfig(
        model=model_config, block=4, mask_id=59, taps=(0, 1), target_layers=3, anchor_predicts=anchor_predicts, head=head,
        rank=0 if head == "none" else 4, candidates=3 if head == "selector" else 0, conv=conv, conv_group=8 if conv else 16,
        confidence=confidence, confidence_with_head=confidence and head != "none", own_embedding=False)
    assert DrafterConfig.from_published(json.loads(json.dumps(c.to_published()))) == c
    model = specdec_jax.drafters.drafter_model(c)
    batch, labels = anchors.make_blocks(
        TOKENS, SEGMENTS, positions, ANSWER, taps, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool), c.draft_length, 4)
    rows = features.target_rows(hidden, labels.index)

    def loss(params, model=model, batch=batch, labels=labels, rows=rows):
      return losses.block_loss(
          losses.BlockLoss(), model, params, model.block_outputs(params, batch), rows, head_table(target.params), labels)[0]

    def start(key, model=model, loss=loss):
      params = model.init_params(key)
      return params, jax.grad(loss)(params)

    params, gradient = jax.eval_shape(start, jax.random.key(0))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert ("confidence" in params, "selector" in params, "markov" in params) == (
        confidence, head == "selector", head in ("markov", "gated", "rnn"))


@pytest.mark.parametrize("name", [pytest.param("rnn + conv", marks=pytest.mark.slow), "dflash2", "eagle3"])
def test_every_part_learns(name):
  """A few steps bring the loss down, and every trainable tensor moves."""
  target, drafter = toys.target(), make(name)
  model, frozen = drafter.model, {k: drafter.params[k] for k in ("embedding", "head")}
  taps, hidden, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, model.taps)
  table = head_table(target.params)

  def loss(params):
    params = {**params, **frozen}
    if name in SERIAL:
      batch = SerialBatch(taps, TOKENS, SEGMENTS, positions)
      return losses.serial_loss(0.8, model, params, model.block_outputs(params, batch), batch, ANSWER, hidden, table)[0]
    batch, labels = anchors.make_blocks(
        TOKENS, SEGMENTS, positions, ANSWER, taps, jnp.asarray([[2, 11], [1, 5]]), jnp.ones((2, 2), bool),
        model.draft_length, model.config.block)
    rows = features.target_rows(hidden, labels.index)
    return losses.block_loss(losses.BlockLoss(), model, params, model.block_outputs(params, batch), rows, table, labels)[0]

  first = params = {k: v for k, v in toys.random_params(model.init_params, 1, 0.1).items() if k not in frozen}
  tx = optax.adam(5e-3)
  state, step = tx.init(params), jax.jit(jax.value_and_grad(loss))
  history = []
  for _ in range(15):
    value, gradient = step(params)
    change, state = tx.update(gradient, state)
    params = optax.apply_updates(params, change)
    history.append(float(value))
  assert history[-1] < 0.85 * history[0]
  moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, first)
  assert min(jax.tree.leaves(moved)) > 0, moved


def test_selector_walk():
  """C73: the path by hand; the anchor's predecessor row, pair scores beyond the unary ones."""
  A, B, C, ANCHOR = 0, 1, 2, 3
  pairs = {(ANCHOR, A): -1.0, (ANCHOR, B): 0.5, (B, A): -0.5, (B, C): 0.2}
  predecessor = np.eye(4)  # One codebook entry a token: S(a, b) − U(b) is successor[b, a].
  successor = np.zeros((4, 4))
  for (a, b), value in pairs.items():
    successor[b, a] = value
  params = {"predecessor": jnp.asarray(predecessor), "successor": jnp.asarray(successor), "gate": {"kernel": jnp.ones((1, 4))}}
  head, hidden = SelectorHead(4, 4, 1), jnp.ones((1, 1))
  def score(previous, ids, unary):
    embedded = head.apply({"params": params}, jnp.array([previous]), method="embed")
    return np.asarray(head.apply({"params": params}, embedded, hidden, jnp.array([ids]), jnp.array([unary]), method="scores"))[0]
  first = score(ANCHOR, [A, B], [2.0, 1.9])
  np.testing.assert_allclose(first, [1.0, 2.4], atol=1e-6)
  second = score(B, [A, C], [1.0, 0.8])
  np.testing.assert_allclose(second, [0.5, 1.0], atol=1e-6)
  np.testing.assert_allclose(jax.nn.softmax(jnp.asarray(first)), [0.1978, 0.8022], atol=1e-4)


def test_recurrent_head_sees_the_whole_prefix():
  """The RNN head's logits at slot 2 depend on the token before last; the Markov head's do not."""
  hidden = jax.random.normal(jax.random.key(0), (1, 3, 8))
  for kind, sees in (("rnn", True), ("markov", False), ("gated", False)):
    head = BiasHead(kind, 20, 4, 8)
    run = lambda params, tokens, head=head: head.apply(params, head.apply(params, tokens, method="embed"), hidden, method="steps")
    params = {"params": head.init(
        jax.random.key(1), jnp.array([[1, 2, 3]]), method=lambda m, t: m.bias(m.steps(m.embed(t), hidden)))["params"]}
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), params)
    a, b = run(params, jnp.array([[1, 2, 3]])), run(params, jnp.array([[9, 2, 3]]))
    assert bool(jnp.abs(a[0, 2] - b[0, 2]).max() > 1e-3) == sees


@pytest.mark.parametrize("name", [*BLOCKS, *SERIAL])
def test_layouts_round_trip(name, tmp_path):
  """C97: exported, loaded, exported again: equal tensors, names, dtypes and config; the same text."""
  target, drafter = toys.target(), make(name)
  save_target(tmp_path / "t", target.config, target.params, None)
  loaded = specdec_jax.load_target(tmp_path / "t", stacked=False, transposed=False)
  specdec_jax.export(drafter, tmp_path / "a")
  again = specdec_jax.load_drafter(tmp_path / "a", loaded)
  assert again.config == drafter.config
  specdec_jax.export(again, tmp_path / "b", layout=drafter.config.layout)
  a, b = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
  assert a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
  assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
  assert ("embed_tokens.weight" in a) == drafter.config.own_embedding
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  other = next(x for x in ("deepspec", "dflash2", "eagle3") if x != drafter.config.layout)
  with pytest.raises(ValueError, match=f"layout '{other}' cannot hold"):
    specdec_jax.export(drafter, tmp_path / "c", layout=other)


def test_draft_to_target_table(tmp_path):
  """C95: offsets, not ids; a table that is absent, not injective or out of range is refused by name."""
  target = toys.target()
  specdec_jax.export(make("eagle3 reduced, windowed"), tmp_path)
  path = tmp_path / "model.safetensors"
  tensors, config = load_file(path), json.loads((tmp_path / "config.json").read_text())
  assert config["draft_vocab_size"] == 40
  ids = np.asarray(make("eagle3 reduced, windowed").params["draft_ids"])
  np.testing.assert_array_equal(tensors["d2t"], ids - np.arange(40))
  (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 4}))
  small = {**tensors, "d2t": np.array([0, 1, 1, 3], np.int32), "lm_head.weight": tensors["lm_head.weight"][:4]}
  save_file(small, path)
  assert specdec_jax.load_drafter(tmp_path, target).params["draft_ids"].tolist() == [0, 2, 3, 6]
  for wrong in ([0, 0, -1, 0], [0, 0, 0, 60], [-1, 0, 0, 0]):
    save_file({**small, "d2t": np.array(wrong, np.int32)}, path)
    with pytest.raises(ValueError, match="d2t does not give 4 different ids"):
      specdec_jax.load_drafter(tmp_path, target)
  save_file({k: v for k, v in small.items() if k != "d2t"}, path)
  with pytest.raises(TensorError, match="missing: d2t"):
    specdec_jax.load_drafter(tmp_path, target)


@pytest.mark.parametrize("change, message", [
    ({"is_causal": True}, "is_causal"), ({"block_size": 7}, "block_size is 7 at the top level and 5"),
    ({"dflash_config": {"block_size": 5}}, "mask_token_id"),
    ({"dflash_config": {"block_size": 5, "mask_token_id": 59, "projector_type": "dspark"}}, "SpecForge"),
    ({"rope_parameters": None}, "no rotary base"),
    ({"sliding_window": 3, "use_sliding_window": True, "layer_types": ["sliding_attention"]}, "shorter than block_size"),
], ids=str)
def test_dflash_config_faults_are_named(change, message):
  config = make("dflash2").config.to_published()
  with pytest.raises(ConfigError, match=message):
    DrafterConfig.from_published({**config, **change})


def test_dflash_defaults():
  """What older DFlash checkpoints leave out: taps spread over the target, block_size at the top level only."""
  config = make("dflash").config.to_published()
  own = {k: v for k, v in config["dflash_config"].items() if k not in ("target_layer_ids", "block_size")}
  spread = DrafterConfig.from_published({
      **config, "dflash_config": own, "num_target_layers": 36, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5})
  assert spread.taps == (1, 9, 17, 25, 33) and spread.block == 5 and spread.draft_length == 4


def test_another_tokenizer_is_refused(tmp_path):
  """C99 (c): tables shared with the target cannot tell two swapped ids; the tokenizer's hash can."""
  target = specdec_jax.load_target("tiny")
  c = DrafterConfig(
      model=dataclasses.replace(target.config, layers=1, windows=(None,), tied=False), block=4, mask_id=9, taps=(1,), target_layers=8,
      own_embedding=False, tokenizer_hash="0123456789abcdef")
  model = specdec_jax.drafters.drafter_model(c)
  params = model.init_params(jax.random.key(0))
  specdec_jax.export(specdec_jax.drafters.base.Drafter("x", c, model, params, ""), tmp_path)
  with pytest.raises(ValueError, match="another tokenizer than tiny's: hash 0123456789abcdef"):
    specdec_jax.load_drafter(tmp_path, target)


@pytest.mark.parametrize("changes, message", [
    ({"dflash_config": None}, "dflash_config must be an object"), ({"ttt_length": 1.5}, "ttt_length is 1.5: expected an integer"),
    ({"ttt_length": 3, "target_layer_ids": 0}, "target_layer_ids is 0: expected a list"),
    ({"ttt_length": 3, "markov_rank": 4}, "which drafter is this")], ids=str)
def test_config_faults_of_the_wrong_type_are_named(changes, message):
  base = make("eagle3").config.to_published()
  config = {**base, **changes} if "ttt_length" in changes else {**{k: v for k, v in base.items() if k != "ttt_length"}, **changes}
  with pytest.raises(ConfigError, match=message):
    drafter_config(config)


def test_reduced_vocabulary_is_measured_on_the_whole():
  """A target whose mass lies where nothing can be drafted: the drafter is never right, whatever it says."""
  target, drafter = toys.target(), make("eagle3 reduced, windowed")
  ids = np.asarray(drafter.params["draft_ids"])
  outside = int(np.setdiff1d(np.arange(61), ids)[0])
  table = jnp.zeros((61, 32)).at[outside].set(10.0)
  taps, _, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, drafter.model.taps)
  batch = SerialBatch(taps, TOKENS, SEGMENTS, positions)

  @jax.jit
  def loss(params):
    out = drafter.model.block_outputs(params, batch)
    return losses.serial_loss(0.8, drafter.model, params, out, batch, ANSWER, jnp.ones((2, 18, 32)), table)

  total, found = loss(drafter.params)
  assert np.isfinite(float(total)) and float(found["accept_rate@0"]) < 1e-5 and float(found["accuracy@0"]) == 0.0


def test_block_drafters_on_the_targets_distribution():
  """Soft cross-entropies, of all tokens and of the selector over the candidates, computed from whole distributions."""
  target, drafter = toys.target(), make("dflash2")
  model, table = drafter.model, head_table(target.params)
  taps, hidden, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, model.taps)
  batch, labels = anchors.make_blocks(
      TOKENS, SEGMENTS, positions, ANSWER, taps, jnp.asarray([[2, 11], [1, 5]]), jnp.ones((2, 2), bool), model.draft_length,
      model.config.block)
  rows = features.target_rows(hidden, labels.index)

  @jax.jit
  def found():
    out = model.block_outputs(drafter.params, batch)
    logits = out.rows @ model.table(drafter.params).T
    values, ids = jax.lax.top_k(logits, model.config.candidates)
    weights = losses.BlockLoss(0.0, 0.0, 0.0, 1.0, decay=2.0)
    loss = lambda **change: losses.block_loss(
        dataclasses.replace(weights, **change), model, drafter.params, out, rows, table, labels, soft=True)[0]
    scores = model.select(drafter.params, out, ids, values)
    return loss(), loss(ce=1.0, selector=0.0), logits, ids, scores, jax.nn.log_softmax(rows @ table.T, -1)

  selector, ce, logits, ids, scores, logp = jax.device_get(found())
  w = labels.supervised * np.exp(-np.arange(model.draft_length) / 2.0)
  p, logq = np.exp(logp), np.asarray(jax.nn.log_softmax(logits, -1))
  np.testing.assert_allclose(ce, -(w[..., None] * p * logq).sum() / w.sum(), rtol=1e-5)
  share, logs = np.take_along_axis(p, ids, -1) * w[..., None], np.asarray(jax.nn.log_softmax(scores, -1))
  np.testing.assert_allclose(selector, -(share * logs).sum() / share.sum(), rtol=1e-4)


@pytest.mark.parametrize("name", ["mtp", "eagle3 reduced, windowed"])
def test_serial_drafters_on_true_tokens(name):
  """Cross-entropy on the token that a step predicts, where the text goes on to it and the drafter knows it, counted by hand."""
  target, drafter = toys.target(), make(name)
  model, params = drafter.model, drafter.params
  taps, hidden, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, model.taps)
  batch = SerialBatch(taps, TOKENS, SEGMENTS, positions)

  @jax.jit
  def found():
    out = model.block_outputs(params, batch)
    total, _ = losses.serial_loss(0.8, model, params, out, batch, ANSWER, hidden, head_table(target.params), soft=False)
    return total, jax.nn.log_softmax(out.rows @ model.table(params).T, -1)

  total, logq = jax.device_get(found())
  known = np.asarray(params["draft_ids"]).tolist() if "draft_ids" in params else list(range(61))
  tokens, segments, answer = map(np.asarray, (TOKENS, SEGMENTS, ANSWER))
  losses_by_step = np.zeros(logq.shape[2])
  for (b, i), s in itertools.product(np.ndindex(tokens.shape), range(logq.shape[2])):
    if i + 2 + s < tokens.shape[1] and answer[b, i + s] and len({*segments[b, [i, i + s, i + 1 + s, i + 2 + s]]}) == 1:
      label = tokens[b, i + 2 + s].item()
      losses_by_step[s] -= logq[b, i, s, known.index(label)] if label in known else 0.0
  np.testing.assert_allclose(total, (losses_by_step / tokens.size * 0.8 ** np.arange(len(losses_by_step))).sum(), rtol=1e-5)
  assert (losses_by_step > 0).all()


@pytest.mark.parametrize("name", ["eagle3", pytest.param("eagle3 reduced, windowed", marks=pytest.mark.slow)])
def test_anchors_of_serial_drafters_are_columns_of_the_whole(name):
  """Training-time test from some columns gives what it gives from all of them, and their loss is the mean over those."""
  target, drafter = toys.target(), make(name)
  model = drafter.model
  taps, hidden, positions = FEATURES(target.decoder, target.params, TOKENS, SEGMENTS, model.taps)
  whole = SerialBatch(taps, TOKENS, SEGMENTS, positions)
  picked = jnp.asarray([[3, 9, 4], [0, 12, 7]])

  @jax.jit
  def found(batch, answer):
    out = model.block_outputs(drafter.params, batch)
    return out.rows, losses.serial_loss(0.8, model, drafter.params, out, batch, answer, hidden, head_table(target.params))

  rows, _ = found(whole, ANSWER)
  some, (total, some_metrics) = found(whole.replace(anchors=picked), ANSWER)
  np.testing.assert_allclose(some, np.take_along_axis(np.asarray(rows), np.asarray(picked)[..., None, None], 1), atol=1e-5)
  everything, (again, metrics) = found(whole.replace(anchors=jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)), ANSWER)
  _, (reference, reference_metrics) = found(whole, ANSWER)
  np.testing.assert_allclose(again, reference, rtol=1e-5)
  np.testing.assert_allclose(everything, rows, atol=1e-5)
  assert 0 < int(some_metrics["valid_tokens@0"]) < int(metrics["valid_tokens@0"]) == int(reference_metrics["valid_tokens@0"])
  each = [found(whole.replace(anchors=picked[:, j : j + 1]), ANSWER)[1][0] for j in range(picked.shape[1])]
  np.testing.assert_allclose(total, np.mean(each), rtol=1e-5)


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_objective(name):
  """Anchors beyond the candidates change no mean over those that count; a block drafter needs one; before `ce_share` TV is
  left out."""
  target, drafter = toys.target(), make(name)
  with pytest.raises(ValueError, match="needs at least 1"):
    Objective(target, make("dflash").model, 0)
  frozen = {k: drafter.params[k] for k in FROZEN if k in drafter.params}
  trainable = {k: v for k, v in drafter.params.items() if k not in FROZEN}
  batch = {"tokens": TOKENS, "segments": SEGMENTS, "answer": SEGMENTS == 2}  # Eight answer tokens in row 0, none in row 1.
  run = lambda n, progress: jax.jit(Objective(target, drafter.model, n, ce_share=0.5, loss=losses.BlockLoss(decay=None)))(
      trainable, {**batch, "progress": jnp.float32(progress)}, jax.random.key(1), {"target": target.params, "frozen": frozen})
  (few, few_metrics), (many, many_metrics) = run(8, 1.0), run(18, 1.0)
  if name == "mtp":  # A mean over all columns that were picked, those that do not count too.
    assert int(few_metrics["valid_tokens@0"]) == int(many_metrics["valid_tokens@0"]) == 7
    np.testing.assert_allclose(few * 8, many * 18, rtol=1e-5)
  else:
    assert int(few_metrics["valid_tokens"]) == int(many_metrics["valid_tokens"]) > 0
    np.testing.assert_allclose(few, many, rtol=1e-5)
    early, found = run(8, 0.25)
    np.testing.assert_allclose(early, found["ce_loss"], rtol=1e-5)
