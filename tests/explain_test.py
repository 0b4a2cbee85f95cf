"""What is shown of a drafter is what it did."""

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import explain, schedule
from specdec_jax.decode import Completion


@pytest.fixture(scope="module")
def tiny():
  target = specdec_jax.load_target("tiny")
  return target, target.tokenizer.chat([{"role": "user", "content": "Ben has 12 coins at home. How many coins does Ben have?"}])


@pytest.mark.parametrize("name", ["tiny/dspark", "tiny/hybrid"])
@pytest.mark.slow
def test_a_block_is_what_generate_does(tiny, name):
  """Same anchor, drafts, accepted count and next token as the first round of `generate`; q and p are probabilities of these."""
  target, prompt = tiny
  drafter = specdec_jax.load_drafter(name, target)
  shown = explain.block(target, drafter, prompt, temperature=0.0)
  done = specdec_jax.generate(target, drafter, [prompt], 9, record=True)[0]
  decode = lambda t: target.tokenizer.decode([t])
  accepted = done.rounds[0][1]
  assert shown.anchor == decode(done.tokens[0]) and [s.draft for s in shown.slots] == [decode(t) for t in done.drafts[0]]
  assert [s.fate for s in shown.slots][: accepted + 1] == (["accepted"] * accepted + ["rejected"])[: len(shown.slots)]
  assert shown.next_token == decode(done.tokens[1 + accepted])
  sampled = explain.block(target, drafter, prompt, temperature=1.0, seed=3)
  for slot in sampled.slots:
    assert 0 < slot.q <= 1 and 0 <= slot.p <= 1 and len(slot.candidates) == 5
    assert [q for _, q, _ in slot.candidates] == sorted((q for _, q, _ in slot.candidates), reverse=True)
  assert "<table>" in sampled._repr_html_()
  with pytest.raises(ValueError, match="empty"):
    explain.block(target, drafter, "")


def test_pieces_are_the_text_in_order(tiny):
  """Every token once, drafts that stand, the one rejected beside the target's own, nothing of a cut round twice."""
  tokenizer = tiny[0].tokenizer
  ids = tokenizer.encode("one two three four five six seven eight")[:8]
  wrong = tokenizer.encode("<b>")[0]
  done = Completion(ids, "", "length", [(3, 2, 3), (3, 3, 4)], drafts=[[ids[1], ids[2], wrong], ids[4:7]])
  found = explain.pieces(tokenizer, done)
  assert [o for _, o in found] == ["target", "accepted", "accepted", "rejected", "target", "accepted", "accepted", "accepted", "target"]
  assert [t for t, o in found if o != "rejected"] == [tokenizer.decode([t]) for t in ids] and found[3][0] == tokenizer.decode([wrong])
  assert "&lt;" in explain.coloured(tokenizer, done).text and "<b>" not in explain.coloured(tokenizer, done).text
  cut = Completion(ids[:3], "", "length", [(3, 3, 2)])
  assert [o for _, o in explain.pieces(tokenizer, cut)] == ["target", "accepted", "accepted"]


def test_what_is_weighed_is_what_is_scheduled():
  confidence, sps = np.array([[0.9, 0.5], [0.8, 0.1]], np.float32), np.array([10, 9, 8, 7.5, 4, 3], np.float32)
  rows = explain.weighed(confidence, sps)
  assert [r["admitted"] for r in rows] == [0, 1, 2, 3, 4] and [r["verify tokens"] for r in rows] == [2, 3, 4, 5, 6]
  assert np.allclose([r["survival"] for r in rows], [1, 0.9, 0.8, 0.45, 0.08])
  assert np.allclose([r["Θ"] for r in rows], [2 * 9, 2.9 * 8, 3.7 * 7.5, 4.15 * 4, 4.23 * 3], rtol=1e-5)
  assert int(schedule.causal(jnp.asarray(confidence), jnp.asarray(sps)).sum()) == int(np.argmax([r["Θ"] for r in rows]))
