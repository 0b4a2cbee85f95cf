"""Results records, one JSON line each, and the tables, plots and reports made from them alone."""

import importlib.metadata
import json
import math
import operator
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from specdec_jax.metrics import FORMULAS

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Record = dict[str, Any]
Column = tuple[str, str | Callable[[Record], Any], str]  # (title, key path or function of a record, format spec)

# Keys of a results record and, for those that hold an object, the keys inside it (METRICS.md, "Results record").
REQUIRED: dict[str, tuple[str, ...]] = {
  "experiment": (),
  "config": (),
  "overrides": (),
  "commit": (),
  "versions": ("python", "jax", "flax"),
  "device": ("kind", "count", "mesh"),
  "seed": (),
  "target": ("name", "hash"),
  "drafter": ("name", "hash"),
  "dataset": (),
  "temperature": (),
  "concurrency": (),
  "schedule": (),
  "rule": (),
  "n_requests": (),
  "n_rounds": (),
  "speculation": ("on", "why"),
  "lossless": ("contract", "identical", "n", "holds"),
  "compile": ("count", "seconds"),
  "metrics": (),
  "notes": (),
}

ACCEPTANCE = (
  "accepted_length",
  "accepted_drafts",
  "draft_acceptance_rate",
  "request_mean_accepted_length",
  "macro_accepted_length",
  "expected_accepted_length",
)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito: told apart by all eyes.
DASHES = ("-", "--", ":", "-.")
REPEAT_WARNING = 50  # Equal tokens in a row from which an output counts as degenerate.


def append(path: str | Path, record: Mapping[str, Any]) -> None:
  """Appends the record as one line of JSON; numpy scalars and arrays become numbers and lists.

  Raises ValueError naming the keys of REQUIRED that are missing, or the key whose value JSON cannot hold.
  """
  plain = _plain(record, "")
  if missing := _missing(plain):
    raise ValueError(f"a results record lacks {', '.join(missing)}")
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  with open(path, "a", encoding="utf-8") as f:
    f.write(json.dumps(plain, allow_nan=False) + "\n")


def read(path: str | Path) -> list[Record]:
  """The records of a file; ValueError naming file:line for a line that is no JSON object."""
  records = []
  with open(path, "rb") as f:
    for n, line in enumerate(f, 1):
      try:
        record = json.loads(line, parse_constant=_refuse)
      except ValueError as error:
        raise ValueError(f"{path}:{n}: {error}") from error
      if not isinstance(record, dict):
        raise ValueError(f"{path}:{n}: not a JSON object")
      records.append(record)
  return records


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that decide a result."""
  found = {"python": platform.python_version()}
  for package in ("jax", "flax", "optax", "numpy", "specdec_jax"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def commit() -> str:
  """Short hash of the git commit that holds this package, or "unknown"."""
  command = ["git", "rev-parse", "--short", "HEAD"]
  try:
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
  except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
    return "unknown"
  return done.stdout.strip() if done.returncode == 0 else "unknown"


def device() -> dict[str, Any]:
  """Kind and count of the devices that JAX sees; the mesh is for the caller to fill in."""
  import jax

  return {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "mesh": None}


def cell(record: Record, column: Column) -> str:
  """Text of one cell: "n/a" for None, percentiles with their sample count, a warning beside a degenerate acceptance."""
  _, source, spec = column
  value = source(record) if callable(source) else _at(record, source)
  acceptance = value is not None and source in [f"metrics.{name}" for name in ACCEPTANCE]
  return _text(value, spec) + (_warning(record) if acceptance else "")


def table(records: Sequence[Record], columns: Sequence[Column]) -> Table:
  """The records as a table for the terminal, one row each."""
  result = Table()
  for title, *_ in columns:
    result.add_column(Text(title))
  for record in records:
    result.add_row(*(Text(cell(record, column)) for column in columns))  # Text: brackets in a cell are not markup.
  return result


def markdown(records: Sequence[Record], columns: Sequence[Column]) -> str:
  """The records as a Markdown table, one row each, with the cells of `table`."""
  return grid([title for title, *_ in columns], [[cell(record, column) for column in columns] for record in records])


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Header and rows as a Markdown table."""
  lines = ["| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |" for row in (header, *rows)]
  return "\n".join([lines[0], "|" + " --- |" * len(header), *lines[1:]]) + "\n"


def plot_position_acceptance(records: Sequence[Record], path: str | Path) -> None:
  """Conditional acceptance by draft position as a PNG, one line per data set and temperature; a rerun replaces its line.

  Raises ValueError when no record has a drafter and conditional acceptances.
  """
  curves = _curves(records)
  if not curves:
    raise ValueError("no record with a drafter and metrics.conditional_acceptance")
  figure, axes = _axes(width=7.5)
  hues = list(dict.fromkeys(hue for hue, _ in curves))
  temperatures = sorted({temperature for _, temperature in curves})
  for (hue, temperature), record in curves.items():
    heights = [math.nan if v is None else v for v in record["metrics"]["conditional_acceptance"]]
    label = f"{hue}, T = {temperature:g}{_warning(record)}"
    colour, dash = PALETTE[hues.index(hue) % len(PALETTE)], DASHES[temperatures.index(temperature) % len(DASHES)]
    axes.plot(range(1, len(heights) + 1), heights, dash, color=colour, marker="o", markersize=4, label=label)
  axes.set(xlabel="draft position", ylabel="conditional acceptance (fraction)", ylim=(0, 1.03))
  axes.set_xticks(range(1, max(len(r["metrics"]["conditional_acceptance"]) for r in curves.values()) + 1))
  axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
  figure.savefig(path, format="png", dpi=150)


def plot_speed(records: Sequence[Record], path: str | Path) -> None:
  """Tokens per second of autoregressive and speculative decoding as a PNG, one group per data set and temperature.

  Over a speculative bar stands the recorded speedup, "n/a" where none was recorded. A rerun replaces its bar.
  Raises ValueError when no record has a drafter and tokens per second.
  """
  groups = _speeds(records)
  if not groups:
    raise ValueError("no record with a drafter and metrics.tokens_per_s")
  series = list(dict.fromkeys(["autoregressive", *(name for bars in groups.values() for name in bars)]))
  figure, axes = _axes(width=max(5.0, 1.0 + 0.36 * len(groups) * (len(series) + 1)))
  width = 0.8 / len(series)
  for i, name in enumerate(series):
    at = [g + (i - (len(series) - 1) / 2) * width for g, bars in enumerate(groups.values()) if name in bars]
    bars = [bars[name] for bars in groups.values() if name in bars]
    colour = PALETTE[(i - 1) % len(PALETTE)] if i else "0.7"
    drawn = axes.bar(at, [height for height, _ in bars], 0.94 * width, color=colour, label=name)
    axes.bar_label(drawn, [text for _, text in bars], padding=2, fontsize=8)
  axes.set_xticks(range(len(groups)), [group.replace(", ", "\n") for group in groups])
  axes.tick_params(axis="x", length=0)
  room = 0.5 if len(groups) > 2 else 0.8  # Few groups would else be drawn as walls.
  axes.set(ylabel="tokens per second", xlim=(-room, len(groups) - 1 + room))
  axes.margins(y=0.1)
  axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(series))
  figure.savefig(path, format="png", dpi=150)


def _lossless(record: Record) -> str | None:
  """Whether the contract holds (METRICS.md, "Losslessness contracts"), and by what evidence."""
  contract, same, n, holds = (record["lossless"][k] for k in REQUIRED["lossless"])
  if contract is None or holds is None:
    return None
  z = record["lossless"].get("z")
  evidence = f"z = {z:+.1f}" if z is not None else f"{_text(same)}/{_text(n)} equal"
  return f"{'yes' if holds else 'NO'}: {evidence}"


def _by_position(record: Record) -> str | None:
  """position_acceptance in per cent, slot by slot."""
  rates = record["metrics"].get("position_acceptance")
  return " ".join("n/a" if r is None else f"{100 * r:.0f}" for r in rates) if rates else None


COLUMNS: tuple[Column, ...] = (
  ("data set", "dataset", ""),
  ("T", "temperature", "g"),
  ("drafter", "drafter.name", ""),
  ("accepted_length", "metrics.accepted_length", ".2f"),
  ("position_acceptance, %", _by_position, ""),
  ("tokens_per_s", "metrics.tokens_per_s", ".0f"),
  ("speedup", "metrics.speedup", ".2f"),
  ("lossless", _lossless, ""),
)


def write_report(
  records: Sequence[Record], folder: str | Path, title: str, columns: Sequence[Column] = COLUMNS
) -> Path:
  """Writes report.md and its plots into the folder; returns the path of report.md. ValueError without a record."""
  if not records:
    raise ValueError("a report needs at least one record")
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  parts = [f"# {title}\n", markdown(records, columns)]
  if any(map(_warning, records)):
    parts.append(
      f"⚠ An output holds one token {REPEAT_WARNING} or more times in a row. "
      "Repeats are easy to draft, so the acceptance beside it says little about real text.\n"
    )
  if _speeds(records):
    plot_speed(records, folder / "speed.png")
    parts.append("![Tokens per second, autoregressive and speculative](speed.png)\n")
  if _curves(records):
    plot_position_acceptance(records, folder / "position_acceptance.png")
    parts.append("![Conditional acceptance by draft position](position_acceptance.png)\n")
  parts.append("## Made with\n")
  parts.append("".join(f"- {line}\n" for line in dict.fromkeys(map(_provenance, records))))
  shown = {s.split(".")[1] for _, s, _ in columns if isinstance(s, str) and s.startswith("metrics.")}
  shown = shown.union(*(record["metrics"] for record in records))
  parts.append("## Formulas\n")
  parts.append("".join(f"- `{name}`: {formula}\n" for name, formula in FORMULAS.items() if name in shown))
  path = folder / "report.md"
  path.write_text("\n".join(parts), encoding="utf-8")
  return path


def _plain(value: Any, key: str) -> Any:
  """The value as JSON types; `key` is its path, for the message of the ValueError."""
  if hasattr(value, "tolist"):  # Numpy and JAX, scalars and arrays.
    value = value.tolist()
  if isinstance(value, Mapping):
    if odd := [k for k in value if not isinstance(k, str)]:
      raise ValueError(f"{key or 'record'}: the key {odd[0]!r} is not a string")
    return {k: _plain(v, f"{key}.{k}" if key else k) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v, f"{key}[{i}]") for i, v in enumerate(value)]
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"{key} is {value}; write None for a figure that does not exist")
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise ValueError(f"{key}: a {type(value).__name__} has no place in a results record")


def _missing(record: Record) -> list[str]:
  missing = [key for key in REQUIRED if key not in record]
  for key, inner in REQUIRED.items():
    value = record.get(key)
    if inner and key in record and not (key == "drafter" and value is None):  # Autoregressive runs have no drafter.
      missing += [f"{key}.{k}" for k in inner if not isinstance(value, dict) or k not in value]
  if "metrics" in record and not isinstance(record["metrics"], dict):
    missing.append("metrics (an object)")
  return missing


def _refuse(constant: str) -> None:
  raise ValueError(f"{constant} is no JSON")


def _at(record: Record, path: str) -> Any:
  """The value at a path of keys; None below a None and for a metric not measured, KeyError for any other unknown key."""
  value: Any = record
  for key in path.split("."):
    if value is None:
      return None
    if key not in value and not path.startswith("metrics."):
      raise KeyError(f"no {path} in a results record")
    value = value.get(key)
  return value


def _text(value: Any, spec: str = "") -> str:
  if value is None:
    return "n/a"
  if isinstance(value, Mapping) and set(value) == {"p50", "p90", "p99", "n"}:
    return " / ".join(_text(value[p], spec) for p in ("p50", "p90", "p99")) + f" (n={value['n']})"
  if isinstance(value, (list, tuple)):
    return " ".join(_text(v, spec) for v in value)
  return format(value, spec)


def _warning(record: Record) -> str:
  """What follows an acceptance figure of a degenerate output; empty for a sound one."""
  repeat = record["metrics"].get("longest_repeat") or 0
  return f" ⚠ repeat of {repeat}" if repeat >= REPEAT_WARNING else ""


def _provenance(record: Record) -> str:
  kind, count, mesh = (record["device"][k] for k in REQUIRED["device"])
  used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
  return f"commit {record['commit']}; {used}; {count} × {kind}" + (f", mesh {mesh}" if mesh else "")


def _distinct(records: Sequence[Record]) -> Callable[[Record], str]:
  """Names a run by data set, plus whichever of target, concurrency, schedule and rule differ among the records."""
  names = {"target": "target.name", "concurrency": "concurrency", "schedule": "schedule", "rule": "rule"}
  varied = {name: path for name, path in names.items() if len({_at(r, path) for r in records}) > 1}
  return lambda r: ", ".join([r["dataset"], *(f"{name} {_at(r, path)}" for name, path in varied.items())])


def _curves(records: Sequence[Record]) -> dict[tuple[str, float], Record]:
  """(What decides the colour, temperature) -> the last record of that kind with a curve to draw."""
  drafted = [r for r in records if r["drafter"] and r["metrics"].get("conditional_acceptance")]
  name, several = _distinct(drafted), len({r["drafter"]["name"] for r in drafted}) > 1
  return {(name(r) + (f", {r['drafter']['name']}" if several else ""), r["temperature"]): r for r in drafted}


def _speeds(records: Sequence[Record]) -> dict[str, dict[str, tuple[float, str]]]:
  """Group -> series -> (tokens per second, text over the bar)."""
  drafted = [r for r in records if r["drafter"] and r["metrics"].get("tokens_per_s")]
  name = _distinct(drafted)
  groups: dict[str, dict[str, tuple[float, str]]] = {}
  for r in drafted:
    bars = groups.setdefault(f"{name(r)}, T = {r['temperature']:g}", {})
    rate, gain = r["metrics"]["tokens_per_s"], r["metrics"].get("speedup")
    bars[r["drafter"]["name"]] = rate, f"{_text(gain, '.2f')}×" if gain else "n/a"
    # The matched run is the one the speedup was taken against; a record of another process is the second best.
    plain = rate / gain if gain else _autoregressive(records, r)
    if plain:
      bars["autoregressive"] = plain, ""
  return groups


def _autoregressive(records: Sequence[Record], like: Record) -> float | None:
  """Tokens per second of the last record without a drafter in the same setting."""
  setting = operator.itemgetter("target", "dataset", "temperature", "concurrency")
  rates = [r["metrics"].get("tokens_per_s") for r in records if not r["drafter"] and setting(r) == setting(like)]
  return rates[-1] if rates else None


def _axes(width: float) -> "tuple[Figure, Axes]":
  """A figure of its own (no pyplot, so no state shared with a notebook) and its axes."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, 4), layout="constrained")
  axes = figure.add_subplot()
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(axis="y", color="0.9")
  axes.set_axisbelow(True)
  return figure, axes
