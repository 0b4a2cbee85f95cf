"""The embedded target and its drafters, on every shipped prompt."""

import os
import pathlib
import subprocess
import sys

import pytest

import specdec_jax
from specdec_jax.data import corpus
from specdec_jax.data.prompts import chat_prompt, shipped_prompts

ROOT = pathlib.Path(__file__).parents[1]
NEW = 32
SHIPPED = ("mtp", "eagle3", "dflash", "dspark", "dflash2", "hybrid")


def decode(target, drafter, texts, batch):
  out = []
  for start in range(0, len(texts), batch):
    part = texts[start : start + batch]
    out += specdec_jax.generate(target, drafter, part + part[:1] * (batch - len(part)), NEW)[: len(part)]
  return [c.tokens for c in out]


def greedy_text_is_the_targets_on_every_shipped_prompt():
  target = specdec_jax.load_target("tiny")
  drafters = {name: specdec_jax.load_drafter(f"tiny/{name}", target) for name in SHIPPED}
  texts = [chat_prompt(target.tokenizer, p) for domain in corpus.DOMAINS for p in shipped_prompts("tiny", domain)]
  assert len(texts) >= 120
  texts.sort(key=lambda t: len(target.tokenizer.encode(t)))
  plain = decode(target, None, texts, 8)
  assert decode(target, drafters["dspark"], texts, 8) == plain
  assert decode(target, drafters["dspark"], texts, 1) == plain
  for name, drafter in drafters.items():  # The others by samples: quickstart and compare_drafters check them too.
    assert decode(target, drafter, texts[::6], 8) == plain[::6], name
  assert decode(target, None, texts[::6], 1) == plain[::6]


@pytest.mark.slow
def test_greedy_text_is_the_targets_on_every_shipped_prompt():
  """Contract 1: float32, batch 1 and batch 8, with and without the drafters: one text. In a process of its own, with the
  optimised code that users run: there is more to compute than to compile."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  command = f"from tests import tiny_test; tiny_test.{greedy_text_is_the_targets_on_every_shipped_prompt.__name__}()"
  done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("options", [{"stacked": False, "transposed": False}, {"stacked": False, "transposed": True}], ids=str)
@pytest.mark.slow
def test_every_layout_gives_the_same_text(options):
  texts = ["<|im_start|>user\nHow many coins are 12 and 30 coins?<|im_end|>\n<|im_start|>assistant\n"]
  plain = decode(specdec_jax.load_target("tiny"), None, texts, 1)
  target = specdec_jax.load_target("tiny", **options)
  assert decode(target, specdec_jax.load_drafter("tiny/dspark", target), texts, 1) == plain


@pytest.mark.slow
def test_padded_head_rows_are_never_emitted():
  """C13 in decoding: rows of the head beyond the tokenizer's ids hold junk that would win every argmax."""
  import dataclasses

  import jax.numpy as jnp

  target = specdec_jax.load_target("tiny")
  head = target.params["head"]["kernel"]
  rows = lambda table, fill: jnp.concatenate([table, jnp.full((40, table.shape[1]), fill)])
  params = {
      **target.params, "embedding": rows(target.params["embedding"], 0.0), "head": {"kernel": jnp.concatenate([head, 50 * head[:40]])}}
  config = dataclasses.replace(target.config, vocab=target.config.vocab + 40)
  padded = dataclasses.replace(target, config=config, decoder=dataclasses.replace(target.decoder, config=config), params=params)
  prompt = [target.tokenizer.encode("def add(a, b):")]
  for temperature in (0.0, 1.0):
    ours, plain = (specdec_jax.generate(t, None, prompt, 40, temperature=temperature, seed=3)[0].tokens for t in (padded, target))
    assert max(ours) < target.vocab
    if temperature == 0:
      assert ours == plain
  assert int(jnp.argmax(padded.forward(prompt).logits[0, -1])) >= target.vocab


@pytest.mark.slow
def test_the_hybrid_keeps_its_text():
  """Recurrent layers with trained weights: alone, and with both shipped drafters, whose drafts are taken now and then."""
  target = specdec_jax.load_target("tiny_hybrid")
  assert target.config.recurrent == (0, 1, 2)
  texts = [chat_prompt(target.tokenizer, shipped_prompts("tiny", domain, 1)[0]) for domain in corpus.DOMAINS]
  plain = specdec_jax.generate(target, None, texts, NEW)
  assert all(len(c.tokens) == NEW or c.finish_reason == "stop" for c in plain)
  for name in ("dspark", "dflash2"):
    done = specdec_jax.generate(target, specdec_jax.load_drafter(f"tiny_hybrid/{name}", target), texts, NEW)
    assert [c.tokens for c in done] == [c.tokens for c in plain], name
    assert sum(a for c in done for _, a, _ in c.rounds), name
