"""The training loop: one donated, jitted update; progress, metrics, checkpoints, and a stop at the first bad loss."""

import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorboardX
from rich import progress

from specdec_jax.facts import claim
from specdec_jax.training import checkpoint


@flax.struct.dataclass
class TrainState:
  """Everything that a run needs to go on: step (also the data position), parameters, optimizer state, key."""

  step: jax.Array
  params: Any
  optimizer: Any
  key: jax.Array


class NonFiniteLoss(FloatingPointError):
  """The loss was NaN or infinite; the message names the step."""


def window(batches: Sequence[Any], size: int) -> dict[str, Any]:
  """Up to `size` micro-batches as one input of an accumulating update; a short last window is filled with repeats that do
  not count. Raises ValueError for none, or for more than `size`."""
  if not 0 < len(batches) <= size:
    raise ValueError(f"a window of {size} micro-batches cannot hold {len(batches)}")
  filled = [*batches, *batches[:1] * (size - len(batches))]
  return {"batches": jax.tree.map(lambda *x: np.stack(x), *filled), "counts": np.arange(size) < len(batches)}


def make_update(loss_fn: Callable, tx: optax.GradientTransformation, micro_batches: int = 1) -> Callable:
  """update(state, batch, constants) → (state, metrics), state donated.

  loss_fn(params, batch, key, constants) → (loss, metrics); `constants` is a pytree that is not trained (a frozen target).
  micro_batches above 1: `batch` comes from `window`, and gradients, loss and metrics (counts too) are means over the
  micro-batches that count, as DeepSpec averages them: each has its own denominators.
  """
  gradient = jax.value_and_grad(loss_fn, has_aux=True)

  def accumulated(params, batch, key, constants):
    def step(total, part):
      index, one, counts = part
      found = gradient(params, one, jax.random.fold_in(key, index), constants)
      return jax.tree.map(lambda t, x: t + jnp.where(counts, x, 0), total, found), None

    parts = (jnp.arange(micro_batches), batch["batches"], batch["counts"])
    like = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], batch["batches"]), key, constants)
    total, _ = jax.lax.scan(step, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like), parts)
    return jax.tree.map(lambda x: x / batch["counts"].sum(), total)

  def update(state: TrainState, batch, constants):
    key = jax.random.fold_in(state.key, state.step)
    (loss, metrics), grads = (gradient if micro_batches == 1 else accumulated)(state.params, batch, key, constants)
    change, optimizer = tx.update(grads, state.optimizer, state.params)
    state = state.replace(step=state.step + 1, params=optax.apply_updates(state.params, change), optimizer=optimizer)
    return state, {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}

  return jax.jit(update, donate_argnums=0)


def _rows_up_to(step: int, path: pathlib.Path) -> list[dict[str, float]]:
  """The rows of a log up to `step`, where a run goes on; later ones, and half a line, are taken out of the file."""
  rows = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      break
  rows = [r for r in rows if r["step"] <= step]
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return rows


def fit(
    params, loss_fn: Callable, tx: optax.GradientTransformation, batch_at: Callable[[int], Any], steps: int,
    workdir: pathlib.Path, seed: int = 0, constants=None, log_every: int = 20, save_every: int = 200,
    evaluate: Callable[[int, Any], dict[str, float]] | None = None, micro_batches: int = 1, facts: Mapping[str, Any] | None = None,
) -> Any:
  """Trains `params` for `steps` updates and returns them; resumes from `workdir`'s last checkpoint.

  batch_at(i) is the batch of update i (a `window` of them with micro_batches above 1), a pure function, so that the step
  alone is the data position. `evaluate(step, params)` runs before every checkpoint. Metrics go to workdir/metrics.jsonl and, for TensorBoard, to workdir/tensorboard. facts:
  what is trained; a work folder with a checkpoint of something else is refused with ValueError. Raises NonFiniteLoss.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  checkpoints = checkpoint.manager(workdir / "checkpoints")
  claim(workdir / "claim.json", facts or {}, started=checkpoints.latest_step() is not None)
  params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)  # The update donates its state, never the caller's.
  state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(seed))
  state = checkpoint.restore(checkpoints, state) or state
  begin, update = int(state.step), make_update(loss_fn, tx, micro_batches)
  earlier = _rows_up_to(begin, workdir / "metrics.jsonl")
  began, log = time.time() - max((r["seconds"] for r in earlier if "seconds" in r), default=0.0), (workdir / "metrics.jsonl").open("a")
  board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"))

  def write(row):
    log.write(json.dumps(row) + "\n")
    log.flush()
    for name, value in row.items():
      if name != "step":
        board.add_scalar(name, value, row["step"])

  with board, progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}")) as bar, log:
    task = bar.add_task("training", total=steps, completed=begin, note="")
    for i in range(begin, steps):
      state, metrics = update(state, batch_at(i), constants)
      last = i + 1 == steps
      saves = (i + 1) % save_every == 0 or last
      if (i + 1) % log_every == 0 or saves:  # What is saved has been looked at.
        found = {k: float(v) for k, v in metrics.items()}  # Waits for the device.
        row = {"step": i + 1, "seconds": round(time.time() - began, 1), **found}
        if not jnp.isfinite(row["loss"]):
          raise NonFiniteLoss(f"loss {row['loss']} at step {i + 1}, or in the {log_every} steps before it")
        write(row)
        bar.update(task, completed=i + 1, note=f"loss {row['loss']:.4f}")
      if saves:
        if evaluate is not None:
          found = {"step": i + 1, **evaluate(i + 1, state.params)}
          write(found)
          bar.console.print(found)
        checkpoint.save(checkpoints, i + 1, state)
  checkpoints.wait_until_finished()
  checkpoints.close()
  return state.params
