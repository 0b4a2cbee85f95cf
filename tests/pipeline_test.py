"""Chat rows in, counted and encoded; splits; packed rows stored and read again."""

import json
from collections import Counter

import numpy as np
import pytest

from specdec_jax.data import packing, pipeline
from specdec_jax.data.conversations import encode_conversation, read_conversations, shuffled, split
from specdec_jax.data.tokenizer import train_bpe

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def test_bad_rows_are_counted_by_reason(tmp_path):
  """C89: each under its own reason, none ends the run; a native list of tools is no fault."""
  rows = {
      "wrong role order": {"messages": [ANSWER, USER]}, "unknown role": {"messages": [USER, {"role": "tool", "content": "x"}]},
      "empty answer": {"messages": [USER, {"role": "assistant", "content": " "}]}, "no answer": {"messages": [USER]},
      "content is no text": {"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "no messages": {"messages": "hi"},
      "not an object": [1]}
  good = [{"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, {"prompt": "a\u2028b", "answer": "c"},
          {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
          {"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]}]
  path = tmp_path / "chat.jsonl"
  path.write_text("\n".join([*map(json.dumps, rows.values()), "{oops", "", *(json.dumps(g, ensure_ascii=False) for g in good)]))
  counts = Counter()
  found = list(read_conversations(path, counts))
  assert len(found) == 4 and found[1][0]["content"] == "a\u2028b" and found[2] == [USER, ANSWER]
  assert counts == {**dict.fromkeys(rows, 1), "not JSON": 1, "complete": 4}


def test_loss_is_on_what_the_assistant_said():
  """Two turns: both answers with their end-of-turn tokens, nothing else; the ids are those of the whole text."""
  tokenizer = train_bpe(["hi hello user assistant system"] * 3, 300)
  turns = [{"role": "system", "content": "be"}, USER, ANSWER, USER, {"role": "assistant", "content": "hi hi"}]
  ids, said = encode_conversation(tokenizer, turns)
  text = lambda mine: tokenizer.backend.decode([t for t, s in zip(ids, said) if s == mine], skip_special_tokens=False)
  assert text(True) == "hello<|im_end|>hi hi<|im_end|>"
  assert tokenizer.backend.decode(ids, skip_special_tokens=False) == tokenizer.chat(turns, add_generation_prompt=False).rstrip("\n")
  rows = packing.pack_marked([(ids, said)], len(ids) + 2)
  assert rows.answer[0].tolist() == said + [False, False] and rows.segments[0, -3:].tolist() == [1, 0, 0]


def test_a_template_that_rewrites_is_refused():
  tokenizer = train_bpe(["hi"] * 3, 270)
  rewriting = type(tokenizer)(
      tokenizer.backend, "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", tokenizer.special)
  with pytest.raises(ValueError, match="rewrites earlier turns"):
    encode_conversation(rewriting, [USER, ANSWER])


def test_splits():
  """C87: sizes, disjoint, complete; a share that leaves a part empty is refused; both sources survive a cap."""
  held, rest = split(12_501, 0.2)
  assert (len(held), len(rest)) == (2_500, 10_001)
  assert np.array_equal(np.sort(np.concatenate([held, rest])), np.arange(12_501))
  for share in (0.0, 1.0, 0.00001):
    with pytest.raises(ValueError, match="leaves nothing"):
      split(12_501, share)
  capped = shuffled([["a"] * 500, ["b"] * 500], 100)
  assert len(capped) == 100 and 30 < capped.count("a") < 70


def test_rows_through_the_data_set(tmp_path):
  """C89's last line too: the folder is made. Every row once an epoch; batches are pure functions of their number."""
  rows = packing.pack([([i, i + 1], [i + 2] * (1 + i % 3)) for i in range(1, 60)], 12)
  facts = {"tokenizer": "abc", "counts": {"complete": 59, "cut": 2}}
  folder = tmp_path / "new" / "data"
  with pytest.raises(FileNotFoundError, match="no packed_rows"):
    pipeline.read(pipeline.PackedRows, folder)
  stored = pipeline.numbered(pipeline.read_or_write(pipeline.PackedRows, folder, facts, lambda: pipeline.row_examples(rows)))
  again, found = pipeline.read(pipeline.PackedRows, folder, {"tokenizer": "abc"})
  assert found == facts and len(stored) == len(rows.tokens)
  every = lambda name: sorted(map(tuple, (stored[i][name].tolist() for i in range(len(stored)))))
  for name in ("tokens", "segments", "answer"):
    assert every(name) == sorted(map(tuple, getattr(rows, name).tolist()))
  size = len(stored)
  stream = pipeline.batches(stored, 4, seed=3)
  np.testing.assert_array_equal(stream[5]["tokens"], pipeline.batches(again, 4, seed=3)[5]["tokens"])
  parts = [pipeline.batches(stored, 4, seed=3, part=slice(2 * k, 2 * k + 2)) for k in range(2)]  # Of two processes.
  for i in (0, 70):
    np.testing.assert_array_equal(np.concatenate([p[i]["row"] for p in parts]), stream[i]["row"])
  single = pipeline.batches(stored, 1, seed=3, part=slice(0, 1))
  np.testing.assert_array_equal(np.concatenate([single[4 * 70 + k]["row"] for k in range(4)]), stream[70]["row"])
  epoch = np.concatenate([stream[i]["tokens"] for i in range(-(-size // 4))])[:size]
  assert sorted(map(tuple, epoch.tolist())) == every("tokens") and not np.array_equal(epoch, [stored[i]["tokens"] for i in range(size)])
  whole = pipeline.all_rows(stored)
  for i in (2, 70):  # In the first epoch, and far behind it.
    np.testing.assert_array_equal(whole.tokens[stream[i]["row"]], stream[i]["tokens"])
  with pytest.raises(pipeline.DatasetError, match="tokenizer is abc, not xyz"):
    pipeline.read(pipeline.PackedRows, folder, {"tokenizer": "xyz"})


def test_prompts_and_responses_as_data_sets(tmp_path):
  """Of any length, in their order; made once, and refused for other facts."""
  tokens = lambda n: np.arange(n, dtype=np.int32)
  asked = [{"name": f"é{i}", "prompt": tokens(i + 1)} for i in range(1500)]
  answered = [{**x, "answer": tokens(3), "reason": "cut"} for x in asked[:4]]
  stored = pipeline.read_or_write(pipeline.Prompts, tmp_path, {"target": "t"}, lambda: asked)
  assert [stored[i]["name"].decode() for i in range(1500)] == [x["name"] for x in asked]
  np.testing.assert_array_equal(stored[1234]["prompt"], tokens(1235))
  again = pipeline.read_or_write(pipeline.Prompts, tmp_path, {"target": "t"}, lambda: pytest.fail("it was there"))
  assert len(again) == 1500
  replies = pipeline.read_or_write(pipeline.Responses, tmp_path, {"complete": 0, "cut": 4}, lambda: answered)
  assert replies[3]["reason"] == b"cut" and replies[3]["answer"].tolist() == [0, 1, 2]
  with pytest.raises(pipeline.DatasetError, match="target is t, not u"):
    pipeline.read(pipeline.Prompts, tmp_path, {"target": "u"})


def test_no_tensorflow():
  """The builder, the reader and the trainer run without it."""
  import importlib.util
  import sys

  assert "tensorflow" not in sys.modules or importlib.util.find_spec("tensorflow") is None
