"""
A target's speed beside Hugging Face transformers: the same weights in float32, the same prompts and machine, greedy, one request at once.

  python -m experiments.bench_transformers --config=configs/smollm2/transformers.py --workdir=runs/smollm2_transformers

Transformers decodes by itself and with its prompt lookup, this library by itself and with the drafters of the configuration; all in turn,
prompt by prompt. Needs torch: pip install -e '.[transformers]'.
"""

import gc
import os
import time

import jax
from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common
from experiments.measure import load_prompts
from specdec_jax import report
from specdec_jax.hub.save import save_target

COLUMNS = (
    ("data set", "dataset", ""), ("method", "metrics.method", ""), ("tokens/s", "metrics.tokens_per_s", ".1f"),
    ("over transformers", "metrics.speedup", ".2f"), ("accepted length", "metrics.accepted_length", ".2f"),
    ("texts as the target's", lambda r: f"{r['lossless']['identical']}/{r['lossless']['n']}", ""))


def theirs(config, folder):
  """{method: prompt ids → new ids} of transformers on the weights in `folder`."""
  try:
    import torch
    import transformers
  except ImportError as e:
    raise SystemExit(f"bench_transformers: {e}; pip install -e '.[transformers]'") from e
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  def decode(ids, **options):
    tokens = torch.tensor([ids])
    with torch.inference_mode():
      out = model.generate(
          tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=config.max_new_tokens, do_sample=False,
          pad_token_id=model.config.eos_token_id, **options)
    return out[0, len(ids) :].tolist()

  return {"transformers": decode, "transformers, prompt lookup": lambda ids: decode(ids, prompt_lookup_num_tokens=config.lookup)}


def main(argv):
  del argv
  config, workdir = common.settings()
  folder = workdir / "published"
  plain = specdec_jax.load_target(config.target, stacked=False, transposed=False)
  save_target(folder, plain.config, plain.params, plain.tokenizer)
  del plain
  gc.collect()
  target = specdec_jax.load_target(config.target)
  drafters = {name: specdec_jax.load_drafter(name, target) for name in config.drafters}
  ours = lambda drafter: lambda ids: specdec_jax.generate(target, drafter, [ids], config.max_new_tokens)[0]
  methods = theirs(config, folder) | {"this library": ours(None)} | {f"this library, {name}": ours(d) for name, d in drafters.items()}
  records = []
  screen = rich_console.Console()
  screen.width = max(screen.width, 120)
  with progress.Progress(console=screen) as bar:
    by_set = load_prompts(config, target)
    task = bar.add_task(target.name, total=sum(map(len, by_set.values())) * len(methods) * (1 + config.repeats))
    for dataset, prompts in by_set.items():
      best, texts, rounds = {}, {}, {name: [] for name in methods}
      for i, ids in enumerate(prompts):
        for repeat in range(1 + config.repeats):  # The first one compiles.
          for name, decode in methods.items():
            began = time.perf_counter()
            done = decode(ids)
            seconds = time.perf_counter() - began
            texts[name, i] = done if isinstance(done, list) else done.tokens
            if repeat:
              best[name, i] = min(best.get((name, i), seconds), seconds)
            elif not isinstance(done, list):
              rounds[name].append(done.rounds)
            bar.advance(task)
      speed = {
          name: sum(len(texts[name, i]) for i in range(len(prompts))) / sum(best[name, i] for i in range(len(prompts)))
          for name in methods}
      for name in methods:
        same = sum(texts[name, i] == texts["this library", i] for i in range(len(prompts)))
        drafter = drafters.get(name.removeprefix("this library, "))
        records.append(common.record(
            "bench_transformers", target, drafter and {"name": drafter.name, "hash": drafter.hash}, dataset=dataset, temperature=0.0,
            concurrency=1, n_requests=len(prompts), speculation={"on": drafter is not None, "why": None},
            lossless={"contract": 1, "identical": same, "n": len(prompts), "holds": same == len(prompts)},
            metrics={"method": name, "tokens_per_s": speed[name], "speedup": speed[name] / speed["transformers"], "accepted_length": (
                specdec_jax.metrics.acceptance(rounds[name])["accepted_length"] if drafter else None)},
            notes=f"best of {config.repeats}, load {os.getloadavg()[0]:.1f}, {_versions()}, {jax.default_backend()}"))
        report.append(workdir / "results.jsonl", records[-1])
  screen.print(report.table(records, COLUMNS))
  (workdir / "transformers.md").write_text(report.markdown(records, COLUMNS) + "\n")


def _versions() -> str:
  import torch
  import transformers

  return f"torch {torch.__version__} on {torch.get_num_threads()} threads, transformers {transformers.__version__}"


if __name__ == "__main__":
  common.define("configs/smollm2/transformers.py")
  app.run(main)
