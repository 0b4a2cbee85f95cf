"""Sequential temperature scaling of confidences (DSpark §3.2.1), and how good confidences are.

What is calibrated is the survival of draft k, the product of the confidences up to it, against "the first k drafts were all
accepted". Everything here is float64 on the host, as the published evaluation counts.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.typing import Bool, Float, Int

GRID = np.linspace(0.2, 5.0, 481)  # Temperatures that are tried; nothing beyond can come out.
FEWEST = 50  # Samples of a position, and of each of its outcomes FEW_OF_ONE, below which its temperature stays 1.
FEW_OF_ONE = 5
BINS, AUC_BINS = 20, 1000


class TruncatedBlocks(ValueError):
  """Blocks that a schedule cut: what would have become of the rest is unknown, and what is left is no random sample."""


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Temperatures [L] of a drafter's confidence logits, and what they were fitted on; stored beside its weights."""

  temperatures: tuple[float, ...]
  dataset: str
  samples: int
  date: str
  drafter: str  # hash of the weights
  notes: tuple[str, ...] = ()

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes calibration.json."""
    (pathlib.Path(folder) / "calibration.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load(folder: str | pathlib.Path, drafter: str, length: int) -> Calibration | None:
  """The calibration beside a drafter's weights, or None. Raises ValueError where it belongs to other weights or lengths."""
  path = pathlib.Path(folder) / "calibration.json"
  if not path.exists():
    return None
  found = json.loads(path.read_text())
  missing = [f.name for f in dataclasses.fields(Calibration) if f.name not in found and f.name != "notes"]
  if missing:
    raise ValueError(f"{path} lacks {', '.join(missing)}")
  known = {k: v for k, v in found.items() if k in Calibration.__dataclass_fields__}
  out = Calibration(**known | {"temperatures": tuple(found["temperatures"]), "notes": tuple(found.get("notes", ()))})
  if out.drafter != drafter:
    raise ValueError(f"{path} was fitted on other weights (hash {out.drafter}, not {drafter}): run experiments/calibrate.py again")
  if len(out.temperatures) != length or not all(math.isfinite(t) and t > 0 for t in out.temperatures):
    raise ValueError(f"{path}: expected {length} positive temperatures, not {list(out.temperatures)}")
  return out


def fit(confidence_logits: Float["n L"], accepted: Int["n"], observed: Int["n"] | None = None, notes: list[str] | None = None,
        grid: Float["n"] = GRID) -> Float["L"]:
  """One temperature a position, left to right: the first one on `grid` with the smallest ECE of the survival, earlier ones fixed.

  accepted: drafts of each block that were accepted; observed: leading slots that count, all where None (a drafted end of
  sequence ends what counts); blocks must not have been cut by a schedule. A position with too few samples keeps 1, and
  `notes` gets a line. Dividing by a temperature never changes the order of confidences within a position. Raises ValueError
  for shapes or counts that do not fit.
  """
  logits, accepted, observed = _checked(confidence_logits, accepted, observed)
  temperatures, before = np.ones(logits.shape[1]), np.ones(len(logits))
  for k in range(logits.shape[1]):
    counts = observed > k
    label = accepted[counts] > k
    if counts.sum() < FEWEST or min(label.sum(), (~label).sum()) < FEW_OF_ONE:
      if notes is not None:
        notes.append(f"position {k + 1}: {int(counts.sum())} samples, {int(label.sum())} of them accepted; temperature 1")
    else:
      errors = [ece(before[counts] * _sigmoid(logits[counts, k] / t), label) for t in grid]
      temperatures[k] = grid[int(np.argmin(errors))]
    before = before * _sigmoid(logits[:, k] / temperatures[k])
  return temperatures


def survivals(confidence_logits: Float["n L"], temperatures: Float["L"] | None = None) -> Float["n L"]:
  """Products of the confidences up to each position, after temperatures."""
  logits = np.asarray(confidence_logits, np.float64)
  return np.cumprod(_sigmoid(logits / (1.0 if temperatures is None else np.asarray(temperatures))), 1)


def assess(survival: Float["n L"], accepted: Int["n"], observed: Int["n"] | None = None) -> dict[str, Any]:
  """ece, brier, auc (None where all outcomes agree), mean prediction, mean outcome and samples of each position, and their means
  weighted by samples; `bins`: [L,20] samples, predictions and outcomes of the reliability diagram."""
  survival, accepted, observed = _checked(survival, accepted, observed)
  out = {k: [] for k in ("ece", "brier", "auc", "prediction", "outcome", "samples")}
  bins = []
  for k in range(survival.shape[1]):
    counts = observed > k
    p, label = np.clip(survival[counts, k], 1e-8, 1 - 1e-8), accepted[counts] > k
    some = bool(len(p))
    for name, value in zip(out, (ece(p, label), float(np.mean((p - label) ** 2)) if some else None, auc(p, label),
                                 float(p.mean()) if some else None, float(label.mean()) if some else None, int(len(p)))):
      out[name].append(value)
    bins.append(reliability(p, label))
  weights = np.array(out["samples"], float)
  for name in ("ece", "brier", "auc", "prediction", "outcome"):
    known = [i for i, x in enumerate(out[name]) if x is not None and weights[i]]
    out[f"mean_{name}"] = float(np.average([out[name][i] for i in known], weights=weights[known])) if known else None
  return out | {"bins": np.array(bins)}


def reliability(p: Float["n"], label: Bool["n"], bins: int = BINS) -> np.ndarray:
  """[3,bins]: samples, summed predictions and summed outcomes of equal bins of the prediction."""
  at = np.clip((np.asarray(p) * bins).astype(int), 0, bins - 1)
  return np.stack([np.bincount(at, weights=w, minlength=bins) for w in (np.ones(len(at)), np.asarray(p, float), np.asarray(label, float))])


def ece(p: Float["n"], label: Bool["n"]) -> float | None:
  """Expected calibration error over 20 equal bins: Σ count/n · |mean prediction − mean outcome|; None without samples."""
  if not len(p):
    return None
  _, predicted, happened = reliability(np.clip(p, 1e-8, 1 - 1e-8), label)
  return float(np.abs(predicted - happened).sum() / len(p))


def auc(p: Float["n"], label: Bool["n"]) -> float | None:
  """Area under the ROC curve from 1000 equal bins, ties one half; None where all outcomes agree."""
  at = np.clip((np.asarray(p) * AUC_BINS).astype(int), 0, AUC_BINS - 1)
  label = np.asarray(label, bool)
  right, wrong = (np.bincount(at[x], minlength=AUC_BINS).astype(float) for x in (label, ~label))
  if not right.sum() or not wrong.sum():
    return None
  below = np.cumsum(wrong) - wrong
  return float((right * (below + 0.5 * wrong)).sum() / (right.sum() * wrong.sum()))


def blocks(completions: Sequence[Any], stops: Sequence[int], length: int, cap: int) -> tuple[Float["n L"], Int["n"], Int["n"]]:
  """(confidence logits, accepted, observed) of all rounds of completions that were recorded (`generate(…, record=True)`).

  What stands behind a drafted stop was never up to the target, so observed ends with it. Rounds that the cap of `cap` new tokens
  could have cut are left out, whatever became of them: to leave out those that it did cut would pick the short ones. Raises
  TruncatedBlocks where a schedule cut any block short of `length` drafts, ValueError without a record.
  """
  rows = []
  for c in completions:
    if c.confidences is None:
      raise ValueError("these completions hold no confidences: generate them with record=True")
    if c.error:
      raise ValueError(f"a completion ended with an error: {c.error}")
    before = 1 + np.cumsum([0, *(emitted for _, _, emitted in c.rounds)])
    rows += [r for r, start in zip(zip(c.confidences, c.drafts, c.rounds, strict=True), before) if start + length + 1 <= cap]
  cut = sum(drafted != length for _, _, (drafted, _, _) in rows)
  if cut:
    raise TruncatedBlocks(f"{cut} of {len(rows)} blocks were cut short of {length} drafts: calibrate full blocks, schedule=\"fixed\"")
  ends = [next((k + 1 for k, t in enumerate(drafts) if t in stops), length) for _, drafts, _ in rows]
  logits = np.array([confidence for confidence, _, _ in rows], np.float64).reshape(-1, length)
  accepted = np.array([min(a, end) for (_, _, (_, a, _)), end in zip(rows, ends)], int)
  return logits, accepted, np.array(ends, int)


def threshold_sweep(survival: Float["n L"], accepted: Int["n"], thresholds: Sequence[float]) -> list[dict[str, float]]:
  """What verifying only drafts whose survival reaches a threshold would have kept of recorded blocks (DSpark Figure 5): accepted
  and rejected drafts a round, and the share accepted of those verified (None where none is)."""
  out = []
  for t in thresholds:
    lengths = (survival >= t).sum(1)
    kept = np.minimum(accepted, lengths)
    out.append({
        "threshold": float(t), "accepted_drafts": float(kept.mean()), "rejected_drafts": float((lengths - kept).mean()),
        "draft_acceptance_rate": float(kept.sum() / lengths.sum()) if lengths.sum() else None})
  return out


def describe(found: Mapping[str, Any]) -> dict[str, Any]:
  """The numbers of `assess` without the bins, for a results record."""
  return {k: v for k, v in found.items() if k != "bins"}


def _sigmoid(x):
  """0 for what is no number, as the schedules have it."""
  return np.where(np.isnan(x), 0.0, 1 / (1 + np.exp(-np.clip(x, -700, 700))))


def _checked(table, accepted, observed):
  table, accepted = np.asarray(table, np.float64), np.asarray(accepted)
  if table.ndim != 2 or accepted.shape != table.shape[:1]:
    raise ValueError(f"expected confidences [n,L] and accepted [n], not {table.shape} and {accepted.shape}")
  observed = np.full(len(table), table.shape[1]) if observed is None else np.asarray(observed)
  if observed.shape != accepted.shape or observed.size and not (observed.min() >= 0 and observed.max() <= table.shape[1]):
    raise ValueError(f"observed must be [n] counts from 0 to {table.shape[1]}, not {observed.shape}")
  if accepted.size and not (accepted.min() >= 0 and accepted.max() <= table.shape[1]):
    raise ValueError(f"accepted must be counts from 0 to {table.shape[1]}, not up to {accepted.max()}")
  return table, accepted, observed
