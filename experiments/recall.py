"""How often the target's next token is among a block drafter's best candidates, slot by slot (DFlash 2's recall@k).

  python -m experiments.recall --config=configs/tiny/recall.py --workdir=runs/tiny_recall

On the target's own sampled answers, with the true tokens before each slot: the k best tokens of the slot's logits without any
sequential head, which is what a path selector chooses from.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common
from experiments.measure import decode_all, load_prompts
from specdec_jax import report
from specdec_jax.config import DrafterConfig
from specdec_jax.data import packing
from specdec_jax.training.objective import Objective

COLUMNS = (
    ("drafter", "drafter.name", ""), ("data set", "dataset", ""), ("candidates", "metrics.candidates", ""), ("blocks", "n_rounds", ""),
    ("recall by slot, %", lambda r: " ".join("n/a" if x is None else f"{100 * x:.1f}" for x in r["metrics"]["recall"]), ""))


def true_ranks(objective: Objective, drafter, batch, key):
  """(how many tokens have a higher logit than the true one [n,L], which slots count [n,L]) of sampled blocks."""
  frozen = {"target": objective.target.params}
  inputs, labels = objective.inputs(batch, objective.read(batch, frozen), key)
  hidden = drafter.model.block_outputs(drafter.params, inputs).hidden
  logits = drafter.model.network.apply({"params": drafter.params}, hidden, method="base_logits").astype(jnp.float32)
  true = jnp.take_along_axis(logits, labels.tokens[..., None], -1)
  flat = lambda x: x.reshape(-1, x.shape[-1])
  return flat((logits > true).sum(-1)), flat(labels.supervised)


def recall(ranks: np.ndarray, counts: np.ndarray, candidates: int) -> list[float | None]:
  """Share of true tokens among the best `candidates`, by slot; None for a slot without any."""
  return [float((ranks[c, k] < candidates).mean()) if c.any() else None for k, c in enumerate(counts.T)]


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  drafters = [specdec_jax.load_drafter(name, target) for name in config.drafters]
  for d in drafters:
    if not isinstance(d.config, DrafterConfig):
      raise SystemExit(f"recall: {d.name} drafts one token after the other: it has no candidates by slot")
  records = []
  for dataset, ids in progress.track(load_prompts(config, target).items(), "data sets"):
    answers = decode_all(target, None, ids, config.batch, config.max_new_tokens, range(len(ids)), temperature=config.temperature)
    rows = packing.pack([(p, c.tokens) for p, c in zip(ids, answers)], config.row_length)
    for drafter in drafters:
      objective = Objective(target, drafter.model, config.anchors)
      run = jax.jit(functools.partial(true_ranks, objective, drafter))
      parts = []
      for i in range(len(rows.tokens)):
        batch = {k: getattr(rows, k)[i : i + 1] for k in ("tokens", "segments", "answer")}
        parts.append(jax.device_get(run(batch, jax.random.key(config.seed + i))))
      ranks, counts = (np.concatenate(x) for x in zip(*parts))
      for candidates in config.candidates:
        records.append(common.record(
            "recall", target, {"name": drafter.name, "hash": drafter.hash}, seed=config.seed, dataset=dataset,
            temperature=config.temperature, n_requests=len(ids), n_rounds=int(counts.any(1).sum()), notes="",
            metrics={"candidates": candidates, "recall": recall(ranks, counts, candidates)}))
        report.append(workdir / "results.jsonl", records[-1])
  screen = rich_console.Console()
  screen.width = max(screen.width, 140)
  screen.print(report.table(records, COLUMNS))
  (workdir / "recall.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(f"records: {workdir / 'results.jsonl'}   table: {workdir / 'recall.md'}")


if __name__ == "__main__":
  common.define("configs/tiny/recall.py")
  app.run(main)
