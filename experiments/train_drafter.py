"""Trains a drafter for a target on the target's own responses, and exports it in the published layout.

  python -m experiments.train_drafter --config=configs/tiny/dspark.py --workdir=runs/tiny_dspark
"""

import dataclasses
import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from rich import print as show

import specdec_jax
from experiments import common
from specdec_jax import hub, metrics
from specdec_jax.config import DrafterConfig, SerialConfig
from specdec_jax.data import corpus, feature_cache, packing, pipeline
from specdec_jax.data.prompts import chat_prompt, shipped_prompts
from specdec_jax.data.regenerate import read_responses, regenerate
from specdec_jax.drafters import BlockDrafter, SerialDrafter, drafter_model
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.serial import SerialBatch
from specdec_jax.models.decoder import head_table, packed_view
from specdec_jax.models.target import Target
from specdec_jax.training import anchors, features, losses, trainer
from specdec_jax.training.optimizer import adamw, learning_rate

FROZEN = ("embedding", "head", "draft_ids")  # The target's, as published.

common.define("configs/tiny/dspark.py")


def drafter_config(config, target: Target) -> DrafterConfig | SerialConfig:
  """The drafter that `config.drafter` describes, with the target's sizes, frozen embedding and head."""
  d = dict(config.drafter)
  kind, layers = d.pop("kind"), d.pop("layers", 1)
  model = dataclasses.replace(target.config, family="qwen3", qk_norm=True, layers=layers, windows=(d.pop("window", None),) * layers, tied=False)
  shared = {"model": model, "taps": tuple(d.pop("taps")), "target_layers": target.config.layers, "tokenizer_hash": target.tokenizer.fingerprint()}
  if kind == "block":
    return DrafterConfig(**shared, mask_id=target.tokenizer.id(config.mask_token), anchors=config.anchors, **d)
  return SerialConfig(**shared, kind=kind, **d)


def training_prompts(config, target: Target) -> list[tuple[str, list[int]]]:
  """(domain, token ids) of training questions, those with answers of similar length together."""
  rng = np.random.default_rng(config.seed)
  out = []
  for domain in corpus.DOMAINS:
    documents = [d for d in corpus.documents(domain, config.seed) if not corpus.is_evaluation(d.source) and len(d.answer) < 600]
    picked = [documents[i] for i in rng.permutation(len(documents))[: config.documents]]
    out += [(len(d.answer), domain, target.tokenizer.encode(chat_prompt(target.tokenizer, d.prompt))) for d in picked]
  out.sort(key=lambda x: ((len(x[2]) - 1).bit_length(), x[0]))
  return [(domain, ids) for _, domain, ids in out if len(ids) <= config.row_length - config.max_new_tokens]


def make_loss(config, target: Target, model: BlockDrafter | SerialDrafter):
  """loss(params, batch, key, constants) for the trainer; constants: target parameters and the drafter's frozen ones."""
  w, c = config.loss, model.config

  def serial(params, rows, supervised, hidden, table, key, progress):
    del progress
    if config.anchors:
      picked, keep = anchors.sample_anchors(key, anchors.candidates(supervised, rows.segments), config.anchors)
      rows = rows.replace(anchors=jnp.where(keep, picked, config.row_length - 1))  # The last column predicts nothing.
    return losses.serial_loss(c.step_decay, model, params, model.block_outputs(params, rows), rows, supervised, hidden, table)

  def blocks(params, rows, supervised, hidden, table, key, progress):
    allowed = anchors.candidates(supervised, rows.segments, config.anchor_rule, c.block)
    picked, keep = anchors.sample_anchors(key, allowed, config.anchors)
    batch, labels = anchors.make_blocks(
        rows.tokens, rows.segments, rows.positions, supervised, rows.features, picked, keep, c.draft_length, c.block, config.anchor_rule)
    warm = progress < config.ce_share
    weights = losses.BlockLoss(jnp.where(warm, 1.0, w.ce), jnp.where(warm, 0.0, w.tv), w.confidence, w.selector, w.decay)
    return losses.block_loss(
        weights, model, params, model.block_outputs(params, batch), features.target_rows(hidden, labels.index), table, labels)

  def loss(params, batch, key, constants):
    tokens, segments = batch["tokens"], batch["segments"]
    if "cached" in batch:
      (taps, hidden), positions = feature_cache.restore(batch["cached"]), packed_view(tokens, segments)[0]
    else:
      taps, hidden, positions = features.target_features(target.decoder, constants["target"], tokens, segments, model.taps)
    rows = SerialBatch(taps, tokens, segments, positions)
    of_kind = serial if isinstance(c, SerialConfig) else blocks
    return of_kind({**params, **constants["frozen"]}, rows, batch["answer"], hidden, head_table(constants["target"]), key, batch["progress"])

  return loss


def training_rows(config, target: Target, responses: list[dict], folder: pathlib.Path):
  """The responses, shuffled, packed and stored as a data set, or the stored ones: (rows by number, all of them in memory)."""
  digest = hashlib.sha256(json.dumps([[r["prompt"], r["answer"]] for r in responses]).encode()).hexdigest()[:16]
  facts = {"target": target.hash, "tokenizer": target.tokenizer.fingerprint(), "responses": digest, "row_length": config.row_length, "seed": config.seed}
  try:
    stored, _ = pipeline.open_rows(folder, facts)
  except FileNotFoundError:
    order = np.random.default_rng(config.seed).permutation(len(responses))
    packed = packing.pack(((responses[i]["prompt"], responses[i]["answer"]) for i in order), config.row_length)
    pipeline.write_rows(folder, packed, facts)
    stored, _ = pipeline.open_rows(folder, facts)
  return stored, pipeline.all_rows(stored)


def cached_features(config, target: Target, taps, packed: packing.Rows) -> feature_cache.FeatureCache | None:
  """The feature cache that the configuration asks for, written where it is not there yet; None for features on the fly."""
  if not config.feature_cache:
    return None
  folder = pathlib.Path(config.feature_cache)
  try:
    return feature_cache.open_cache(folder, target, taps, packed, config.feature_dtype)
  except FileNotFoundError:
    run = jax.jit(lambda params, *rows: features.target_features(target.decoder, params, *rows, taps)[:2])
    compute = functools.partial(run, target.params)
    return feature_cache.write(folder, target, taps, packed, config.feature_dtype, 32, compute)


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  prompts = training_prompts(config, target)
  responses = pathlib.Path(config.responses or workdir / "responses.jsonl")
  counts = regenerate(target, prompts, responses, config.response_batch, config.max_new_tokens, config.temperature, config.seed)
  rows = read_responses(responses)
  summary = {"responses": dict(counts), "response_tokens": sum(len(r["answer"]) for r in rows)}
  show(summary)
  stored, packed = training_rows(config, target, rows, workdir / "rows")

  c = drafter_config(config, target)
  model = drafter_model(c)
  params = model.init_params(jax.random.key(config.seed))
  frozen = hub.target_tables(target)
  if "draft_ids" in params:  # The most frequent tokens of the responses.
    counts = np.bincount(packed.tokens[packed.answer], minlength=c.model.vocab)
    frozen["draft_ids"] = jnp.asarray(np.sort(np.argsort(-counts, kind="stable")[: c.draft_vocab]), jnp.int32)
    frozen["head"] = {"kernel": frozen["head"]["kernel"][frozen["draft_ids"]]}
  trainable = {k: v for k, v in params.items() if k not in FROZEN}
  show({"drafter": config.name, "trainable_parameters": sum(x.size for x in jax.tree.leaves(trainable)), "rows": len(packed.tokens)})
  cache = cached_features(config, target, model.taps, packed)

  stream = pipeline.batches(stored, config.batch, config.seed)

  def batch_at(step):
    batch = stream[step]
    row = batch.pop("row")
    batch["progress"] = np.float32(step / config.steps)
    return batch if cache is None else batch | {"cached": cache.rows(row)}

  def finished(trained) -> Drafter:
    return Drafter(config.name, c, model, {**trained, **frozen}, "in training")

  def evaluate(trained):
    drafter, out = finished(trained), {}
    for domain in corpus.DOMAINS:
      texts = [chat_prompt(target.tokenizer, p) for p in shipped_prompts(config.evaluation, domain, config.evaluation_prompts)]
      done = specdec_jax.generate(target, drafter, texts, 96, temperature=1.0, seed=list(range(len(texts))))
      out[f"accepted_length/{domain}"] = metrics.acceptance([r.rounds for r in done])["accepted_length"]
    return out

  trained = trainer.fit(
      trainable, make_loss(config, target, model), adamw(learning_rate(config.learning_rate, config.steps)), batch_at, config.steps, workdir, config.seed,
      {"target": target.params, "frozen": frozen}, save_every=config.save_every, evaluate=evaluate)
  folder = workdir / config.name
  specdec_jax.export(finished(trained), folder, dtype="bfloat16")
  (folder / "training.json").write_text(json.dumps(
      {**summary, "steps": config.steps, "anchors_a_row": config.anchors, "target_tokens": int(config.steps * config.batch * config.row_length), "target": target.hash}, indent=2) + "\n")
  show(f"written to {folder}")


if __name__ == "__main__":
  app.run(main)
