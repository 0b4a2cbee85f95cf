"""The corpus and its split, packing, prompts, regeneration."""

import json

import numpy as np
import pytest

import specdec_jax
from specdec_jax.data import corpus, packing, prompts, questions
from specdec_jax.data.regenerate import read_responses, regenerate
from specdec_jax.data.tokenizer import train_bpe
from tests import toys


def test_shipped_prompts_were_never_trained_on():
  """Every shipped code and chat prompt comes from a module of the evaluation split, every maths prompt hashes to it."""
  for domain in corpus.DOMAINS:
    lines = (prompts.ASSETS / "tiny" / "prompts" / f"{domain}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 40
    assert all(corpus.is_evaluation(r["turns"][0] if domain == "maths" else r["source"]) for r in rows)
    assert prompts.shipped_prompts("tiny", domain, 3) == [r["turns"][0] for r in rows[:3]]


def test_split_share():
  sources = [f"module_{i}" for i in range(20_000)]
  assert np.mean([corpus.is_evaluation(s) for s in sources]) == pytest.approx(corpus.EVALUATION_SHARE, abs=0.01)


def test_maths_is_right():
  """Every equation of every generated solution holds, and the last one gives the answer."""
  import re

  documents = list(corpus.documents("maths", seed=3, problems=300))
  assert documents[:5] == list(corpus.documents("maths", seed=3, problems=5))
  for d in documents:
    equations = re.findall(r"([\d+\-*/ ]+) = (\d+)", d.answer)
    assert equations
    for left, right in equations:
      assert eval(left) == int(right), d  # Digits and operators only, by the pattern.
    assert d.answer.endswith(f"The answer is {equations[-1][1]}.")


@pytest.mark.slow
def test_renamed_functions_still_parse():
  import ast

  renames = [d for d in corpus.documents("code") if d.prompt.startswith("Rename")][:200]
  assert len(renames) == 200
  for d in renames:
    new = d.prompt.split(" to ")[1].split(" ")[0]
    assert new in d.answer
    ast.parse(d.answer.strip())


def test_general_questions():
  """Fixed by the seed, of every kind, none of them a shipped evaluation prompt."""
  found = questions.general(3)
  assert found == questions.general(3) != questions.general(4)
  assert {kind for kind, _ in found[:100]} == {"writing", "programs", "problems", "extraction"}
  shipped = {text for path in prompts.ASSETS.glob("*/prompts/*.jsonl") for text in prompts.read_turns(path)}
  assert len(shipped) > 100 and not shipped & {text for _, text in found}


def test_packing_keeps_every_token_once():
  rng = np.random.default_rng(0)
  documents = [(rng.integers(1, 99, rng.integers(1, 20)).tolist(), rng.integers(1, 99, rng.integers(1, 30)).tolist()) for _ in range(60)]
  rows = packing.pack(documents, 64)
  found = []
  for tokens, segments, answer in zip(rows.tokens, rows.segments, rows.answer):
    for s in range(1, segments.max() + 1):
      mine = segments == s
      assert np.all(np.diff(np.flatnonzero(mine)) == 1)
      found.append((tokens[mine & ~answer].tolist(), tokens[mine & answer].tolist()))
    assert not answer[segments == 0].any()
  assert sorted(found) == sorted(documents)
  assert (rows.segments > 0).mean() > 0.85
  with pytest.raises(ValueError, match="65 tokens does not fit a row of 64"):
    packing.pack([([1] * 60, [2] * 5)], 64)


def test_examples_end_with_the_end_of_turn():
  tokenizer = train_bpe(["abc def"] * 3, 270)
  question, answer = prompts.encode_example(tokenizer, "what\nis it?", "it")
  assert tokenizer.backend.decode(question + answer, skip_special_tokens=False) == (
      "<|im_start|>user\nwhat\nis it?<|im_end|>\n<|im_start|>assistant\nit<|im_end|>")
  assert answer[-1] == tokenizer.id("<|im_end|>")


def test_bad_prompt_lines_are_named(tmp_path):
  path = tmp_path / "p.jsonl"
  path.write_text('{"turns": ["a"]}\n{"turns": []}\n')
  assert prompts.read_turns(path, 1) == ["a"]
  with pytest.raises(ValueError, match=r"p\.jsonl:2"):
    prompts.read_turns(path)
  path.write_text('{"turns": ["a\u2028b"]}\n\n{"turns": ["c"')
  assert prompts.read_turns(path, 1) == ["a\u2028b"]
  with pytest.raises(ValueError, match=r"p\.jsonl:3"):
    prompts.read_turns(path)


def test_regeneration_resumes(tmp_path):
  """Killed in the middle of a line and run again: the same rows as in one go, each once; reasons are counted."""
  target = toys.target(eos=(5, 17, 30))
  asked = [("maths", [1 + i, 2, 3]) for i in range(7)] + [("code", [61])]
  counts = regenerate(target, asked, tmp_path / "whole.jsonl", 3, 12, 1.0, seed=4)
  whole = read_responses(tmp_path / "whole.jsonl", usable=False)
  assert sum(counts.values()) == 8 and sum("outside the vocabulary" in k for k in counts) == 1
  assert set(counts) >= {"cut"}
  lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
  (tmp_path / "again.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
  with pytest.raises(ValueError, match="unknown origin"):
    regenerate(target, asked, tmp_path / "again.jsonl", 2, 12, 1.0, seed=4)
  (tmp_path / "again.json").write_text((tmp_path / "whole.json").read_text())
  with pytest.raises(ValueError, match="temperature is 1.0, not 0.5"):
    regenerate(target, asked, tmp_path / "again.jsonl", 2, 12, 0.5, seed=4)
  regenerate(target, asked, tmp_path / "again.jsonl", 2, 12, 1.0, seed=4)
  again = read_responses(tmp_path / "again.jsonl", usable=False)
  key = lambda rows: sorted((r["index"], r["answer"], r["reason"][:5]) for r in rows)
  assert key(again) == key(whole)
  with pytest.raises(ValueError, match="answers other prompts than these"):
    regenerate(target, asked[1:], tmp_path / "again.jsonl", 2, 12, 1.0, seed=4)
  bad = regenerate(target, [("code", [61]), ("code", [])], tmp_path / "bad.jsonl", 2, 12)
  assert sum(bad.values()) == 2 and not read_responses(tmp_path / "bad.jsonl")
  usable = read_responses(tmp_path / "whole.jsonl")
  assert all(r["reason"] in ("complete", "cut") for r in usable)
  alone = specdec_jax.generate(target, None, [asked[2][1]], 12, temperature=1.0, seed=6)[0].tokens
  assert alone == next(r["answer"] for r in whole if r["index"] == 2)
