"""Prompts: the shipped ones of the embedded target, and any JSONL of {"turns": [...]} by path."""

import json
import pathlib
from collections.abc import Sequence

from specdec_jax.data.tokenizer import Tokenizer

ASSETS = pathlib.Path(__file__).resolve().parent.parent / "assets"


def read_turns(path: str | pathlib.Path, limit: int | None = None) -> list[str]:
  """The first user turn of every line of a {"turns": [first, …]} JSONL. Raises ValueError naming a bad line."""
  out = []
  for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), 1):  # JSON may hold U+2028.
    if limit is not None and len(out) >= limit:
      break
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except json.JSONDecodeError as e:
      raise ValueError(f"{path}:{number}: {e}") from e
    if not isinstance(row, dict) or not row.get("turns") or not isinstance(row["turns"][0], str):
      raise ValueError(f'{path}:{number}: expected {{"turns": ["…"]}}')
    out.append(row["turns"][0])
  return out


def shipped_prompts(source: str, domain: str, limit: int | None = None) -> list[str]:
  """Evaluation prompts of one domain: the shipped ones of a model ("tiny", "smollm2"), or those of a JSONL path."""
  shipped = ASSETS / source / "prompts" / f"{domain}.jsonl"
  return read_turns(shipped if shipped.exists() else source, limit)


def chat_prompt(tokenizer: Tokenizer, user: str, system: str | None = None, **options) -> str:
  """One user turn as the chat template writes it, ready for the answer; options: of the template, such as enable_thinking."""
  turns = [{"role": "system", "content": system}] if system else []
  return tokenizer.chat([*turns, {"role": "user", "content": user}], **options)


def encode_example(tokenizer: Tokenizer, user: str, answer: str) -> tuple[Sequence[int], Sequence[int]]:
  """(prompt ids, answer ids) of one exchange; the answer ends with the end-of-turn token."""
  prompt = [{"role": "user", "content": user}]
  before = tokenizer.chat(prompt)
  whole = tokenizer.chat([*prompt, {"role": "assistant", "content": answer}], add_generation_prompt=False).rstrip("\n")
  if not whole.startswith(before):
    raise ValueError("the chat template writes an answered turn differently from the generation prompt")
  return tokenizer.encode(before), tokenizer.encode(whole[len(before) :])
