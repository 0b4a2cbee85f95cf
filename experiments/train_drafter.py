"""Trains a drafter for a target on the target's own responses, and exports it in the published layout.

  python -m experiments.train_drafter --config=configs/tiny/dspark.py --workdir=runs/tiny_dspark
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import ml_collections
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


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of a drafter, in the parts that it is made of; constants: the target's parameters and the drafter's frozen ones."""

  config: ml_collections.ConfigDict
  target: Target
  model: BlockDrafter | SerialDrafter

  def features(self, batch, constants):
    """(taps, final-normed hidden states, positions), read from the batch or computed."""
    if "cached" in batch:
      return *feature_cache.restore(batch["cached"]), packed_view(batch["tokens"], batch["segments"])[0]
    return features.target_features(self.target.decoder, constants["target"], batch["tokens"], batch["segments"], self.model.taps)

  def inputs(self, batch, read, key):
    """What the drafter reads, and the labels of blocks."""
    config, c = self.config, self.model.config
    tokens, segments, supervised, (taps, _, positions) = batch["tokens"], batch["segments"], batch["answer"], read
    if isinstance(c, DrafterConfig):
      allowed = anchors.candidates(supervised, segments, config.anchor_rule, c.block)
      picked, keep = anchors.sample_anchors(key, allowed, config.anchors)
      return anchors.make_blocks(
          tokens, segments, positions, supervised, taps, picked, keep, c.draft_length, c.block, config.anchor_rule)
    rows = SerialBatch(taps, tokens, segments, positions)
    if config.anchors:
      picked, keep = anchors.sample_anchors(key, anchors.candidates(supervised, segments), config.anchors)
      rows = rows.replace(anchors=jnp.where(keep, picked, tokens.shape[1] - 1))  # The last column predicts nothing.
    return rows, None

  def __call__(self, params, batch, key, constants):
    """(loss, metrics) for the trainer."""
    model, w = self.model, self.config.loss
    params, table = {**params, **constants["frozen"]}, head_table(constants["target"])
    _, hidden, _ = read = self.features(batch, constants)
    inputs, labels = self.inputs(batch, read, key)
    out = model.block_outputs(params, inputs)
    if labels is None:
      return losses.serial_loss(model.config.step_decay, model, params, out, inputs, batch["answer"], hidden, table)
    warm = batch["progress"] < self.config.ce_share
    weights = losses.BlockLoss(jnp.where(warm, 1.0, w.ce), jnp.where(warm, 0.0, w.tv), w.confidence, w.selector, w.decay)
    return losses.block_loss(weights, model, params, out, features.target_rows(hidden, labels.index), table, labels)


def initial(config, target: Target, model: BlockDrafter | SerialDrafter, packed: packing.Rows):
  """(trainable, frozen) parameters of a new drafter. A reduced vocabulary holds the most frequent tokens of the answers."""
  params, frozen, c = model.init_params(jax.random.key(config.seed)), hub.target_tables(target), model.config
  if "draft_ids" in params:
    counts = np.bincount(packed.tokens[packed.answer], minlength=c.model.vocab)
    frozen["draft_ids"] = jnp.asarray(np.sort(np.argsort(-counts, kind="stable")[: c.draft_vocab]), jnp.int32)
    frozen["head"] = {"kernel": frozen["head"]["kernel"][frozen["draft_ids"]]}
  return {k: v for k, v in params.items() if k not in FROZEN}, frozen


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
  trainable, frozen = initial(config, target, model, packed)
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
      trainable, Objective(config, target, model), adamw(learning_rate(config.learning_rate, config.steps)), batch_at, config.steps, workdir, config.seed,
      {"target": target.params, "frozen": frozen}, save_every=config.save_every, evaluate=evaluate)
  folder = workdir / config.name
  specdec_jax.export(finished(trained), folder, dtype="bfloat16")
  (folder / "training.json").write_text(json.dumps(
      {**summary, "steps": config.steps, "anchors_a_row": config.anchors, "target_tokens": config.steps * config.batch * config.row_length,
       "process_minutes": round(time.process_time() / 60, 1), "target": target.hash}, indent=2) + "\n")
  show(f"written to {folder}")


if __name__ == "__main__":
  app.run(main)
