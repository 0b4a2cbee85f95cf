"""Records that are refused, tables that agree, plots that show something, reports that say how they were made."""

import copy
import io
import json
import re

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from specdec_jax import metrics, report

WORKED = metrics.acceptance([[(4, 4, 5), (4, 0, 1), (4, 2, 3)], [(4, 1, 2)]])


def record(**changes):
  base = {
    "experiment": "quickstart",
    "config": "configs/tiny/quickstart.py",
    "overrides": {},
    "commit": "abc1234",
    "versions": {"python": "3.11.2", "jax": "0.10.2", "flax": "0.12.8"},
    "device": {"kind": "cpu", "count": 2, "mesh": None},
    "seed": 0,
    "target": {"name": "tiny", "hash": "00ff"},
    "drafter": {"name": "tiny/dspark", "hash": "ff00"},
    "dataset": "maths",
    "temperature": 0.0,
    "concurrency": 8,
    "schedule": "fixed",
    "rule": "token",
    "n_requests": 2,
    "n_rounds": 4,
    "speculation": {"on": True, "why": None},
    "lossless": {"contract": 1, "identical": 2, "n": 2, "holds": True},
    "compile": {"count": 2, "seconds": 9.1},
    "metrics": {**WORKED, "tokens_per_s": 200.0, "speedup": 1.6, "longest_repeat": 3},
    "notes": "",
  }
  return {**copy.deepcopy(base), **changes}


def with_metrics(**changes):
  return record(metrics={**record()["metrics"], **changes})


def cells(markdown):
  return [re.split(r" (?<!\\)\| ", line[2:-2]) for i, line in enumerate(markdown.splitlines()) if i != 1]


def test_record_survives_the_file(tmp_path):
  path = tmp_path / "new" / "results.jsonl"
  report.append(path, record())
  report.append(path, with_metrics(accepted_length=np.float32(2.75), accepted_histogram=np.array([1, 1, 1, 0, 1])))
  assert report.read(path) == [record(), record()]
  assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("key", report.REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
  without = record()
  del without[key]
  with pytest.raises(ValueError, match=rf"lacks {key}"):
    report.append(tmp_path / "r", without)
  assert not (tmp_path / "r").exists()


def test_keys_missing_inside_are_named_and_only_the_drafter_may_be_null(tmp_path):
  with pytest.raises(ValueError, match=r"lacks drafter\.hash, lossless\.n, lossless\.holds$"):
    report.append(tmp_path / "r", record(drafter={"name": "x"}, lossless={"contract": 1, "identical": 2}))
  with pytest.raises(ValueError, match=r"lacks target\.name, target\.hash"):
    report.append(tmp_path / "r", record(target=None))
  report.append(tmp_path / "r", record(drafter=None))


@pytest.mark.parametrize(
  "changes, path",
  [
    ({"accepted_length": float("nan")}, r"metrics\.accepted_length is nan"),
    ({"conditional_acceptance": [0.5, np.float32("inf")]}, r"metrics\.conditional_acceptance\[1\] is inf"),
    ({"ece": {"bins": np.array([0.1, np.nan])}}, r"metrics\.ece\.bins\[1\] is nan"),
    ({"loss": object()}, r"metrics\.loss: a object"),
    ({"by_length": {3: 1.0}}, r"metrics\.by_length: the key 3"),
  ],
)
def test_values_json_cannot_hold_are_refused(tmp_path, changes, path):
  with pytest.raises(ValueError, match=path):
    report.append(tmp_path / "r", with_metrics(**changes))
  assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("line", ['{"a": 1', "[1]", '{"a": NaN}', "", b"\xff"])
def test_a_bad_line_is_located(tmp_path, line):
  path = tmp_path / "results.jsonl"
  line = line if isinstance(line, bytes) else line.encode()
  path.write_bytes(b"{}\n" + line + b"\n{}\n")
  with pytest.raises(ValueError, match=r"results\.jsonl:2: "):
    report.read(path)


def test_provenance():
  assert {"python", "jax", "flax", "optax", "numpy", "specdec_jax"} == set(report.versions())
  assert report.versions()["numpy"] == np.__version__
  assert re.fullmatch(r"[0-9a-f]{7,}|unknown", report.commit())
  assert set(report.device()) == set(report.REQUIRED["device"])
  json.dumps(report.device())


def test_commit_never_raises(monkeypatch):
  monkeypatch.setenv("PATH", "/nonexistent")
  assert report.commit() == "unknown"


def test_table_and_markdown_agree():
  latency = metrics.percentiles([0.1, 0.2])
  records = [record(), with_metrics(speedup=None, tpot=latency), record(drafter=None, notes="[red]a|b")]
  columns = (*report.COLUMNS, ("tpot (s)", "metrics.tpot", ".2f"), ("notes", "notes", ""))
  columns += (("conditional", "metrics.conditional_acceptance", ".2f"), ("twice", lambda r: 2 * r["seed"], "d"))
  console = Console(width=1000, record=True, file=io.StringIO())
  console.print(report.table(records, columns))
  drawn = [re.split(r"\s*[│┃]\s+", line.strip("│┃ ")) for line in console.export_text().splitlines() if line[0] in "│┃"]
  written = [[c.replace("\\|", "|") for c in row] for row in cells(report.markdown(records, columns))]
  assert [[c.strip() for c in row] for row in drawn] == written
  by_title = [dict(zip(written[0], row, strict=True)) for row in written[1:]]
  assert [row["accepted_length"] for row in by_title] == ["2.75"] * 3
  assert [row["speedup"] for row in by_title] == ["1.60", "n/a", "1.60"]
  assert [row["drafter"] for row in by_title] == ["tiny/dspark", "tiny/dspark", "n/a"]
  assert by_title[0]["lossless"] == "yes: 2/2 equal"
  assert by_title[0]["conditional"] == "0.75 0.67 0.50 1.00"
  assert by_title[1]["tpot (s)"] == "0.15 / 0.19 / 0.20 (n=2)"  # C117: the sample count is shown.


def test_no_samples_show_as_not_available():
  assert report.cell(with_metrics(tpot=metrics.percentiles([])), ("", "metrics.tpot", ".2f")) == "n/a / n/a / n/a (n=0)"


def test_a_mistyped_column_fails():
  with pytest.raises(KeyError, match="datset"):
    report.markdown([record()], [("data set", "datset", "")])


def records_of_two_domains():
  runs = [record(dataset=d, temperature=t) for d in ("maths", "stories") for t in (0.0, 1.0)]
  return [*runs, record(drafter=None)]


@pytest.mark.parametrize("plot", [report.plot_position_acceptance, report.plot_speed])
def test_plots_show_something(tmp_path, plot):
  plot(records_of_two_domains(), tmp_path / "a.png")
  pixels = imread(tmp_path / "a.png")
  assert min(pixels.shape[:2]) > 300
  assert pixels[..., :3].std() > 0.02
  changed = records_of_two_domains()
  changed[1]["metrics"] |= {"conditional_acceptance": [0.2, 0.1, None, 0.3], "tokens_per_s": 900.0}
  plot(changed, tmp_path / "b.png")
  assert not np.array_equal(pixels, imread(tmp_path / "b.png"))
  with pytest.raises(ValueError, match="drafter"):
    plot([record(drafter=None)], tmp_path / "c.png")


def test_speed_bars_take_the_baseline_of_the_speedup():
  plain = record(drafter=None, metrics={"tokens_per_s": 50.0})
  assert report._speeds([record(), plain]) == {
    "maths, T = 0": {"tiny/dspark": (200.0, "1.60×"), "autoregressive": (125.0, "")}
  }
  unmatched = with_metrics(speedup=None)
  assert report._speeds([unmatched, plain])["maths, T = 0"] == {
    "tiny/dspark": (200.0, "n/a"),
    "autoregressive": (50.0, ""),
  }


def test_report_says_how_it_was_made(tmp_path):
  path = report.write_report(records_of_two_domains(), tmp_path / "out", "Quickstart")
  text = path.read_text()
  assert path.name == "report.md" and text.startswith("# Quickstart\n")
  for image in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
    assert (path.parent / image).stat().st_size > 0
  assert text.count("](") == 2
  assert text.count("commit abc1234; python 3.11.2, jax 0.10.2, flax 0.12.8; 2 × cpu") == 1
  for name in record()["metrics"]:  # C109: all names and formulas.
    assert f"- `{name}`: {metrics.FORMULAS[name]}" in text
  assert "`brier`" not in text and "⚠" not in text


def test_report_without_a_drafter_has_no_plots(tmp_path):
  text = report.write_report([record(drafter=None)], tmp_path, "Plain").read_text()
  assert "![" not in text and not list(tmp_path.glob("*.png"))
  with pytest.raises(ValueError, match="record"):
    report.write_report([], tmp_path, "Empty")


@pytest.mark.parametrize("repeat, warned", [(100, True), (50, True), (49, False)])
def test_degenerate_output_is_warned_of(tmp_path, repeat, warned):
  """C119: the warning stands in the very cell of the acceptance figure."""
  text = report.write_report([record(), with_metrics(longest_repeat=repeat)], tmp_path, "R").read_text()
  titles, sound, suspect = cells("\n".join(line for line in text.splitlines() if line.startswith("|")))
  at = titles.index("accepted_length")
  assert sound[at] == "2.75"
  assert suspect[at] == (f"2.75 ⚠ repeat of {repeat}" if warned else "2.75")


def test_no_warning_beside_a_figure_that_does_not_exist():
  degenerate = with_metrics(longest_repeat=100, accepted_length=None)
  assert report.cell(degenerate, ("", "metrics.accepted_length", ".2f")) == "n/a"


def test_default_columns_have_formulas():
  named = [source.split(".")[1] for _, source, _ in report.COLUMNS if str(source).startswith("metrics.")]
  assert named and set(named) <= set(metrics.FORMULAS)
