"""Documents say what the results say; configurations name the commands that make them."""

import importlib
import json
import re

import pytest

from experiments import commands, comparison, tables
from specdec_jax import report


@pytest.mark.parametrize("path", tables.documents(), ids=lambda p: p.name)
def test_documents_are_what_the_results_give(path):
  assert path.read_text(encoding="utf-8") == tables.rendered(path), f"{path.name} has drifted: python -m experiments.tables"


def test_plots_are_of_the_records():
  shown = {name for path in tables.documents() for _, name, *_ in tables.MARKED.findall(path.read_text(encoding="utf-8"))}
  for name in shown:
    table = tables.TABLES[name]
    picture = tables.ROOT / "docs" / f"{name}.png"
    if table.alt and table.records():
      data = picture.read_bytes()
      assert tables.digest(table.records()).encode() in data, f"{picture.name} is of other records: python -m experiments.tables"
      assert len(data) < 60_000
  assert {p.stem for p in (tables.ROOT / "docs").glob("*.png")} <= shown


def test_a_change_of_a_record_shows(tmp_path, monkeypatch):
  """A record that changes, a text between the marks that does, and a mark that names nothing."""
  page, results = tmp_path / "page.md", tmp_path / "x.jsonl"
  line = {"metrics": {"training_tokens_per_s": 1000.0, "parts": {"loss": 0.5}}, "drafter": {"name": "tiny/dspark"}, "commit": "abc",
          "versions": {"jax": "1"}, "device": {"kind": "cpu", "count": 2}}
  results.write_text(json.dumps(line) + "\n")
  monkeypatch.setitem(tables.TABLES, "x", tables.Table("tiny_training_speed", tables.rows(tables.TRAINING), source=str(results)))
  page.write_text("before\n<!-- table: x -->\n<!-- end -->\nafter\n")
  first = tables.rendered(page)
  assert "| tiny/dspark | 1000 | loss 50% |" in first and first.startswith("before\n") and first.endswith("<!-- end -->\nafter\n")
  page.write_text(first.replace("1000", "2000"))
  assert tables.rendered(page) == first
  line["metrics"]["training_tokens_per_s"] = 1001.0
  results.write_text(json.dumps(line) + "\n")
  assert tables.rendered(page) == first.replace("1000", "1001")
  results.unlink()
  assert "Not measured yet: `python -m experiments.bench_training" in first.replace(first, tables.rendered(page))
  page.write_text("<!-- table: nothing -->\n<!-- end -->\n")
  with pytest.raises(ValueError, match="no table 'nothing'"):
    tables.rendered(page)


def test_results_hold_no_paths_of_a_machine_and_belong_to_a_command():
  for path in (tables.ROOT / "results").glob("*.jsonl"):
    assert commands.command_of(path.stem)
    assert not re.search(r'"(/|[A-Z]:\\\\)', path.read_text(encoding="utf-8")), f"{path.name} holds an absolute path"
    assert all(
        {"experiment", "config", "commit", "versions", "device", "target", "drafter", "metrics"} <= set(r) for r in report.read(path))


@pytest.mark.parametrize("path", commands.configs())
def test_every_configuration_names_its_command(path):
  found = commands.commands(path)
  assert found, f"{path} names no command"
  text = (commands.ROOT / path).read_text(encoding="utf-8").split('"""')[1]
  assert re.search(r"(?i)core|accelerator|device|GPU|seconds", text), f"{path} does not say what it runs on"
  assert re.search(r"(?i)second|minute|hour|timed", text) or path.startswith("configs/kernels/"), f"{path} does not say how long it takes"
  for c in found:
    assert c.config == path
    assert (commands.ROOT / "experiments" / f"{c.module}.py").exists(), c
  module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
  for variant in {c.variant for c in found} | {"smoke"}:
    assert module.get_config(variant or "full")


def test_runs_are_named_once():
  runs = [c.run for path in commands.configs() for c in commands.commands(path)]
  assert len(runs) == len(set(runs))
  assert {t.run for t in tables.TABLES.values()} <= set(runs)


def rounds(*emitted):
  return [(3, e - 1, e) for e in emitted]


def recorded(name, dataset, requests, **metrics):
  """A record of requests, each a list of rounds."""
  from specdec_jax.metrics import acceptance

  return {"drafter": {"name": name}, "dataset": dataset, "temperature": 0.0, "rule": "token", "metrics": {
      **acceptance(requests), "by_request": [(len(r), sum(e for _, _, e in r)) for r in requests], **metrics}}


def test_comparison_over_training_seeds():
  """Two documents, two seeds of one drafter: rounds of both count, by document and data set, none is lost or swapped."""
  made = [
      recorded("tiny/base", "a", [rounds(1, 1), rounds(2)], tokens_per_s=10.0, speedup=1.0),
      recorded("tiny/base", "b", [rounds(2), rounds(2)], tokens_per_s=20.0, speedup=2.0),
      recorded("tiny/mine", "a", [rounds(2), rounds(2)], tokens_per_s=20.0, speedup=2.0),
      recorded("tiny/mine", "b", [rounds(4), rounds(4)], tokens_per_s=20.0, speedup=2.0),
      recorded("tiny/mine, training seed 1", "a", [rounds(3, 3), rounds(1)], tokens_per_s=40.0, speedup=4.0),
      recorded("tiny/mine, training seed 1", "b", [rounds(2), rounds(2)], tokens_per_s=20.0, speedup=2.0)]
  header, rows = comparison.accepted_lengths(made, ("base",), 0.0, {"base": "Base"})
  found = dict(zip(header, rows[1], strict=True))
  assert rows[0][0] == "Base" and found["a"].startswith("2.20 (") and found["b"].startswith("3.00 (")  # 11 tokens in 5 rounds, 12 in 4.
  assert (found["macro"], found["macro by training seed"]) == ("2.60", "3.00, 2.17") and (
      abs(float(found["ratio to Base"].split()[0]) - 1.575) < 0.006)
  _, rows = comparison.conditional_acceptances(made, 0.0)
  assert rows[3][:2] == ["mine", "b"] and rows[3][2:] == ["100", "50", "100"]
  _, rows = comparison.speeds(made, 0.0)
  assert rows[1] == ["mine", "20", "20", "2.00"]
  for r in made:
    del r["metrics"]["by_request"]
  assert comparison.accepted_lengths(made, ("base",), 0.0)[1][1][1:3] == ["2.20", "3.00"]  # No documents, no interval.
  with pytest.raises(ValueError, match="base has no record of b"):
    comparison.grouped([r for r in made if r["drafter"]["name"] != "tiny/base" or r["dataset"] == "a"], 0.0)


def test_the_schedule_against_the_others():
  """The ratio to the best of the others, and speed per user where both have the same throughput, by hand."""
  at = lambda tokens, user: {"metrics": {"tokens_per_s": tokens, "user_tps": user}}
  found = tables.schedule_against({
      "target alone": {1: at(100.0, 100.0), 4: at(200.0, 50.0)}, "fixed 2": {1: at(120.0, 120.0), 4: at(150.0, 40.0)},
      "MTP-1": {1: at(130.0, 130.0), 4: at(220.0, 55.0)}, "asynchronous": {1: at(150.0, 150.0), 4: at(250.0, 65.0)}})
  best, matched = found.values()
  assert best == {1: "1.25", 4: "1.25"}
  each = lambda *turns: {"metrics": {**at(turns[1], 1.0)["metrics"], "each": turns}}  # The pace halves, and doubles again.
  best, _ = tables.schedule_against({
      "target alone": {1: each(100.0, 50.0, 100.0)}, "fixed 2": {1: each(90.0, 45.0, 90.0)},
      "asynchronous": {1: each(110.0, 90.0, 110.0)}}).values()
  assert best == {1: "1.10"}
  assert matched == {1: "n/a", 4: f"{(150 + 0.7 * (65 - 150)) / 55:.2f}"}  # 220 lies 0.7 of the way from 150 to 250.
