"""What the evaluations of published checkpoints share.

Weights are folders named like their repositories, in the folder where the command runs:
`hf download deepseek-ai/dspark_qwen3_4b_block7 --local-dir deepseek-ai/dspark_qwen3_4b_block7`, likewise the target's.
Prompts are eval_datasets/SET.jsonl, one {"turns": ["…"]} a line, or --config.prompts.SET=PATH. The settings are those of the published
evaluation: temperature 1, no system prompt, no thinking, batch 1.
"""

import ml_collections

from configs.tiny import calibrate as tiny_calibrate
from configs.tiny import compare as tiny_compare
from configs.tiny import serve as tiny_serve

SETS = {
    "gsm8k": 500, "math500": 500, "aime25": 30, "mbpp": 256, "humaneval": 164, "livecodebench": 500, "mt-bench": 80, "alpaca": 500,
    "arena-hard-v2": 500}


def drafter(method: str, model: str) -> str:
  """The repository of a published drafter; method: eagle3, dflash or dspark, model: as in qwen3_4b."""
  return f"deepseek-ai/{method}_{model}_{'ttt7' if method == 'eagle3' else 'block7'}"


def _published(c: ml_collections.ConfigDict, target: str, sets) -> ml_collections.ConfigDict:
  c.target, c.dtype, c.seed = target, "bfloat16", 980406
  c.chat = ml_collections.ConfigDict(dict(enable_thinking=False))
  c.prompts = ml_collections.ConfigDict({name: f"eval_datasets/{name}.jsonl" for name in sets})
  c.prompts_per_dataset = max(SETS[name] for name in sets)
  return c


def compare(target: str, model: str, variant: str) -> ml_collections.ConfigDict:
  """Table 1 and Figure 2 of the DSpark paper for one target."""
  c = tiny_compare.get_config(variant)
  if variant == "full":
    c = _published(c, target, SETS)
    c.drafters = ml_collections.ConfigDict({m: (drafter(m, model),) for m in ("eagle3", "dflash", "dspark")})
    c.temperatures, c.rules, c.batch, c.max_new_tokens = (1.0,), ("token",), 1, 2048
  return c


def calibrate(target: str, model: str, variant: str) -> ml_collections.ConfigDict:
  """Figures 5 and 6."""
  c = tiny_calibrate.get_config(variant)
  if variant == "full":
    c = _published(c, target, ("gsm8k", "mbpp", "mt-bench"))
    c.drafters, c.samples, c.batch, c.max_new_tokens = (drafter("dspark", model),), 1, 16, 2048
  return c


def serve(target: str, model: str, variant: str) -> ml_collections.ConfigDict:
  """Figures 7 and 8, with one draft of Eagle3 for MTP-1, which no checkpoint is published of."""
  c = tiny_serve.get_config(variant)
  if variant == "full":
    c = _published(c, target, ("gsm8k", "mbpp", "mt-bench"))
    fixed = lambda method, n: dict(drafter=drafter(method, model), schedule="fixed", draft_length=n)
    c.methods = ml_collections.ConfigDict({
        "target alone": dict(drafter="", schedule="fixed"), "Eagle3, 1 draft": fixed("eagle3", 1), "fixed 2": fixed("dspark", 2),
        "fixed 4": fixed("dspark", 4), "fixed 7": fixed("dspark", 7),
        "asynchronous": dict(drafter=drafter("dspark", model), schedule="asynchronous")})
    c.temperature, c.needs, c.max_new_tokens, c.max_length, c.context = 1.0, ("plain",), (256, 512, 1024), 4096, 1000
    c.concurrencies = (1, 2, 4, 8, 16, 32, 64, 128)
  return c
