"""From a target folder and a file of prompts to a trained, calibrated and exported drafter with its report.

  python -m experiments.train_my_drafter --config=configs/tiny/my_drafter.py --config.target=FOLDER --config.prompts=FILE \
    --workdir=runs/mine

The prompts are a JSONL of {"turns": ["…"]}. A share of them, drawn by a hash of the text, is kept from training: half of that is for
calibration, the other half for the report. WORKDIR/drafter is what load_drafter reads, WORKDIR/report.md says how long its accepted
blocks are, how fast it decodes, whether the texts are the target's own and how sure its confidences are. Started again in the same
folder, it goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil

from absl import app
from ml_collections import ConfigDict
from rich import print as show

import specdec_jax
from experiments import calibrate, check_lossless, common, measure, recipes, train_drafter
from specdec_jax import report
from specdec_jax.data.prompts import read_turns


def split(path: str, share: float, folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Writes the prompts into training.jsonl, calibration.jsonl and report.jsonl by a hash of their text; equal prompts stay together.
  Raises ValueError where a part has fewer than two."""
  parts = {name: [] for name in ("training", "calibration", "report")}
  for text in dict.fromkeys(read_turns(path)):
    at = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
    parts["training" if at >= share else "calibration" if at < share / 2 else "report"].append(text)
  if short := [name for name, texts in parts.items() if len(texts) < 2]:
    raise ValueError(f"{path}: too few prompts for {' and '.join(short)}; give more, or another held_out than {share:g}")
  for name, texts in parts.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in texts), encoding="utf-8")
  show({name: len(texts) for name, texts in parts.items()})
  return {name: folder / f"{name}.jsonl" for name in parts}


def encoded(config, target, path: pathlib.Path) -> dict[str, list[list[int]]]:
  """The prompts of a part that fit a row, as token ids under one name."""
  source = ConfigDict(dict(prompts={"prompts": str(path)}, prompts_per_dataset=config.prompts_per_part, system=config.system))
  room = config.recipe.row_length - config.recipe.max_new_tokens
  return {"prompts": [p for p in measure.load_prompts(source, target)["prompts"] if len(p) <= room]}


def main(argv):
  del argv
  config, workdir = common.settings()
  if not config.prompts:
    raise SystemExit('train_my_drafter: no prompts: --config.prompts=FILE, a JSONL of {"turns": ["…"]}')
  try:
    target = specdec_jax.load_target(config.target)
    mask = config.recipe.mask_token or recipes.unused_token(target)
    parts = split(config.prompts, config.held_out, workdir)
  except (FileNotFoundError, ValueError) as e:
    raise SystemExit(f"train_my_drafter: {e}") from e
  recipe = config.recipe.copy_and_resolve_references()
  recipe.target, recipe.name, recipe.system, recipe.mask_token = config.target, "drafter", config.system, mask
  recipe.prompts, recipe.evaluation = str(parts["training"]), ConfigDict({"prompts": str(parts["calibration"])})
  trained = train_drafter.train(recipe, workdir / "training")
  folder = workdir / "drafter"
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(trained, folder)

  load = lambda: dataclasses.replace(specdec_jax.load_drafter(folder, target), name="drafter")
  fitted, calibrated = calibrate.calibrated(config.calibration, target, load(), encoded(config, target, parts["calibration"]))
  fitted.save(folder)
  drafter = load()  # With its calibration.
  prompts = encoded(config, target, parts["report"])["prompts"]
  records, tick = [], lambda note: None
  for temperature in config.temperatures:
    runs = measure.measure(config, target, [None, drafter], prompts, temperature, tick, ("token",))
    records += [measure.result("train_my_drafter", config, target, "prompts", prompts, temperature, run, runs[0]) for run in runs]
  lengths = [(drafter, check_lossless.lengths_of(config.lossless, drafter))]
  checks = list(check_lossless.checked(config.lossless, target, lengths, {"prompts": prompts[: config.lossless.requests]}, tick))
  (workdir / "results.jsonl").unlink(missing_ok=True)
  for r in (*records, *checks, *calibrated):
    report.append(workdir / "results.jsonl", r)
  path = report.write_report(records, workdir, f"A drafter for {target.name}")
  with path.open("a", encoding="utf-8") as f:
    f.write(f"\n## Losslessness\n\n{report.markdown(checks, check_lossless.COLUMNS)}")
    f.write(f"\n## Confidence\n\n{report.markdown(calibrated[-1:], calibrate.COLUMNS)}")
  show(f"drafter: {folder}   report: {path}")
  if not all(r["lossless"]["holds"] for r in (*checks, *(x for x in records if x["drafter"]))):
    raise SystemExit("not lossless: see the report")


if __name__ == "__main__":
  common.define("configs/tiny/my_drafter.py")
  app.run(main)
