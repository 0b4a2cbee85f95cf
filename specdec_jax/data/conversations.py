"""Chat data from any JSONL: read, checked with every bad row counted by reason, and encoded with loss on answers only."""

import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from specdec_jax.data.tokenizer import Tokenizer

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}

Turns = list[dict[str, str]]


def read_conversations(path: str | pathlib.Path, counts: Counter) -> Iterator[Turns]:
  """The conversations of a JSONL file, {"role", "content"} turns each; what cannot be used adds to `counts` by its reason.

  A row is {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]} or {"prompt", "answer"}; other keys,
  such as a list of tools, are passed over. Roles must alternate from a user to an assistant, behind at most one system turn.
  """
  for line in pathlib.Path(path).read_text(encoding="utf-8").split("\n"):
    if line.strip():
      turns, reason = _turns(line)
      counts[reason] += 1
      if turns is not None:
        yield turns


def _turns(line: str) -> tuple[Turns | None, str]:
  try:
    row = json.loads(line)
  except json.JSONDecodeError:
    return None, "not JSON"
  if not isinstance(row, dict):
    return None, "not an object"
  if isinstance(row.get("prompt"), str) and isinstance(row.get("answer"), str):
    raw = [("user", row["prompt"]), ("assistant", row["answer"])]
  else:
    found = row.get("messages") or row.get("conversations")
    if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
      return None, "no messages"
    raw = [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in found]
  if any(role not in ROLES for role, _ in raw):
    return None, "unknown role"
  if any(not isinstance(text, str) for _, text in raw):
    return None, "content is no text"
  turns = [{"role": ROLES[role], "content": text} for role, text in raw]
  spoken = turns[1:] if turns and turns[0]["role"] == "system" else turns
  if not spoken or any(t["role"] != ("user", "assistant")[i % 2] for i, t in enumerate(spoken)):
    return None, "wrong role order"
  if len(spoken) % 2:
    return None, "no answer"
  if any(not t["content"].strip() for t in spoken if t["role"] == "assistant"):
    return None, "empty answer"
  return turns, "complete"


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
  """Token ids of a conversation as the chat template writes it, and which of them an assistant said, its end-of-turn token
  included. Raises ValueError for a template that rewrites earlier turns: training would see another text than decoding."""
  ids: list[int] = []
  said: list[bool] = []
  text = ""
  for i, turn in enumerate(turns):
    if turn["role"] != "assistant":
      continue
    before = tokenizer.chat(turns[:i])
    whole = tokenizer.chat(turns[: i + 1], add_generation_prompt=False)
    if not before.startswith(text) or not whole.startswith(before):
      raise ValueError("the chat template rewrites earlier turns once an answer follows")
    tail = whole[len(before) :]
    answer = tail.rstrip("\n")
    for piece, mine in ((before[len(text) :], False), (answer, True), (tail[len(answer) :] if i + 1 < len(turns) else "", False)):
      new = tokenizer.encode(piece)
      ids += new
      said += [mine] * len(new)
    text = whole
  return ids, said


def split(count: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """(held-out, training) row numbers: int(share · count) of them drawn at random, each ascending; disjoint and complete.

  Raises ValueError unless both parts hold something.
  """
  held = int(share * count)
  if not 0 < held < count:
    raise ValueError(f"a share of {share} of {count} rows leaves nothing to hold out, or to train on")
  order = np.random.default_rng(seed).permutation(count)
  return np.sort(order[:held]), np.sort(order[held:])


def shuffled(sources: Sequence[Sequence], limit: int, seed: int = 0) -> list:
  """At most `limit` rows of all sources, shuffled before they are cut, so that every source is among them."""
  rows = [row for source in sources for row in source]
  return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:limit]]
