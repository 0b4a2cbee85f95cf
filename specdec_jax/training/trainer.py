"""The training loop: one donated, jitted update; progress, metrics, checkpoints, and a stop at the first bad loss."""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorboardX
from jax.sharding import Mesh
from rich import progress

from specdec_jax import sharding
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


class ProcessLost(RuntimeError):
  """Another process of the run is gone; the message names the checkpoint to go on from."""


def window(batches: Sequence[Any], size: int) -> dict[str, Any]:
  """Up to `size` micro-batches as one input of an accumulating update; a short last window is filled with repeats that do
  not count. Raises ValueError for none, or for more than `size`."""
  if not 0 < len(batches) <= size:
    raise ValueError(f"a window of {size} micro-batches cannot hold {len(batches)}")
  filled = [*batches, *batches[:1] * (size - len(batches))]
  return {"batches": jax.tree.map(lambda *x: np.stack(x), *filled), "counts": np.arange(size) < len(batches)}


def make_update(loss_fn: Callable, tx: optax.GradientTransformation, micro_batches: int = 1, out_shardings=None) -> Callable:
  """update(state, batch, constants) → (state, metrics), state donated.

  loss_fn(params, batch, key, constants) → (loss, metrics); `constants` is a pytree that is not trained (a frozen target).
  micro_batches above 1: `batch` comes from `window`, and gradients, loss and metrics (counts too) are means over the
  micro-batches that count, as DeepSpec averages them: each has its own denominators. out_shardings: of state and metrics, on a mesh.
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

  return jax.jit(update, donate_argnums=0, out_shardings=out_shardings)


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
    mesh: Mesh | None = None, transposed: bool = False,
) -> Any:
  """Trains `params` for `steps` updates and returns them; resumes from `workdir`'s last checkpoint.

  batch_at(i) is the batch of update i (a `window` of them with micro_batches above 1), a pure function, so that the step alone is
  the data position. `evaluate(step, params)` runs before every checkpoint. Metrics go to workdir/metrics.jsonl and, for
  TensorBoard, to workdir/tensorboard. facts: what is trained; a work folder with a checkpoint of something else is refused with
  ValueError. Raises NonFiniteLoss.

  mesh: what to train on, with state and batches split by the rules of `sharding`; transposed: the kernels of `params` are output-major.
  batch_at(i) is then this process's part of the batch (`sharding.local_rows`). Every process calls `fit` with the same; the first
  one writes the logs. A checkpoint may come from another mesh. Raises ProcessLost where another process ends early.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  checkpoints = checkpoint.manager(workdir / "checkpoints")
  if jax.process_index() == 0:
    claim(workdir / "claim.json", facts or {}, started=checkpoints.latest_step() is not None)

  def fresh(params):
    params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)  # The update donates its state, never the caller's.
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(seed))

  state = sharding.create(fresh, mesh, params, transposed=transposed)
  state = checkpoint.restore(checkpoints, state) or state
  out_shardings = None if mesh is None else (jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh))
  begin, update = int(state.step), make_update(loss_fn, tx, micro_batches, out_shardings)
  bar = progress.Progress(
      *progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), disable=jax.process_index() > 0)
  with _Log(workdir, begin) as log, bar, _together(checkpoints, workdir), sharding.use(mesh):
    task = bar.add_task("training", total=steps, completed=begin, note="")
    for i in range(begin, steps):
      state, metrics = update(state, _placed(mesh, batch_at(i), int(micro_batches > 1)), constants)
      last = i + 1 == steps
      saves = (i + 1) % save_every == 0 or last
      if (i + 1) % log_every == 0 or saves:  # What is saved has been looked at.
        found = {k: float(v) for k, v in metrics.items()}  # Waits for the device.
        if not np.isfinite(found["loss"]):
          raise NonFiniteLoss(f"loss {found['loss']} at step {i + 1}, or in the {log_every} steps before it")
        log.write({"step": i + 1, "seconds": log.seconds(), **found})
        bar.update(task, completed=i + 1, note=f"loss {found['loss']:.4f}")
      if saves:
        if evaluate is not None:
          found = {"step": i + 1, **evaluate(i + 1, state.params)}
          log.write(found)
          bar.console.print(found)
        checkpoint.save(checkpoints, i + 1, state)
    checkpoints.wait_until_finished()
  checkpoints.close()
  return state.params


@contextlib.contextmanager
def _together(checkpoints, workdir: pathlib.Path) -> Iterator[None]:
  """Turns what a process fails with when another one is gone into ProcessLost."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if jax.process_count() == 1:
      raise
    raise ProcessLost(
        f"process {jax.process_index()} of {jax.process_count()} cannot go on: another one is gone. Start all of them again; "
        f"they resume from step {checkpoints.latest_step() or 0} in {workdir}. ({str(e).splitlines()[0][:200]})") from None


def _placed(mesh: Mesh | None, batch, axis: int):
  """This process's part of a batch, on the mesh; axis: that of the rows."""
  if mesh is None:
    return batch
  mine = next(x.shape[axis] for x in jax.tree.leaves(batch) if np.ndim(x) > axis)
  return sharding.place_rows(mesh, batch, sharding.all_rows(mesh, mine), axis)


class _Log:
  """metrics.jsonl and TensorBoard of a work folder, from step `begin` on; silent in every process but the first."""

  def __init__(self, workdir: pathlib.Path, begin: int):
    self._file = None
    if jax.process_index() == 0:
      earlier = _rows_up_to(begin, workdir / "metrics.jsonl")
      self._began = time.time() - max((r["seconds"] for r in earlier if "seconds" in r), default=0.0)
      self._file, self._board = (workdir / "metrics.jsonl").open("a"), tensorboardX.SummaryWriter(str(workdir / "tensorboard"))

  def seconds(self) -> float:
    """Since the run began, all its parts together."""
    return round(time.time() - self._began, 1) if self._file else 0.0

  def write(self, row: Mapping[str, float]) -> None:
    if self._file is None:
      return
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    for name, value in row.items():
      if name != "step":
        self._board.add_scalar(name, value, row["step"])

  def __enter__(self):
    return self

  def __exit__(self, *error):
    if self._file is not None:
      self._file.close()
      self._board.close()
