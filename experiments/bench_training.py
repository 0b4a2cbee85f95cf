"""Where a training step of a drafter goes: tokens a second, and the share of the target's features, the backbone, the
vocabulary-wide loss and the optimizer.

  python -m experiments.bench_training --config=configs/tiny/training_speed.py --workdir=runs/tiny_training_speed
"""

import importlib
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from rich import console as rich_console
from rich import table as rich_table

import specdec_jax
from experiments import common
from experiments.recipes import drafter_config, objective
from specdec_jax import report
from specdec_jax.data.packing import Rows
from specdec_jax.drafters import drafter_model
from specdec_jax.models.target import Target
from specdec_jax.training.objective import initial
from specdec_jax.training.optimizer import adamw, learning_rate

common.define("configs/tiny/training_speed.py")

PARTS = ("features", "backbone", "loss", "optimizer")


def rows_of(recipe, target: Target) -> Rows:
  """A batch of full rows of arbitrary tokens, a fifth of each a question."""
  shape = recipe.batch, recipe.row_length
  tokens = np.random.default_rng(0).integers(5, target.config.vocab - 5, shape, np.int32)
  return Rows(tokens, np.ones(shape, np.int32), np.broadcast_to(np.arange(shape[1]) > shape[1] // 5, shape))


def timed_parts(recipe, target: Target):
  """Functions without arguments, each the whole of the one before and one part more; only `backbone` leaves out what comes
  before it."""
  model = drafter_model(drafter_config(recipe, target))
  loss = objective(recipe, target, model)
  rows = rows_of(recipe, target)
  trainable, frozen = initial(model, target, rows, 0)
  constants, key = {"target": target.params, "frozen": frozen}, jax.random.key(0)
  batch = {"tokens": rows.tokens, "segments": rows.segments, "answer": rows.answer, "progress": np.float32(1)}
  batch = jax.tree.map(jnp.asarray, batch)
  read = jax.jit(loss.features)(batch, constants)
  tx = adamw(learning_rate(recipe.learning_rate, recipe.steps))
  state = tx.init(trainable)

  def backbone(params, read):
    return model.block_outputs({**params, **frozen}, loss.inputs(batch, read, key)[0]).rows.astype(jnp.float32).mean()

  def update(params, state, batch, constants):
    found, grads = whole(params, batch, key, constants)
    return found, tx.update(grads, state, params)

  whole = jax.value_and_grad(loss, has_aux=True)
  arguments = {
      "features": (loss.features, batch, constants), "backbone": (jax.grad(backbone), trainable, read),
      "gradient": (whole, trainable, batch, key, constants), "update": (update, trainable, state, batch, constants)}
  return {name: (jax.jit(f), inputs) for name, (f, *inputs) in arguments.items()}


def best_seconds(functions, repeats: int) -> dict[tuple[str, str], float]:
  """Best seconds of every function, all in turn; the first turn compiles."""
  best = {}
  for turn in range(repeats + 1):
    for name, (f, inputs) in functions.items():
      began = time.perf_counter()
      jax.block_until_ready(f(*inputs))
      if turn:
        best[name] = min(best.get(name, np.inf), time.perf_counter() - began)
  return best


def main(argv):
  del argv
  config, workdir = common.settings()
  target = specdec_jax.load_target(config.target)
  recipes = {name: importlib.import_module(f"configs.{name.replace('/', '.')}").get_config() for name in config.recipes}
  for recipe in recipes.values():
    recipe.target = config.target
    if config.batch:
      recipe.batch = config.batch
  best = best_seconds({(n, part): f for n, recipe in recipes.items() for part, f in timed_parts(recipe, target).items()}, config.repeats)
  screen = rich_console.Console()
  shown = rich_table.Table("recipe", "step (ms)", "tokens/s", "with a feature cache", *PARTS, title=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}")
  for name, recipe in recipes.items():
    features, backbone, gradient, update = (best[name, part] for part in ("features", "backbone", "gradient", "update"))
    seconds = dict(zip(PARTS, (features, backbone, max(gradient - features - backbone, 0.0), max(update - gradient, 0.0)), strict=True))
    tokens, total = recipe.batch * recipe.row_length, sum(seconds.values())
    shown.add_row(name, f"{1e3 * total:.0f}", f"{tokens / total:.0f}", f"{tokens / (total - features):.0f}", *(f"{s / total:.0%}" for s in seconds.values()))
    report.append(workdir / "results.jsonl", common.record(
        "bench_training", target, {"name": name, "hash": None}, concurrency=recipe.batch, speculation={"on": False, "why": "training"},
        metrics={"tokens_per_s": tokens / total, "step_seconds": total, "parts": {k: v / total for k, v in seconds.items()}},
        notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}"))
  screen.print(shown)


if __name__ == "__main__":
  app.run(main)
