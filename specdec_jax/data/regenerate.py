"""Responses of the target itself, what drafters are trained on: resumable, with every unusable row counted by reason."""

import io
import json
import pathlib
from collections import Counter
from collections.abc import Sequence

import jax
from rich import progress

from specdec_jax import sharding
from specdec_jax.decode import Completion, NoPromptServed, generate
from specdec_jax.facts import claim
from specdec_jax.models.target import Target


def regenerate(
    target: Target, prompts: Sequence[tuple[str, Sequence[int]]], path: pathlib.Path, batch: int, max_new_tokens: int,
    temperature: float = 1.0, seed: int = 0,
) -> Counter:
  """Answers (name, token ids) prompts in order and appends {"index", "name", "prompt", "answer"} lines to `path`.

  Prompts that `path` already answers are skipped, so a killed run goes on where it stopped; request i always has the seed
  seed + i. Answers cut at max_new_tokens are kept and counted as "cut"; empty ones (an end of sequence at once) and
  prompts in error are counted and written with their reason, never used. Returns the counts by reason. What the answers
  were made with stands beside them; raises ValueError for a file made with something else, or for other prompts.
  """
  made_from = {"target": target.hash, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
  first = jax.process_index() == 0  # The others decode with it; one writes.
  if first:
    claim(path.with_suffix(".json"), made_from, started=path.exists())
  done = {row["index"]: row["prompt"] for row in read_responses(path, usable=False)} if path.exists() else {}
  changed = [i for i, prompt in done.items() if i >= len(prompts) or prompt != list(prompts[i][1])]
  if changed:
    raise ValueError(f"{path} answers other prompts than these (first at {changed[0]}): remove it, or take another work folder")
  todo = [i for i in range(len(prompts)) if i not in done]
  sharding.barrier("responses that are there")
  with path.open("a+") if first else io.StringIO() as out, progress.Progress(disable=not first) as bar:
    if out.tell() and not path.read_text().endswith("\n"):
      out.write("\n")  # A killed run left half a line.
    task = bar.add_task("regenerating", total=len(prompts), completed=len(done))
    for start in range(0, len(todo), batch):
      part = todo[start : start + batch]
      filled = part + part[:1] * (batch - len(part))  # One shape, one executable.
      replies = _answer(target, [prompts[i][1] for i in filled], max_new_tokens, temperature, [seed + i for i in filled])
      for i, reply in zip(part, replies):
        reason = reply.error or ("empty" if len(reply.tokens) < 2 else "cut" if reply.finish_reason == "length" else "complete")
        out.write(json.dumps(
            {"index": i, "name": prompts[i][0], "prompt": list(prompts[i][1]), "answer": reply.tokens, "reason": reason}) + "\n")
      out.flush()
      bar.update(task, advance=len(part))
  sharding.barrier("responses")
  return Counter(row["reason"] for row in read_responses(path, usable=False))


def _answer(target: Target, prompts, max_new_tokens: int, temperature: float, seeds: list[int]) -> list[Completion]:
  """`generate`, with an error row a prompt where none of them can be served."""
  try:
    return generate(target, None, prompts, max_new_tokens, temperature, seed=seeds)
  except NoPromptServed as e:
    return [Completion([], None, "error", [], None, error) for error in e.errors]


def read_responses(path: pathlib.Path, usable: bool = True) -> list[dict]:
  """The rows that `regenerate` wrote; a line that a killed run left half-written is passed over."""
  rows = []
  for line in path.read_text().splitlines():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      continue
  return [r for r in rows if r["reason"] in ("complete", "cut")] if usable else rows
