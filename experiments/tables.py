"""Renders the tables and plots of README.md and docs/*.md from results/*.jsonl, in place.

  python -m experiments.tables

A document marks where: a line "<!-- table: NAME -->" and a line "<!-- end -->"; what stands between them is written anew. NAME is
one of TABLES below; its records are results/RUN.jsonl, the results.jsonl of the run whose command a configuration names. A test
fails where a document is not what this gives.
"""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import re
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from experiments import (
  bench_drafters,
  bench_engine,
  bench_kernels,
  bench_transformers,
  calibrate,
  check_lossless,
  comparison,
  plan_mesh,
  plots,
  recall,
  serve_load,
)
from experiments.commands import ROOT, command_of
from experiments.load import throughput
from specdec_jax import report
from specdec_jax.report import Record, grid

TITLES = {"mtp": "MTP-1", "eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2", "hybrid": "hybrid"}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Table:
  """What stands at a mark: the run whose records it shows, and how; `text` gives Markdown or, for a plot, a figure; `where` says
  which records it needs, `source` where they lie if not in results/RUN.jsonl."""

  run: str
  text: Callable[[list[Record]], str | Figure]
  alt: str = ""  # of a plot
  where: Callable[[Record], bool] = lambda record: True
  source: str = ""

  def records(self) -> list[Record]:
    """Those that it shows; none where nothing was measured yet."""
    path = ROOT / (self.source or f"results/{self.run}.jsonl")
    if not path.exists():
      return []
    found = report.read(path) if path.suffix == ".jsonl" else [json.loads(path.read_text(encoding="utf-8"))]
    return list(filter(self.where, found))


def made_with(table: Table, records: Sequence[Record]) -> str:
  """The command, and what it ran on."""
  if table.source:
    return f"`{command_of(table.run)}`, kept in `{table.source}`\n"
  differ = lambda name: ", ".join(dict.fromkeys(map(name, records)))
  device = differ(lambda r: f"{r['device']['count']} × {r['device']['kind']}")
  return f"`{command_of(table.run)}`; commit {differ(lambda r: r['commit'])}; jax {differ(lambda r: r['versions']['jax'])}; {device}\n"


def cells(function, *arguments, **options) -> Callable[[list[Record]], str]:
  """A table of experiments/comparison.py at every temperature, one under the other."""
  def text(records):
    temperatures = sorted({r["temperature"] for r in records})
    return "\n".join(grid(*function(records, *arguments, temperature=t, **options)) for t in temperatures)

  return text


def rows(columns) -> Callable[[list[Record]], str]:
  """A row a record."""
  return lambda records: report.markdown(records, columns)


def pivot(row, column, cell, title: str, also=lambda table: {}) -> Callable[[list[Record]], str]:
  """A row for each row(record), a column for each column(record); `also` adds rows that it makes of {row: {column: record}}."""
  def text(records):
    table = {}
    for r in records:
      table.setdefault(row(r), {})[column(r)] = r
    columns = list(dict.fromkeys(c for found in table.values() for c in found))
    body = [[str(name), *(cell(found[c]) if c in found else "" for c in columns)] for name, found in table.items()]
    body += [[name, *(found.get(c, "") for c in columns)] for name, found in also(table).items()]
    return grid([title, *map(str, columns)], body)

  return text


def block_rule(records) -> str:
  """Accepted lengths under the block rule, which not every run looks at."""
  if not any(r["rule"] == "block" for r in records):
    return "*Not measured yet under the block rule.*\n"
  return grid(*comparison.rules(records, 1.0, "block", TITLES))


def held_out(records) -> str:
  """Nats a token of the embedded target beside those of simpler models."""
  found = records[0]["held_out_nats_per_token"]
  return grid(["held-out nats a token", "target", "bigram", "unigram"], [
      [domain, *(f"{values[m]:.2f}" for m in ("target", "bigram", "unigram"))] for domain, values in found.items()])


def lossless(records) -> str:
  """Each drafter's losslessness over all data sets, draft lengths, batch sizes and settings."""
  body = []
  for name in dict.fromkeys(r["drafter"]["name"] for r in records):
    mine = [r for r in records if r["drafter"]["name"] == name]
    greedy, sampled = ([r for r in mine if (r["temperature"] == 0) == cold] for cold in (True, False))
    total = lambda key, found: sum(r["lossless"][key] for r in found)
    least = min((r["metrics"]["smallest_p"] for r in sampled), default=None)
    body.append([
        name, ", ".join(sorted({str(r["lossless"]["contract"]) for r in mine})), f"{total('identical', greedy)}/{total('n', greedy)}",
        f"{total('holds', sampled)}/{len(sampled)}", str(total("n", sampled)), "n/a" if least is None else f"{least:.2g}"])
  header = ["drafter", "contracts", "greedy texts equal", "sampled settings that hold", "sampled texts", "smallest p of a position"]
  return grid(header, body)


def verify_times(records) -> str:
  """Milliseconds of a verify call by variant and number of tokens, and the speed of plain decoding."""
  body, counts = [], []
  for r in records:
    for variant, seconds in r["metrics"]["verify_seconds"].items():
      counts = list(seconds)
      body.append([str(r["concurrency"]), variant, *(f"{1e3 * s:.2f}" for s in seconds.values())])
  speeds = ", ".join(f"{r['metrics']['tokens_per_s']:.1f} at {r['concurrency']}" for r in records if r["metrics"]["tokens_per_s"])
  header = ["requests at once", "layers, kernels", *(f"{n} token{'s' * (n != '1')} (ms)" for n in counts)]
  return f"{grid(header, body)}\nTarget alone, tokens/s by requests at once: {speeds}.\n"


def load_text(record) -> str:
  m = record["metrics"]
  return f"{throughput(record):.0f} ({m['user_tps']:.0f})" if m["user_tps"] else f"{throughput(record):.0f}"


def schedule_against(table) -> dict[str, dict]:
  """How the asynchronous schedule compares at each concurrency: with the best of the target alone and the fixed lengths, the median of the
  ratios within each turn, as a machine's pace changes between them; and with MTP-1 in speed per user at the same throughput (DSpark
  Figure 7; n/a outside of what was measured)."""
  mine, serial = table.get("asynchronous", {}), table.get("MTP-1", {})
  others = [found for name, found in table.items() if name == "target alone" or name.startswith("fixed")]
  turns = lambda r: np.array(r["metrics"].get("each") or [throughput(r)])
  best = {}
  for c, r in mine.items():
    if found := [o[c] for o in others if c in o]:
      best[c] = f"{np.median(turns(r) / turns(max(found, key=throughput))):.2f}"
  curve = sorted((throughput(r), r["metrics"]["user_tps"]) for r in mine.values() if r["metrics"]["user_tps"])
  matched = {}
  for c, r in serial.items():
    inside = curve and curve[0][0] <= throughput(r) <= curve[-1][0] and r["metrics"]["user_tps"]
    matched[c] = f"{np.interp(throughput(r), *zip(*curve)) / r['metrics']['user_tps']:.2f}" if inside else "n/a"
  return {"asynchronous / best of target alone and fixed": best, "user speed over MTP-1 at its throughput": matched}


def training_parts(record) -> str:
  return ", ".join(f"{name} {share:.0%}" for name, share in record["metrics"]["parts"].items())


def milliseconds(record) -> str:
  m = record["metrics"]
  return ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(m["tokens"], m["seconds"]))


of_dspark = lambda record: record["drafter"]["name"].endswith("dspark")
with_bins = lambda record: of_dspark(record) and "bins" in record["metrics"]["raw"]
soak = lambda record: record["dataset"] == "soak"
closed = lambda record: record["metrics"]["load"] == "closed"
OPEN = (
    serve_load.COLUMNS[0], ("requests/s", "metrics.rate", "g"), *(c for c in serve_load.COLUMNS[1:] if c[0] != "requests at once"))
SPS = (("slots", "concurrency", ""), ("ms of a step by verify tokens", milliseconds, ""))
TRAINING = (("recipe", "drafter.name", ""), ("tokens/s", "metrics.training_tokens_per_s", ".0f"), ("share of a step", training_parts, ""))
SOAK = tuple(
    (name, f"metrics.{name}", "") for name in ("seconds", "submitted", "served", "cancelled", "lost", "wrong", "failures", "compiled"))

serve = functools.partial(
    pivot, lambda r: r["metrics"]["method"], lambda r: r["concurrency"], load_text, "tokens/s of all (of a user) by requests at once",
    schedule_against)
advice = functools.partial(
    pivot, lambda r: r["schedule"], lambda r: r["concurrency"],
    lambda r: f"{r['metrics']['throughput']:.0f} ({r['metrics']['user_tps']:.0f})",
    "tokens/s of all (of a user) by requests at once")
protocol = functools.partial(
    pivot, lambda r: f"{r['dataset']}, {r['metrics']['length']}", lambda r: r["concurrency"],
    lambda r: f"{r['metrics']['speedup']:.2f} ({r['lossless']['identical']}/{r['lossless']['n']})",
    "speedup (texts equal) by requests at once")
lengths = cells(comparison.accepted_lengths, ("dflash", "eagle3"), titles=TITLES)

TABLES = {
    "held_out": Table("tiny_target", held_out, source="specdec_jax/assets/tiny/training.json"),
    "tiny_hybrid_verify_times": Table("tiny_hybrid_speed", verify_times),
    "kernels": Table("bench_kernels", rows(bench_kernels.COLUMNS)),
    "training_speed": Table("tiny_training_speed", rows(TRAINING)),
    "lossless_bfloat16": Table("tiny_lossless_bfloat16", lossless),
    "lossless_fault": Table("tiny_lossless_fault", rows(check_lossless.COLUMNS)),
    **{f"advise_{name}": Table(f"{name}_advise", advice()) for name in ("h200", "v5e", "v6e")},
    "recall": Table("tiny_recall", rows(recall.COLUMNS)),
    "tiny_soak": Table("tiny_soak", rows(SOAK), where=soak),
    "depth": Table("tiny_depth", cells(comparison.accepted_lengths, ("dflash_5",))),
    "length": Table("tiny_length", cells(comparison.accepted_lengths, ("markov_8",))),
    "ablation": Table("tiny_ablation", cells(comparison.accepted_lengths, ("backbone",))),
    "common_loss": Table("tiny_common_loss", lengths),
    "core_time": Table("tiny_core_time", lengths),
    "smollm2_transformers": Table("smollm2_transformers", rows(bench_transformers.COLUMNS)),
    "qwen3_4b_sps": Table("qwen3_4b_sps", rows(SPS)),
    "wide_sps": Table("wide_sps", rows(SPS)),
    "qwen3_4b_overhead": Table("qwen3_4b_overhead", rows(bench_drafters.COLUMNS)),
}
TABLES |= {f"{name}_lengths": Table(f"{name}_compare", lengths) for name in ("qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b")}
TABLES |= {run: Table(run, rows(plan_mesh.COLUMNS)) for run in (
    "qwen3_4b_plan_v5e", "qwen3_4b_plan_v6e", "qwen3_4b_plan_h200", "qwen3_14b_plan", "qwen3_8_27b_plan_v5p", "qwen3_8_27b_plan_h200")}
for name in ("tiny", "smollm2"):
  TABLES |= {
      f"{name}_lengths": Table(f"{name}_compare", lengths),
      f"{name}_positions": Table(f"{name}_compare", cells(comparison.conditional_acceptances, titles=TITLES)),
      f"{name}_positions_plot": Table(
          f"{name}_compare", functools.partial(plots.position_acceptance, temperature=1.0, titles=TITLES),
          "Conditional acceptance by draft position"),
      f"{name}_rules": Table(f"{name}_compare", block_rule),
      f"{name}_speeds": Table(f"{name}_compare", cells(comparison.speeds, titles=TITLES)),
      f"{name}_lossless": Table(f"{name}_lossless", lossless),
      f"{name}_calibration": Table(f"{name}_calibrate", rows(calibrate.COLUMNS)),
      f"{name}_thresholds_plot": Table(
          f"{name}_calibrate", plots.threshold_sweeps, "Accepted and rejected drafts a round against the threshold on survival", of_dspark),
      f"{name}_reliability_plot": Table(
          f"{name}_calibrate", lambda records: plots.reliability(records[-1]),
          "Outcome against survival by position, raw and calibrated", with_bins),
      f"{name}_serve": Table(f"{name}_serve", serve(), where=closed),
      f"{name}_serve_plot": Table(f"{name}_serve", plots.load_curves, "Throughput, speed per user and verify length under load", closed),
      f"{name}_serve_open": Table(f"{name}_serve", rows(OPEN), where=lambda record: not closed(record)),
      f"{name}_overhead": Table(f"{name}_overhead", rows(bench_drafters.COLUMNS)),
      f"{name}_engine": Table(f"{name}_engine", rows(bench_engine.COLUMNS)),
      f"{name}_sps": Table(f"{name}_sps", rows(SPS)),
      f"{name}_advise": Table(f"{name}_advise", advice()),
      f"{name}_verify_times": Table(f"{name}_speed", verify_times),
      f"{name}_protocol": Table(f"{name}_protocol", protocol(), where=lambda record: not soak(record) and record["speculation"]["on"]),
  }


def digest(records: Sequence[Record]) -> str:
  """Of the records and of how they are drawn."""
  text = json.dumps(list(records), sort_keys=True) + pathlib.Path(plots.__file__).read_text(encoding="utf-8")
  return hashlib.sha256(text.encode()).hexdigest()[:24]


def save(figure: Figure, path: pathlib.Path, mark: str) -> None:
  """The figure as a PNG of 256 colours with `mark` in it."""
  drawn, info = io.BytesIO(), PngInfo()
  figure.savefig(drawn, format="png", dpi=100)
  info.add_text("Description", mark)
  path.parent.mkdir(exist_ok=True)
  Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
      path, pnginfo=info, optimize=True)


def between(name: str, folder: pathlib.Path, draw: bool) -> str:
  """What stands at a mark of a document in `folder`; with `draw` a plot is drawn anew where its picture is of other records."""
  table = TABLES[name]
  records = table.records()
  if not records:
    return f"*Not measured yet: `{command_of(table.run)}`, whose results.jsonl becomes results/{table.run}.jsonl.*\n"
  if not table.alt:
    return f"{table.text(records)}\n{made_with(table, records)}"
  picture, mark = ROOT / "docs" / f"{name}.png", digest(records)
  if draw and not (picture.exists() and mark.encode() in picture.read_bytes()):
    save(table.text(records), picture, mark)
  return f"![{table.alt}]({picture.relative_to(folder).as_posix()})\n\n{made_with(table, records)}"


def rendered(path: pathlib.Path, draw: bool = False) -> str:
  """The document with every mark's text as it should be. Raises ValueError for a mark that names no table."""
  def write(found):
    if found[2] not in TABLES:
      raise ValueError(f"{path.name}: no table {found[2]!r}; there are {', '.join(TABLES)}")
    return f"{found[1]}{between(found[2], path.parent, draw)}{found[4]}"

  return MARKED.sub(write, path.read_text(encoding="utf-8"))


def documents() -> list[pathlib.Path]:
  return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
  for document in documents():
    document.write_text(rendered(document, draw=True), encoding="utf-8")
