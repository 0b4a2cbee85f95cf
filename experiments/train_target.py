"""Trains the embedded target from scratch: corpus, tokenizer, decoder, and the folder that ships.

  python -m experiments.train_target --config=configs/tiny/target.py --workdir=runs/tiny_target
"""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from rich import print as show

from experiments import common
from specdec_jax import hub
from specdec_jax.config import DeltaConfig, ModelConfig, Rotary
from specdec_jax.data import corpus, packing
from specdec_jax.data.prompts import encode_example
from specdec_jax.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from specdec_jax.models.decoder import Decoder
from specdec_jax.training import trainer
from specdec_jax.training.losses import next_token_loss
from specdec_jax.training.optimizer import adamw, learning_rate


def model_config(config, tokenizer: Tokenizer) -> ModelConfig:
  """Of the Qwen3 form or, with `model.delta`, of Qwen3.5's: attention in one layer of `attention_every` only, over a share of rotary."""
  m = config.model
  delta = DeltaConfig(**m.delta) if "delta" in m else None
  return ModelConfig(
      family="qwen3_5_text" if delta else "qwen3", vocab=tokenizer.vocab, width=m.width, layers=m.layers,
      heads=m.heads, kv_heads=m.kv_heads, head_dim=m.head_dim, mlp=m.mlp,
      rotary=Rotary(m.rotary_base, int(m.head_dim * m.get("rotary_share", 1.0))), max_positions=config.max_positions,
      windows=(None,) * m.layers, qk_norm=True, eos=(tokenizer.id("<|im_end|>"),), pad=tokenizer.id("<|endoftext|>"), delta=delta,
      recurrent=tuple(i for i in range(m.layers) if (i + 1) % m.attention_every) if delta else ())


def encode(tokenizer: Tokenizer, documents, limit: int):
  """(prompt ids, answer ids) of the documents that fit, and how many were too long."""
  pairs = [encode_example(tokenizer, d.prompt, d.answer) for d in documents]
  kept = [p for p in pairs if len(p[0]) + len(p[1]) <= limit]
  return kept, len(pairs) - len(kept)


def baselines(train: packing.Rows, rows: packing.Rows, vocab: int) -> dict[str, float]:
  """Nats a token of a unigram and an interpolated bigram model (fitted on `train`, one domain) on the answer tokens of `rows`."""
  tokens, segments = train.tokens, train.segments
  unigram = np.bincount(tokens[segments > 0], minlength=vocab) + 1.0
  unigram /= unigram.sum()
  inside = segments[:, 1:] == segments[:, :-1]
  pairs = np.zeros((vocab, vocab), np.float32)
  np.add.at(pairs, (tokens[:, :-1][inside], tokens[:, 1:][inside]), 1)
  scored = rows.answer[:, 1:] & (rows.segments[:, 1:] == rows.segments[:, :-1])
  before, after = rows.tokens[:, :-1][scored], rows.tokens[:, 1:][scored]
  totals = pairs.sum(1)
  strength = 20.0  # Pseudo-counts of the unigram in the bigram.
  bigram = (pairs[before, after] + strength * unigram[after]) / (totals[before] + strength)
  return {"unigram": float(-np.log(unigram[after]).mean()), "bigram": float(-np.log(bigram).mean())}


def ordinary_unseen_rows(params, tokens: np.ndarray):
  """Gives embedding rows that no training text held (the mask token's) the median norm of the others: at another scale
  they would swamp, or be lost in, the input of a drafter's block."""
  table = np.array(params["embedding"])
  unseen = np.setdiff1d(np.arange(len(table)), tokens)
  norms = np.linalg.norm(table, axis=1)
  table[unseen] *= (np.median(np.delete(norms, unseen)) / norms[unseen])[:, None]
  return {**params, "embedding": jnp.asarray(table)}


def main(argv):
  del argv
  config, workdir = common.settings()
  documents = {
      d: list(itertools.islice(corpus.documents(d, config.seed, config.problems), config.documents or None)) for d in corpus.DOMAINS}
  held = {d: [x for x in docs if corpus.is_evaluation(x.source)] for d, docs in documents.items()}
  train = {d: [x for x in docs if not corpus.is_evaluation(x.source)] for d, docs in documents.items()}
  if config.get("tokenizer"):
    tokenizer = load_tokenizer(hub.find(config.tokenizer))
  else:
    tokenizer = train_bpe((f"{x.prompt}\n{x.answer}" for docs in train.values() for x in docs[:12_000]), config.vocab)
  pairs, counts = [], {}
  rng = np.random.default_rng(config.seed)
  for domain, docs in train.items():
    kept, long = encode(tokenizer, docs, config.document_length)
    counts[domain] = {"documents": len(kept), "too_long": long, "tokens": sum(len(p) + len(a) for p, a in kept)}
    pairs += kept * config.passes[domain]
  show(counts)
  rng.shuffle(pairs)
  rows = packing.pack(pairs, config.row_length)
  steps = len(rows.tokens) // config.batch
  steps = min(steps, config.max_steps) if config.max_steps else steps
  order = rng.permutation(len(rows.tokens))

  c = model_config(config, tokenizer)
  decoder = Decoder(c, stacked=False)
  params = decoder.init(jax.random.key(config.seed), jnp.zeros((1, 8), jnp.int32), method="init_all")["params"]
  show({"parameters": sum(x.size for x in jax.tree.leaves(params)), "steps": steps, "tokens": steps * config.batch * config.row_length})

  def batch_at(step):
    take = order[np.arange(step * config.batch, (step + 1) * config.batch) % len(order)]
    return {"tokens": rows.tokens[take], "segments": rows.segments[take], "answer": rows.answer[take]}

  loss = functools.partial(next_token_loss, decoder, config.prompt_weight)
  tx = adamw(learning_rate(config.learning_rate, steps, final_share=0.05), betas=(0.9, 0.98), weight_decay=config.weight_decay)
  params = trainer.fit(params, loss, tx, batch_at, steps, workdir, config.seed, facts={**config.to_dict(), "steps": steps})
  params = ordinary_unseen_rows(params, rows.tokens)

  report = {}
  score = jax.jit(lambda p, batch: next_token_loss(decoder, 0.0, p, batch, None, None)[1])
  for domain, docs in held.items():
    found, _ = encode(tokenizer, docs, config.document_length)
    if not found:
      continue
    packed = packing.pack(found[:400], config.row_length)
    parts = []
    for i in range(0, len(packed.tokens), 8):
      chunk = {k: getattr(packed, k)[i : i + 8] for k in ("tokens", "segments", "answer")}
      parts.append(score(params, {k: np.pad(v, ((0, 8 - len(v)), (0, 0))) for k, v in chunk.items()}))
    own = packing.pack(encode(tokenizer, train[domain], config.document_length)[0], config.row_length)
    report[domain] = {
        "target": float(sum(p["sum"] for p in parts) / sum(p["count"] for p in parts)), **baselines(own, packed, c.vocab),
        "documents": min(len(found), 400)}
  show({"held-out nats a token": report})

  folder = workdir / config.get("name", "tiny")
  hub.save_target(folder, c, params, tokenizer, dtype="bfloat16")
  prompts = workdir / "prompts" if config.get("tokenizer") else folder / "prompts"  # Shipped once, with the tokenizer.
  prompts.mkdir(exist_ok=True)
  for domain, docs in held.items():
    fitting = [x for x in docs if len(encode_example(tokenizer, x.prompt, x.answer)[0]) <= config.document_length // 2]
    picked = rng.permutation(len(fitting))[: config.prompts]
    lines = [json.dumps({"turns": [fitting[i].prompt], "source": fitting[i].source if domain != "maths" else "generated"}) for i in picked]
    (prompts / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
  (folder / "training.json").write_text(json.dumps(
      {"corpus": counts, "steps": steps, "tokens": steps * config.batch * config.row_length, "held_out_nats_per_token": report},
      indent=2) + "\n")
  show(f"written to {pathlib.Path(folder)}")


if __name__ == "__main__":
  common.define("configs/tiny/target.py")
  app.run(main)
