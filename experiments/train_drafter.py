"""Trains a drafter for a target on the target's own responses, and exports it in the published layout.

  python -m experiments.train_drafter --config=configs/tiny/dspark.py --workdir=runs/tiny_dspark
"""

import functools
import hashlib
import json
import pathlib
import time

import jax
import numpy as np
from absl import app
from rich import print as show

import specdec_jax
from experiments import common
from experiments.recipes import drafter_config, objective
from specdec_jax import metrics, report, sharding
from specdec_jax.data import corpus, feature_cache, packing, pipeline
from specdec_jax.data.prompts import chat_prompt, read_turns, shipped_prompts
from specdec_jax.data.questions import general
from specdec_jax.data.regenerate import read_responses, regenerate
from specdec_jax.drafters import drafter_model
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.target import Target
from specdec_jax.training import features, trainer
from specdec_jax.training.objective import initial
from specdec_jax.training.optimizer import adamw, learning_rate


def questions(config) -> list[tuple[int, str, str]]:
  """(length of a known answer, or 0; name; text) of every training question: those of config.domains, or of config.prompts."""
  if config.prompts:
    return [(0, "prompts", text) for text in read_turns(config.prompts, config.documents or None)]
  rng = np.random.default_rng(config.data_seed)
  out = []
  for domain in config.domains:
    if domain == "general":
      out += [(0, kind, text) for kind, text in general(config.data_seed)[: config.documents or None]]
      continue
    documents = [d for d in corpus.documents(domain, config.data_seed) if not corpus.is_evaluation(d.source) and len(d.answer) < 600]
    out += [(len(documents[i].answer), domain, documents[i].prompt) for i in rng.permutation(len(documents))[: config.documents or None]]
  return out


def training_prompts(config, target: Target) -> list[dict]:
  """Training questions, name the domain, prompt the token ids; those with answers of similar length together."""
  write = lambda text: target.tokenizer.encode(chat_prompt(target.tokenizer, text, config.system or None))
  out = sorted(((n, name, write(text)) for n, name, text in questions(config)), key=lambda x: ((len(x[2]) - 1).bit_length(), x[0]))
  room = config.row_length - config.max_new_tokens
  return [{"name": domain, "prompt": np.array(ids, np.int32)} for _, domain, ids in out if len(ids) <= room]


def training_data(config, target: Target, workdir: pathlib.Path):
  """The target's responses to the training questions, shuffled and packed: (rows by number as stored, all of them in memory,
  facts of the responses). Prompts, responses and rows are data sets under workdir/data."""
  folder, seed = workdir / "data", config.data_seed
  made_from = {"target": target.hash, "tokenizer": target.tokenizer.fingerprint(), **{k: config[k] for k in (
      "data_seed", "documents", "row_length", "max_new_tokens", "temperature")}}
  if tuple(config.domains) != corpus.DOMAINS:
    made_from["domains"] = list(config.domains)
  if config.prompts:
    made_from["prompts"] = hashlib.sha256(pathlib.Path(config.prompts).read_bytes()).hexdigest()[:16]
  if config.system:
    made_from["system"] = config.system
  stored_once = lambda kind, make: sharding.in_turn(kind.__name__, lambda: pipeline.read_or_write(kind, folder, made_from, make))
  asked = stored_once(pipeline.Prompts, lambda: training_prompts(config, target))
  prompts = [(x["name"].decode(), x["prompt"].tolist()) for x in (asked[i] for i in range(len(asked)))]
  path = pathlib.Path(config.responses or workdir / "responses.jsonl")
  counts = regenerate(target, prompts, path, config.response_batch, config.max_new_tokens, config.temperature, seed)
  found = read_responses(path)
  if not found:
    raise ValueError(f"{path} holds no usable response: {dict(counts)}")
  made_from |= {"responses": hashlib.sha256(path.read_bytes()).hexdigest()[:16], **counts}
  tokens = lambda row: {k: np.array(row[k], np.int32) for k in ("prompt", "answer")}
  said = stored_once(pipeline.Responses, lambda: [{"name": r["name"], "reason": r["reason"], **tokens(r)} for r in found])

  def packed():
    order = np.random.default_rng(seed).permutation(len(said))
    return pipeline.row_examples(packing.pack(
        ((r["prompt"].tolist(), r["answer"].tolist()) for r in (said[i] for i in order)), config.row_length))

  stored = pipeline.numbered(stored_once(pipeline.PackedRows, packed))
  return stored, pipeline.all_rows(stored), {"responses": dict(counts), "response_tokens": sum(len(r["answer"]) for r in found)}


def cached_features(config, target: Target, taps, packed: packing.Rows) -> feature_cache.FeatureCache | None:
  """The feature cache that the configuration asks for, written where it is not there yet; None for features on the fly."""
  if not config.feature_cache:
    return None
  if jax.process_count() > 1:
    raise ValueError("feature_cache is written and read by one process: leave it empty, and features are computed on the fly")
  folder = pathlib.Path(config.feature_cache)
  try:
    return feature_cache.open_cache(folder, target, taps, packed, config.feature_dtype)
  except FileNotFoundError:
    run = jax.jit(lambda params, *rows: features.target_features(target.decoder, params, *rows, taps)[:2])
    compute = functools.partial(run, target.params)
    return feature_cache.write(folder, target, taps, packed, config.feature_dtype, 32, compute)


def train(config, workdir: pathlib.Path) -> pathlib.Path | None:
  """Trains the drafter that `config` describes, or goes on with it; the folder of the exported drafter, None but in the first process."""
  mesh = common.mesh(config)
  part = sharding.local_rows(mesh, config.batch)
  target = specdec_jax.load_target(config.target, config.dtype, mesh)
  c = drafter_config(config, target)
  model = drafter_model(c, dtype=target.dtype)
  loss = objective(config, target, model)
  stored, packed, summary = training_data(config, target, workdir)
  trainable, frozen = initial(model, target, packed, config.seed)
  show({**summary, "drafter": config.name, "trainable_parameters": sum(x.size for x in jax.tree.leaves(trainable)),
        "rows": len(packed.tokens)})
  cache = cached_features(config, target, model.taps, packed)

  stream = pipeline.batches(stored, config.batch, config.seed, part)

  def rows_at(index, step):
    batch = stream[index]
    row = batch.pop("row")
    batch["progress"] = np.float32(step / config.steps)
    return batch if cache is None else batch | {"cached": cache.rows(row)}

  def batch_at(step):
    count = config.micro_batches
    parts = [rows_at(step * count + k, step) for k in range(count)]
    return parts[0] if count == 1 else trainer.window(parts, count)

  def finished(trained) -> Drafter:
    return Drafter(config.name, c, model, {**trained, **frozen}, "in training")

  def evaluate(step, trained):
    drafter, out = finished(trained), {}
    for domain, source in config.evaluation.items():
      asked = shipped_prompts(source, domain, config.evaluation_prompts)
      texts = [chat_prompt(target.tokenizer, p, config.system or None) for p in asked]
      done = specdec_jax.generate(target, drafter, texts, 96, temperature=1.0, seed=list(range(len(texts))))
      found = metrics.acceptance([r.rounds for r in done])
      out[f"accepted_length/{domain}"] = found["accepted_length"]
      if jax.process_index() == 0:
        report.append(workdir / "results.jsonl", common.record(
            "train_drafter", target, {"name": config.name, "hash": None}, seed=config.seed, dataset=domain, temperature=1.0,
            concurrency=len(texts), schedule="fixed", n_requests=len(texts), n_rounds=found["rounds"],
            speculation={"on": True, "why": None}, metrics=found, notes=f"step {step}"))
    return out

  trained = trainer.fit(
      trainable, loss, adamw(learning_rate(config.learning_rate, config.steps)), batch_at, config.steps, workdir, config.seed,
      {"target": target.params, "frozen": frozen}, save_every=config.save_every, evaluate=evaluate, facts={
          "drafter": c.to_published(), "target": target.hash, "rows": hashlib.sha256(packed.tokens.tobytes()).hexdigest()[:16],
          **({"micro_batches": config.micro_batches} if config.micro_batches > 1 else {}),
          "loss": config.loss.to_dict(), "features": config.feature_dtype if cache is not None else "on the fly", **{k: config[k] for k in (
              "seed", "batch", "anchors", "anchor_rule", "soft", "ce_share", "steps", "learning_rate")}}, mesh=mesh,
      transposed=model.transposed,
      micro_batches=config.micro_batches)
  trained, frozen = sharding.fetch((trained, frozen), mesh)
  if jax.process_index() > 0:
    return None
  folder = workdir / config.name
  specdec_jax.export(finished(trained), folder, dtype="bfloat16")
  (folder / "training.json").write_text(json.dumps(
      {**summary, "steps": config.steps, "anchors_a_row": config.anchors,
       "target_tokens": config.steps * config.micro_batches * config.batch * config.row_length,
       "process_minutes": round(time.process_time() / 60, 1), "target": target.hash}, indent=2) + "\n")
  show(f"written to {folder}")
  return folder


def main(argv):
  del argv
  train(*common.settings())


def run(argv):
  try:
    main(argv)
  except trainer.ProcessLost as e:
    common.leave(e)


if __name__ == "__main__":
  common.define("configs/tiny/dspark.py")
  app.run(run)
