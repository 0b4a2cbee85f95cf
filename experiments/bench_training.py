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
from specdec_jax.training import trainer
from specdec_jax.training.objective import initial
from specdec_jax.training.optimizer import adamw, learning_rate

PARTS = ("features", "backbone", "loss", "optimizer")  # The last two are what is left, so noise can make one negative.


def rows_of(recipe, target: Target) -> Rows:
  """A batch of full rows of arbitrary tokens, a fifth of each a question."""
  shape = recipe.batch, recipe.row_length
  tokens = np.random.default_rng(0).integers(5, target.config.vocab - 5, shape, np.int32)
  return Rows(tokens, np.ones(shape, np.int32), np.broadcast_to(np.arange(shape[1]) > shape[1] // 5, shape))


def timed_parts(recipe, target: Target):
  """By name: a function, and the state that it takes first and gives back first (None for none). `gradient` is `features`,
  `backbone` and the loss; `update` is the trainer's whole step."""
  model = drafter_model(drafter_config(recipe, target))
  loss = objective(recipe, target, model)
  rows = rows_of(recipe, target)
  trainable, frozen = initial(model, target, rows, 0)
  constants, key = {"target": target.params, "frozen": frozen}, jax.random.key(0)
  batch = {"tokens": rows.tokens, "segments": rows.segments, "answer": rows.answer, "progress": np.float32(1)}
  batch = jax.tree.map(jnp.asarray, batch)
  read = jax.jit(loss.read)(batch, constants)
  tx = adamw(learning_rate(recipe.learning_rate, recipe.steps))
  state = trainer.TrainState(jnp.zeros((), jnp.int32), trainable, tx.init(trainable), key)

  def backbone(params, read):
    return model.block_outputs({**params, **frozen}, loss.inputs(batch, read, key)[0]).rows.astype(jnp.float32).mean()

  update = trainer.make_update(loss, tx)
  parts = {
      "features": (loss.read, batch, constants), "backbone": (jax.grad(backbone), trainable, read),
      "gradient": (jax.value_and_grad(loss, has_aux=True), trainable, batch, key, constants)}
  stateless = lambda f, inputs: lambda state: (state, f(*inputs))
  timed = {name: (stateless(jax.jit(f), inputs), None) for name, (f, *inputs) in parts.items()}
  copied = jax.tree.map(lambda x: jnp.array(x, copy=True), state)  # The update donates it.
  return {**timed, "update": (lambda state: update(state, batch, constants), copied)}


def best_seconds(functions, repeats: int) -> dict[tuple[str, str], float]:
  """Best seconds of every function, all in turn; the first turn compiles."""
  best, states = {}, {name: state for name, (_, state) in functions.items()}
  for turn in range(repeats + 1):
    for name, (f, _) in functions.items():
      began = time.perf_counter()
      states[name], _ = jax.block_until_ready(f(states[name]))
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
  shown = rich_table.Table(
      "recipe", "step (ms)", "tokens/s", "without features", *PARTS, title=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}")
  for name, recipe in recipes.items():
    features, backbone, gradient, update = (best[name, part] for part in ("features", "backbone", "gradient", "update"))
    seconds = dict(zip(PARTS, (features, backbone, gradient - features - backbone, update - gradient), strict=True))
    tokens = recipe.batch * recipe.row_length
    shown.add_row(
        name, f"{1e3 * update:.0f}", f"{tokens / update:.0f}", f"{tokens / (update - features):.0f}",
        *(f"{s / update:.0%}" for s in seconds.values()))
    report.append(workdir / "results.jsonl", common.record(
        "bench_training", target, {"name": name, "hash": None}, dataset="synthetic", concurrency=recipe.batch,
        metrics={"training_tokens_per_s": tokens / update, "parts": {k: v / update for k, v in seconds.items()}},
        notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}"))
  screen.print(shown)


if __name__ == "__main__":
  common.define("configs/tiny/training_speed.py")
  app.run(main)
