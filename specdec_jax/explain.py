"""What a drafter did, to look at: one block with its candidates and its walk, texts coloured by where their tokens come from, and
what a schedule weighs."""

import dataclasses
import functools
import html
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import schedule, verify
from specdec_jax.data.tokenizer import Tokenizer
from specdec_jax.decode import Completion, round_up
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.target import Target
from specdec_jax.sampling import distribution, make_sampling
from specdec_jax.typing import Float
from specdec_jax.verify import SparseDistribution

STYLES = {"target": "", "accepted": "background:#c8e6c9", "rejected": "background:#ffcdd2;text-decoration:line-through"}


@dataclasses.dataclass(frozen=True)
class Html:
  """Text that a notebook shows as HTML."""

  text: str

  def _repr_html_(self) -> str:
    return self.text


@dataclasses.dataclass(frozen=True)
class Slot:
  """One draft: its text, the probabilities q (drafter) and p (target) that it had, what became of it ("accepted", "rejected", or
  "behind" a rejected one), and the drafter's best candidates as (text, q, p)."""

  draft: str
  q: float
  p: float
  fate: str
  candidates: tuple[tuple[str, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """One round after a prompt: the anchor, the slots, and the token that the target puts behind the accepted drafts."""

  anchor: str
  slots: tuple[Slot, ...]
  next_token: str

  def _repr_html_(self) -> str:
    row = lambda cells, tag="td": "<tr>" + "".join(f"<{tag} style='text-align:left'>{c}</{tag}>" for c in cells) + "</tr>"
    head = row(["slot", "draft", "q", "p", "", "candidates (q, p)"], "th")
    body = [row([k, f"<span style='{STYLES.get(s.fate, '')}'>{_shown(s.draft)}</span>", f"{s.q:.3f}", f"{s.p:.3f}", s.fate, " &nbsp; ".join(
        f"{_shown(t)} ({q:.2f}, {p:.2f})" for t, q, p in s.candidates)]) for k, s in enumerate(self.slots, 1)]
    return f"<p>after {_shown(self.anchor)}, then {_shown(self.next_token)} of the target</p><table>{head}{''.join(body)}</table>"


def block(
    target: Target, drafter: Drafter, prompt: str | Sequence[int], temperature: float = 1.0, seed: int = 0, candidates: int = 5,
) -> Block:
  """The first round after a prompt, whose first token is the target's best one. Raises ValueError for an empty prompt."""
  ids = target.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
  if not ids:
    raise ValueError("the prompt is empty: a block needs something to follow")
  model, length, text = drafter.model, drafter.model.draft_length, lambda t: target.tokenizer.decode([int(t)])
  read = target.forward([ids], taps=model.taps)
  anchor = jnp.argmax(read.logits[:, -1, : target.vocab], -1).astype(jnp.int32)
  sampling = make_sampling(1, target.vocab, temperature, seed=seed)
  keys = sampling.position_keys(jnp.ones(1, jnp.int32), length + 1)
  capacity, tokens = round_up(len(ids) + length + 1, 128), jnp.array([ids], jnp.int32)
  proposal = _proposed(model, capacity, drafter.params, read.taps, tokens, anchor, keys[:, :length], sampling)
  drafts = proposal.drafts
  logits = target.forward([[*ids, int(anchor[0]), *map(int, drafts[0])]]).logits[:, len(ids) :, : target.vocab]
  p = distribution(logits, sampling)
  verdict = verify.accept(p, proposal.q, drafts, jnp.array([length]), keys)
  accepted = int(verdict.accepted[0])
  slots = []
  for k in range(length):
    q = proposal.q.row(jnp.array([k]), target.vocab)[0] if isinstance(proposal.q, SparseDistribution) else proposal.q[0, k]
    q, mine, draft = np.asarray(q), np.asarray(p[0, k]), int(drafts[0, k])
    best = [t for t in np.argsort(-q, kind="stable")[:candidates] if q[t] > 0]
    fate = "accepted" if k < accepted else "rejected" if k == accepted else "behind"
    slots.append(Slot(text(draft), float(q[draft]), float(mine[draft]), fate, tuple((text(t), float(q[t]), float(mine[t])) for t in best)))
  return Block(text(anchor[0]), tuple(slots), text(verdict.next_token[0]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _proposed(model, capacity: int, params, taps, ids, anchor, keys, sampling):
  """The drafts after a prompt that was read whole."""
  count = jnp.array([ids.shape[1]])
  state = model.extend(params, model.init_state(1, capacity), taps, ids, jnp.arange(ids.shape[1])[None], count)
  return model.propose(params, state, anchor, count, keys, sampling)


def pieces(tokenizer: Tokenizer, done: Completion) -> list[tuple[str, str]]:
  """(text, origin) of a completion's tokens in order: "accepted" drafts, tokens of the "target" and, where the drafts were recorded
  (`generate(…, record=True)`), the "rejected" draft that stood where the target's token is."""
  text = lambda t: tokenizer.decode([t])
  out, at = [(text(t), "target") for t in done.tokens[:1]], 1
  for i, (drafted, accepted, emitted) in enumerate(done.rounds):
    kept = min(accepted, emitted)
    out += [(text(t), "accepted") for t in done.tokens[at : at + kept]]
    if done.drafts and accepted < drafted and emitted > accepted:
      out.append((text(done.drafts[i][accepted]), "rejected"))
    out += [(text(t), "target") for t in done.tokens[at + kept : at + emitted]]
    at += emitted
  return out


def coloured(tokenizer: Tokenizer, done: Completion) -> Html:
  """A completion with accepted drafts green, rejected ones red and struck out, the target's own tokens plain."""
  spans = "".join(f"<span style='{STYLES[origin]}'>{html.escape(text)}</span>" for text, origin in pieces(tokenizer, done))
  return Html(f"<div style='white-space:pre-wrap;font-family:monospace'>{spans}</div>")


def weighed(confidence: Float["B L"], sps: Float["n"]) -> list[dict[str, float]]:
  """What a schedule weighs, for 0, 1, … admitted drafts in the order of their survival: survival of the last one, verify tokens of
  the step, expected tokens of the step, steps per second and Θ, the expected tokens per second (DSpark Algorithm 1)."""
  _, best_first, theta = schedule.throughput(jnp.asarray(confidence), jnp.asarray(sps))
  requests, expected = len(confidence), len(confidence) + np.concatenate([[0.0], np.cumsum(best_first)])
  rows: list[dict[str, Any]] = []
  for n in np.flatnonzero(np.isfinite(theta)):
    rows.append({
        "admitted": int(n), "survival": float(best_first[n - 1]) if n else 1.0, "verify tokens": requests + int(n),
        "expected tokens": float(expected[n]), "steps per second": float(theta[n] / expected[n]), "Θ": float(theta[n])})
  return rows


def _shown(text: str) -> str:
  return f"<code>{html.escape(repr(text)[1:-1])}</code>"
