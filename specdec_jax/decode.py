"""Speculative decoding as a pure round on a frozen state, and `generate`: a `lax.while_loop` over it.

One round: draft → schedule → verify → accept → commit → extend the drafter's context (ALGORITHMS §1). Nothing is read
by the host before the last request has ended, but for stop texts, which it looks for every few rounds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sharding, verify
from specdec_jax.drafters.base import Drafter, DraftModel, Proposal
from specdec_jax.models.cache import Cache
from specdec_jax.models.decoder import Decoder
from specdec_jax.models.rows import flatten
from specdec_jax.models.target import Target
from specdec_jax.sampling import Role, Sampling, adjusted, best_tokens, distribution, make_sampling, next_token, real_logits
from specdec_jax.schedule import Schedule
from specdec_jax.typing import Bool, Float, Int

RUNNING, STOP, LENGTH, TARGET_FAULT, DRAFTER_FAULT = range(5)
FINISH_REASONS = ("running", "stop", "length", "error", "error")
FAULTS = {TARGET_FAULT: "the target", DRAFTER_FAULT: "the drafter"}
STOP_TEXT_ROUNDS = 8  # Rounds between two looks for stop texts.


@flax.struct.dataclass
class Pending:
  """The last `count` [B] committed rows, of at most P, that a drafter's context has not taken in: taps [B,P,M,D], tokens [B,P]."""

  taps: Float["B P M D"]
  tokens: Int["B P"]
  count: Int["B"]


@flax.struct.dataclass
class DecodeState:
  """Everything that a round reads of the rounds before it; donated.

  cache.lengths [B]: rows fed so far, which is the anchor's position; anchor [B]: the last emitted token, not yet fed;
  emitted [B]: tokens so far; finish [B]: RUNNING, STOP, LENGTH or a fault: target or drafter gave numbers that are no distribution.
  counts [B,V]: of the emitted tokens, for penalties, or None. pending: rows of rounds without drafts that `catch_up` gives to the
  drafter later, or None where every round does.
  """

  cache: Cache
  drafter: Any
  anchor: Int["B"]
  emitted: Int["B"]
  finish: Int["B"]
  counts: Int["B V"] | None = None
  pending: Pending | None = None


@flax.struct.dataclass
class Draft:
  """What is to be verified: the first `lengths` [B] drafts of a proposal; fault [B]: the draft behind them has no numbers."""

  proposal: Proposal
  lengths: Int["B"]
  fault: Bool["B"]


@flax.struct.dataclass
class Verified:
  """What the target says of a draft: logits [B,L+1,V], taps [B,L+1,M,D], and the cache with the rows written but not committed."""

  logits: Float["B L V"]
  taps: Float["B L M D"]
  cache: Cache


@flax.struct.dataclass
class RoundOutput:
  """What a round gave: the first `count` [B] of tokens [B,L+1] follow the `start` [B] ones before; drafted, accepted [B], of which
  some may be cut off; ran [B]: whether the request took part; finish [B]: where that left it; logprobs [B,L+1], the target's, or None."""

  start: Int["B"]
  tokens: Int["B L"]
  count: Int["B"]
  drafted: Int["B"]
  accepted: Int["B"]
  ran: Bool["B"]
  finish: Int["B"]
  logprobs: Float["B L"] | None = None


@flax.struct.dataclass
class Transcript:
  """All rounds of `generate`: tokens [B,T], a row of output positions, logprobs likewise or None; rounds [B,T,3]: (drafted,
  accepted, emitted) of the first `round_count` [B] rounds; drafts, confidences [B,T,L]: of every round, or None."""

  tokens: Int["B T"]
  logprobs: Float["B T"] | None
  rounds: Int["B T 3"]
  round_count: Int["B"]
  drafts: Int["B T L"] | None = None
  confidences: Float["B T L"] | None = None


@flax.struct.dataclass
class Limits:
  """caps [B]: tokens a request may emit; stops: a row of ids a request that end it, -1 for none; drafts [B]: that may be verified a
  round, or None for no limit."""

  caps: Int["B"]
  stops: Int["B n"]
  drafts: Int["B"] | None = None


@dataclasses.dataclass(frozen=True)
class Method:
  """What is known at compile time: the target's functions, the drafter's (or None) and how its drafts are used."""

  decoder: Decoder
  drafter: DraftModel | None = None
  draft_length: int = 0
  schedule: Schedule | None = None  # None: every draft is verified
  rule: str = "token"
  logprobs: bool = False
  temperatures: tuple[float, ...] | None = None  # of the confidence logits, before the schedule reads them
  record: bool = False  # drafts and confidence logits of every round
  draft_positions: int | None = None  # that the drafter knows, where the target knows more

  @property
  def taps(self) -> tuple[int, ...]:
    return self.drafter.taps if self.drafter else ()


def cut(tokens: Int["B L"], count: Int["B"], emitted: Int["B"], limits: Limits) -> tuple[Int["B"], Int["B"]]:
  """How many of a round's first `count` tokens are emitted, and the finish reason: the cap first, then the first stop
  among what the cap leaves, so that a stop at the very cap is a stop."""
  count = jnp.minimum(count, limits.caps - emitted)
  inside = jnp.arange(tokens.shape[1]) < count[:, None]
  stops = inside & (tokens[..., None] == limits.stops[:, None]).any(-1)
  stopped = stops.any(1)
  count = jnp.where(stopped, jnp.argmax(stops, 1) + 1, count)
  return count, jnp.where(stopped, STOP, jnp.where(emitted + count >= limits.caps, LENGTH, RUNNING)).astype(jnp.int32)


def prefill(
    method: Method, params, drafter_params, state: DecodeState, prompts: Int["B T"], lengths: Int["B"], sampling: Sampling, limits: Limits,
) -> tuple[DecodeState, RoundOutput]:
  """Feeds whole prompts, right-padded to [B,T], and emits each request's first token."""
  return first_token(method, params, *read(method, params, drafter_params, state, prompts, lengths), sampling, limits)


def read(
    method: Method, params, drafter_params, state: DecodeState, tokens: Int["B T"], lengths: Int["B"], reach: int | None = None,
) -> tuple[DecodeState, Float["B D"]]:
  """Feeds the next `lengths` tokens of prompts: (state, final hidden state of each one's last token); reach: as in `verify_draft`."""
  hidden, taps, cache = method.decoder.apply({"params": params}, tokens, state.cache, taps=method.taps, reach=reach)
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
  sound = (jnp.isfinite(hidden).all(-1) | (jnp.arange(tokens.shape[1]) >= lengths[:, None])).all(1)
  start = state.cache.lengths
  if method.drafter:
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    state = state.replace(drafter=method.drafter.extend(drafter_params, state.drafter, taps, tokens, positions, lengths))
  state = state.replace(cache=cache.commit(lengths), finish=jnp.where(sound, state.finish, TARGET_FAULT))
  return sharding.constrain_state(state), sharding.constrain_whole(last)


def first_token(
    method: Method, params, state: DecodeState, last: Float["B D"], sampling: Sampling, limits: Limits,
) -> tuple[DecodeState, RoundOutput]:
  """The token after a prompt whose last hidden state is `last`; none behind a prompt that ended in a fault."""
  logits = method.decoder.apply({"params": params}, last[:, None], method="logits")
  sampling = sampling.replace(counts=state.counts)
  first, _ = next_token(logits[:, 0], sampling, sampling.position_keys(state.emitted, 1)[:, 0], Role.TARGET)
  first = jnp.where(state.finish == RUNNING, first, -1)
  count, finish = cut(first[:, None], (first >= 0).astype(jnp.int32), state.emitted, limits)
  none, finish = jnp.zeros_like(count), jnp.where(first < 0, TARGET_FAULT, finish)
  output = RoundOutput(
      state.emitted, first[:, None], count, none, none, none > 0, finish, _logprobs(method, logits, first[:, None], sampling.vocab))
  state = _emit(state, output, sampling).replace(anchor=jnp.maximum(first, 0))
  return sharding.constrain_state(state), sharding.constrain_whole(output)


def _logprobs(method: Method, logits: Float["B L V"], tokens: Int["B L"], vocab: int) -> Float["B L"] | None:
  """The target's, before any setting, where they are asked for."""
  if not method.logprobs:
    return None
  every = jax.nn.log_softmax(real_logits(logits, vocab).astype(jnp.float32), -1)
  return jnp.take_along_axis(every, jnp.clip(tokens, 0)[..., None], -1)[..., 0]


def _emit(state: DecodeState, output: RoundOutput, sampling: Sampling) -> DecodeState:
  return state.replace(
      emitted=state.emitted + output.count, finish=output.finish, counts=sampling.after(output.tokens, output.count).counts)


def decode_round(
    method: Method, params, drafter_params, state: DecodeState, sampling: Sampling, limits: Limits,
) -> tuple[DecodeState, RoundOutput, Proposal]:
  """One round for every running request; the others stand still."""
  made = draft(method, drafter_params, state, sampling, limits)
  verified = verify_draft(method, params, state, made)
  return *commit(method, drafter_params, state, made, verified, sampling, limits), made.proposal


def draft(
    method: Method, drafter_params, state: DecodeState, sampling: Sampling, limits: Limits, budget: Int[""] | None = None,
    reach: int | None = None,
) -> Draft:
  """Drafts and their schedule; budget: the schedule's second argument, if it has one; reach: as in `verify_draft`."""
  running, most = state.finish == RUNNING, limits.drafts
  context = jax.tree.map(lambda x: x.first(reach) if isinstance(x, Cache) else x, state.drafter, is_leaf=lambda x: isinstance(x, Cache))
  proposal = _propose(method, drafter_params, state.replace(drafter=context), sampling.replace(counts=state.counts))
  if method.draft_positions is not None:  # Beyond them the drafter knows no positions: those requests go on without it.
    known = state.cache.lengths + method.draft_length < method.draft_positions
    most = jnp.where(known, method.draft_length if most is None else most, 0)
  scheduled = jnp.where(running, _schedule(method, proposal, running, most, budget), 0)
  lengths = verify.usable_lengths(proposal.drafts, scheduled, verify.sound_rows(proposal.q))
  fault = (lengths < scheduled) & jnp.take_along_axis(  # The draft that the block ends before, for want of numbers.
      jnp.pad(verify.malformed_rows(proposal.q), ((0, 0), (0, 1))), lengths[:, None], 1)[:, 0]
  return sharding.constrain_state(Draft(proposal, lengths, fault))


def no_draft(batch: int) -> Draft:
  """Nothing to verify: the round of a target alone."""
  none = jnp.zeros((batch,), jnp.int32)
  return Draft(Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0, 1))), none, none > 0)


def _fed(state: DecodeState, made: Draft) -> Int["B L"]:
  return jnp.concatenate([state.anchor[:, None], jnp.maximum(made.proposal.drafts, 0)], 1)


def verify_draft(
    method: Method, params, state: DecodeState, made: Draft, bucket: int | None = None, reach: int | None = None,
) -> Verified:
  """The target's pass over anchors and drafts. bucket: rows to compute, at least Σ(1 + lengths) of the running requests; all
  B·(1 + L) where None. Rows behind a request's own length are then undefined. reach: rows of the caches to read, at least those of
  the longest running request and a block more; all where None."""
  fed = _fed(state, made)
  rows = None if bucket is None else flatten(jnp.where(state.finish == RUNNING, 1 + made.lengths, 0), fed.shape[1], bucket)
  hidden, taps, cache = method.decoder.apply({"params": params}, fed, state.cache, taps=method.taps, rows=rows, reach=reach)
  logits = method.decoder.apply({"params": params}, hidden, method="logits")
  if rows is not None:
    logits, taps = rows.pad(logits), rows.pad(taps)
  return sharding.constrain_state(Verified(logits, taps, cache))


def commit(
    method: Method, drafter_params, state: DecodeState, made: Draft, verified: Verified, sampling: Sampling, limits: Limits,
) -> tuple[DecodeState, RoundOutput]:
  """Accepts, emits, commits the caches and extends the drafter's context."""
  drafts, running = made.proposal.drafts, state.finish == RUNNING
  sampling = sampling.replace(counts=state.counts)
  if sampling.greedy:
    verdict = verify.match(best_tokens(adjusted(verified.logits, sampling.along(drafts))), drafts, made.lengths)
  else:
    p = distribution(verified.logits, sampling.along(drafts))
    verdict = verify.accept(p, made.proposal.q, drafts, made.lengths, _keys(method, state, sampling, drafts.shape[1] + 1), method.rule)

  position, slots = state.cache.lengths, jnp.arange(drafts.shape[1] + 1)
  tokens = jnp.where(slots == verdict.accepted[:, None], verdict.next_token[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
  count, finish = cut(tokens, verdict.accepted + (verdict.next_token >= 0), state.emitted, limits)
  fault = jnp.where(verdict.next_token < 0, TARGET_FAULT, jnp.where(made.fault, DRAFTER_FAULT, RUNNING))
  finish = jnp.where(finish == RUNNING, fault, finish)
  count = jnp.where(running, count, 0)
  fed_rows = jnp.where(running, verdict.accepted + 1, 0)  # Rows whose tokens stand: the anchor and the accepted drafts.
  if method.drafter and state.pending is not None and not drafts.shape[1]:
    state = state.replace(pending=_put_off(state.pending, verified.taps, state.anchor, fed_rows))
  elif method.drafter:
    extended = method.drafter.extend(drafter_params, state.drafter, verified.taps, _fed(state, made), position[:, None] + slots, fed_rows)
    state = state.replace(drafter=extended)
  output = RoundOutput(
      state.emitted, tokens, count, made.lengths, jnp.minimum(verdict.accepted, count), running, jnp.where(running, finish, state.finish),
      _logprobs(method, verified.logits, tokens, sampling.vocab))
  state = _emit(state, output, sampling).replace(
      cache=verified.cache.commit(fed_rows), anchor=jnp.where(running, jnp.maximum(verdict.next_token, 0), state.anchor))
  return sharding.constrain_state(state), sharding.constrain_whole(output)


def _put_off(pending: Pending, taps: Float["B 1 M D"], tokens: Int["B"], fed_rows: Int["B"]) -> Pending:
  """With the one row of a round without drafts, where it stands."""
  slot, at = jnp.arange(len(tokens)), jnp.where(fed_rows > 0, pending.count, pending.tokens.shape[1])
  return Pending(
      pending.taps.at[slot, at].set(taps[:, 0].astype(pending.taps.dtype), mode="drop"),
      pending.tokens.at[slot, at].set(tokens, mode="drop"), pending.count + fed_rows)


def catch_up(method: Method, drafter_params, state: DecodeState) -> DecodeState:
  """The drafter's context with the rows that were put off; before it is drafted from, and before P of them wait."""
  pending = state.pending
  # Slots without a context still count rows of who had them before.
  count = jnp.minimum(pending.count, jnp.minimum(pending.tokens.shape[1], state.cache.lengths))
  positions = (state.cache.lengths - count)[:, None] + jnp.arange(pending.tokens.shape[1])
  extended = method.drafter.extend(drafter_params, state.drafter, pending.taps, pending.tokens, positions, count)
  return sharding.constrain_state(state.replace(drafter=extended, pending=pending.replace(count=jnp.zeros_like(count))))


def append(transcript: Transcript, output: RoundOutput, proposal: Proposal | None) -> Transcript:
  """Appends a round, or the first token (no proposal); later writes cover what stands behind a row's count."""
  put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new.astype(row.dtype), (at, *[0] * (row.ndim - 1))))
  transcript = transcript.replace(
      tokens=put(transcript.tokens, output.tokens, output.start),
      logprobs=None if transcript.logprobs is None else put(transcript.logprobs, output.logprobs, output.start))
  if proposal is None:
    return transcript
  at = transcript.round_count
  counts = jnp.stack([output.drafted, output.accepted, output.count], -1)
  if transcript.drafts is not None:
    if proposal.confidence is None:
      raise ValueError("the drafter gives no confidences to record")
    transcript = transcript.replace(
        drafts=put(transcript.drafts, proposal.drafts[:, None], at),
        confidences=put(transcript.confidences, proposal.confidence[:, None], at))
  return transcript.replace(rounds=put(transcript.rounds, counts[:, None], at), round_count=at + output.ran)


def _keys(method: Method, state: DecodeState, sampling: Sampling, count: int):
  """One key for each of the next `count` output positions, by position or by round: see `Sampling.round_keys`."""
  own = method.rule == "block" or method.schedule is not None
  return (sampling.round_keys if own else sampling.position_keys)(state.emitted, count)


def _propose(method: Method, drafter_params, state: DecodeState, sampling: Sampling) -> Proposal:
  if method.drafter is None:
    return no_draft(state.anchor.shape[0]).proposal
  keys = _keys(method, state, sampling, method.drafter.draft_length)
  proposal = method.drafter.propose(drafter_params, state.drafter, state.anchor, state.cache.lengths, keys, sampling)
  return jax.tree.map(lambda x: x[:, : method.draft_length], proposal)


def gives_confidences(method: Method, drafter_params, vocab: int) -> bool:
  """Whether the drafter's proposals can be scheduled; traces one, computes nothing."""
  sampling = make_sampling(1, vocab)
  made = jax.eval_shape(lambda params: _propose(method, params, init_state(method, 1, 128), sampling), drafter_params)
  return made.confidence is not None


def _schedule(method: Method, proposal: Proposal, running: Bool["B"], most: Int["B"] | None, budget: Int[""] | None) -> Int["B"]:
  full = jnp.full((proposal.drafts.shape[0],), method.draft_length, jnp.int32)
  if most is not None:
    full = jnp.clip(most, 0, full)
  if method.schedule is None or not method.draft_length:
    return full
  if proposal.confidence is None:
    raise ValueError("the drafter gives no confidences, so its drafts cannot be scheduled")
  scale = 1.0 if method.temperatures is None else jnp.asarray(method.temperatures[: method.draft_length])
  may = running[:, None] & (jnp.arange(method.draft_length) < full[:, None])  # The ended compete for nothing.
  confidence = jnp.where(may, jax.nn.sigmoid(proposal.confidence / scale), 0.0)
  lengths = method.schedule(confidence) if budget is None else method.schedule(confidence, budget)
  if lengths.shape != full.shape or not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"a schedule gives integer lengths [B], {full.shape}, not {lengths.dtype} {lengths.shape}")
  return jnp.clip(lengths, 0, full)


_empty = jax.jit(lambda *settings: sharding.constrain_state(init_state(*settings)), static_argnums=(0, 1, 2, 3))
_prefill = jax.jit(prefill, static_argnums=0, donate_argnums=3)
_append = jax.jit(append, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _decode(
    method: Method, params, drafter_params, state: DecodeState, transcript: Transcript, sampling: Sampling, limits: Limits, most: jax.Array,
) -> tuple[DecodeState, Transcript]:
  """Rounds until every request has ended, at most `most`."""

  def step(carried):
    count, state, transcript = carried
    state, output, proposal = decode_round(method, params, drafter_params, state, sampling, limits)
    return count + 1, state, append(transcript, output, proposal)

  going = lambda x: (x[0] < most) & (x[1].finish == RUNNING).any()
  return jax.lax.while_loop(going, step, (jnp.int32(0), state, transcript))[1:]


def compiled() -> int:
  """Executables that `generate` has compiled so far in this process."""
  return _prefill._cache_size() + _append._cache_size() + _decode._cache_size()


@dataclasses.dataclass(frozen=True)
class Completion:
  """What one request got. tokens include the stop token, or the one that completes a stop text, before which `text` ends;
  finish_reason: "stop", "length" or "error" (then `error` says why, and tokens are those before it).

  rounds: (drafted, accepted, emitted) of every verify call; drafts, confidences: its drafts and their confidence logits, where
  they were asked for; logprobs: the target's, at temperature 1, of each token.
  """

  tokens: list[int]
  text: str | None
  finish_reason: str
  rounds: list[tuple[int, int, int]]
  logprobs: list[float] | None = None
  error: str | None = None
  drafts: list[list[int]] | None = None
  confidences: list[list[float]] | None = None


class NoPromptServed(ValueError):
  """None of the prompts can be served; `errors` says why, one text a prompt."""

  def __init__(self, errors: list[str]):
    super().__init__("; ".join(errors))
    self.errors = errors


def generate(
    target: Target, drafter: Drafter | None, prompts: Sequence[str | Sequence[int]], max_new_tokens: int | Sequence[int] = 64,
    temperature: float | Sequence[float] = 0.0, top_k: int | Sequence[int] = 0, top_p: float | Sequence[float] = 1.0,
    seed: int | None | Sequence[int | None] = 0, rule: str = "token", schedule: str | Schedule = "fixed",
    draft_length: int | Sequence[int] | None = None, stop: Sequence[int | str] | None = None, logprobs: bool = False,
    ignore_eos: bool = False, record: bool = False, **sampling_options,
) -> list[Completion]:
  """Decodes a batch of prompts (texts or token ids) to the end; lossless with any drafter, or with None.

  temperature 0 gives the target's own greedy text; otherwise its own distribution, with draws that depend on the request's seed and output
  position only (under the block rule or a schedule: on where its rounds began, too). Settings are one for all, or one a prompt;
  sampling_options: min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias, banned, allowed
  (`specdec_jax.sampling.make_sampling`). stop: token ids, or texts, however they are spelled in tokens, besides the target's
  end-of-sequence ids (left out under ignore_eos). draft_length: drafts a round, at most the drafter's γ; one for all is compiled for, a
  list with one a prompt (0: none) is not. logprobs: the target's own, before any setting. schedule: "fixed", or a function of the
  confidences [B,L] (calibrated, where the drafter has a calibration) to lengths [B]; keep one function object, another one compiles anew. A
  schedule weighs requests against each other, so those that are sampled need seeds of their own. record: keep drafts and confidence logits
  of every round.

  A prompt that cannot be served (empty, too long, no new tokens asked for, ids outside the vocabulary) gets a Completion with finish_reason
  "error" and leaves its batch mates alone. Raises ValueError for settings that are wrong for all, and NoPromptServed, a
  ValueError, where no prompt can be served.
  """
  if not isinstance(target, Target) or not isinstance(drafter, Drafter | None):
    raise ValueError("target and drafter must be loaded: specdec_jax.load_target(…), load_drafter(…, target)")
  if isinstance(prompts, str):
    raise ValueError("prompts is one text; give a list of texts or of token lists")
  batch = len(prompts)
  if not batch:
    raise ValueError("no prompts")
  if np.size(max_new_tokens) not in (1, batch) or not np.issubdtype(np.asarray(max_new_tokens).dtype, np.integer):
    raise ValueError(f"max_new_tokens must be an integer, or {batch} of them, not {max_new_tokens}")
  caps = np.broadcast_to(np.asarray(max_new_tokens), (batch,))
  drafts = None if draft_length is None or np.ndim(draft_length) == 0 else np.asarray(draft_length)
  method = make_method(target, drafter, draft_length if drafts is None else None, schedule, rule, logprobs, record)
  if drafts is not None and (
      drafts.shape != (batch,) or drafts.dtype.kind not in "iu" or drafts.min() < 0 or drafts.max() > method.draft_length):
    raise ValueError(f"draft_length must be {batch} integers from 0 to {method.draft_length}, or one from 1, not {draft_length}")
  ids, errors = zip(*(prompt_ids(target, i, p, int(c)) for i, (p, c) in enumerate(zip(prompts, caps))))
  if all(errors):
    raise NoPromptServed(list(errors))
  ids = [[0] if error else x for x, error in zip(ids, errors)]  # A bad row idles: it stops at its first token.
  caps = np.where([e is not None for e in errors], 1, caps)

  lengths = np.array([len(x) for x in ids])
  tokens = np.zeros((batch, prompt_bucket(int(lengths.max()))), np.int32)
  for row, x in zip(tokens, ids):
    row[: len(x)] = x
  sampling = make_sampling(batch, target.vocab, temperature, top_k, top_p, seed, prompts=ids, **sampling_options)
  if method.schedule is not None and sampling.temperature is not None and (
      len(np.unique(jax.random.key_data(sampling.keys), axis=0)) < batch):
    raise ValueError("a schedule with sampling needs another seed for each request (seed=[…] or None): equal ones share their noise, "
                     "and one request's drafts would tell of the other's before those are admitted")
  stop_tokens, stop_texts = stops_of(target, stop, ignore_eos)
  stops = np.tile(stop_tokens, (batch, 1))
  limits = Limits(*(None if x is None else jnp.asarray(x, jnp.int32) for x in (caps, stops, drafts)))
  size = round_up(batch, sharding.ways(target.mesh))
  if size > batch:  # Slots that the mesh needs besides idle behind one token.
    rows = np.minimum(np.arange(size), batch - 1)
    tokens, lengths, sampling, limits = jax.tree.map(lambda x: x[rows], (tokens, lengths, sampling, limits))
    limits = limits.replace(caps=jnp.where(np.arange(size) < batch, limits.caps, 1))
  with sharding.use(target.mesh):
    return _generate(
        method, target, drafter.params if drafter else None, tokens, lengths, sampling, limits, int(caps.max()), stop_texts, errors)


def _generate(
    method: Method, target: Target, weights, tokens, lengths, sampling: Sampling, limits: Limits, cap: int, stop_texts, errors,
) -> list[Completion]:
  """`generate` behind its checks; every process of a mesh calls it with the same."""
  size = len(tokens)
  empty = init_state if target.mesh is None else _empty
  state = empty(method, size, room(tokens.shape[1], cap, method.draft_length), target.dtype).replace(counts=sampling.counts)
  sampling = sampling.replace(counts=None)  # From here on the state's.
  state, output = _prefill(method, target.params, weights, state, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), sampling, limits)
  transcript = _append(init_transcript(method, size, cap), output, None)
  run = functools.partial(_decode, method, target.params, weights, sampling=sampling, limits=limits)
  if not stop_texts:
    return _completions(target, *run(state, transcript, most=jnp.int32(2**31 - 1)), errors)
  ends = {}
  while True:
    state, transcript = run(state, transcript, most=jnp.int32(STOP_TEXT_ROUNDS))
    ends |= find_stop_texts(target, transcript, state.emitted, stop_texts, ends)
    ended = np.isin(np.arange(size), list(ends))
    state = state.replace(finish=jnp.where(ended, STOP, state.finish))
    if not (sharding.fetch(state.finish, target.mesh) == RUNNING).any():
      return _completions(target, state, transcript, errors, ends)


def find_stop_texts(target: Target, transcript: Transcript, emitted: Int["B"], texts: Sequence[str], known) -> dict[int, tuple[int, str]]:
  """`find_stop_text` of every request that is not `known` to hold one and does."""
  out = {}
  tokens, emitted = sharding.fetch((transcript.tokens, emitted), target.mesh)
  for i, (row, n) in enumerate(zip(tokens, emitted)):
    found = None if i in known else find_stop_text(target, row[:n].tolist(), texts)
    if found:
      out[i] = found
  return out


def find_stop_text(target: Target, tokens: Sequence[int], texts: Sequence[str], before: int = 0) -> tuple[int, str] | None:
  """(how many tokens it takes to complete one of the stop texts, the text before it), or None; the first `before` hold none."""
  decode = lambda count: target.tokenizer.decode(tokens[:count]).rstrip("\ufffd")  # Half a character may follow.
  holds = lambda text: any(s in text for s in texts)
  if not holds(decode(len(tokens))):
    return None
  count = next(c for c in range(before + 1, len(tokens) + 1) if holds(decode(c)))
  text = decode(count)
  return count, text[: min(text.index(s) for s in texts if s in text)]


def fault_text(finish: int, count: int) -> str | None:
  """What a request that ended with a fault after `count` tokens says of it; None without one."""
  return f"{FAULTS[finish]} gave no distribution for output token {count} (NaN or infinite numbers)" if finish in FAULTS else None


def make_method(
    target: Target, drafter: Drafter | None, draft_length: int | None, schedule: str | Schedule, rule: str, logprobs: bool,
    record: bool = False,
) -> Method:
  """The static part of a run. Raises ValueError naming what does not fit the drafter."""
  if rule not in verify.RULES:
    raise ValueError(f"unknown acceptance rule {rule!r}; exact rules: {', '.join(verify.RULES)}")
  if schedule != "fixed" and not callable(schedule):
    raise ValueError(f"unknown schedule {schedule!r}: 'fixed', or a function of the confidences")
  if drafter is None and (draft_length is not None or callable(schedule) or record):
    raise ValueError("draft_length, schedule and record need a drafter")
  target.decoder.check_rewinds(target.name)
  if drafter is None:
    return Method(target.decoder, rule=rule, logprobs=logprobs)
  if drafter.config is not None and (
      (drafter.config.model.vocab, drafter.config.target_layers) != (target.config.vocab, target.config.layers)):
    raise ValueError(f"{drafter.name} was made for another target than {target.name}: vocabulary and layers {drafter.config.model.vocab}, "
                     f"{drafter.config.target_layers}, not {target.config.vocab}, {target.config.layers}")
  gamma = drafter.model.draft_length
  if draft_length is not None and (np.asarray(draft_length).dtype.kind not in "iu" or not 1 <= draft_length <= gamma):
    raise ValueError(f"draft_length must be from 1 to {gamma} for {drafter.name}, not {draft_length}")
  known = drafter.config.model.max_positions if drafter.config else target.config.max_positions
  return Method(
      target.decoder, drafter.model, draft_length or gamma, None if schedule == "fixed" else schedule, rule, logprobs,
      drafter.calibration.temperatures if drafter.calibration else None, record, known if known < target.config.max_positions else None)


def stops_of(target: Target, stop: Sequence[int | str] | None, ignore_eos: bool) -> tuple[list[int], list[str]]:
  """(the ids that end a request, behind them -1, which no token equals, to a multiple of 4: few shapes to compile; the texts
  that do). A special token, which no text shows, ends by its id."""
  ids, texts = [] if ignore_eos else list(target.config.eos), []
  if isinstance(stop, str) or np.ndim(stop) == 0 and stop is not None:
    raise ValueError(f"stop is {stop!r}: give a list of token ids and texts")
  for s in () if stop is None else stop:
    if not isinstance(s, str):
      if np.ndim(s) or np.asarray(s).dtype.kind not in "iu" or not 0 <= int(s) < target.config.vocab:
        raise ValueError(f"stop holds {s!r}, which is neither a text nor a token id from 0 to {target.config.vocab - 1}")
      ids.append(int(s))
      continue
    if target.tokenizer is None:
      raise ValueError(f"{target.name} has no tokenizer: give stop tokens as ids")
    if not s:
      raise ValueError("a stop text is empty")
    found = target.tokenizer.encode(s)
    special = [i for i in found if not target.tokenizer.decode([i])]
    if special and len(found) > 1:
      raise ValueError(f"stop text {s!r} holds the special tokens {special}, which no text shows: give such a token alone, or its id")
    ids += special
    if not special:
      texts.append(s)
  ids = sorted(set(ids))
  return ids + [-1] * (round_up(max(len(ids), 1), 4) - len(ids)), texts


def prompt_ids(target: Target, index: int, prompt: str | Sequence[int], cap: int) -> tuple[list[int], str | None]:
  """Token ids of a prompt, and what is wrong with it, or None."""
  if isinstance(prompt, str):
    if target.tokenizer is None:
      return [0], f"{target.name} has no tokenizer: give prompt {index} as token ids"
    ids = target.tokenizer.encode(prompt)
  else:
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(tokens, Sequence) or not all(isinstance(t, (int, np.integer)) for t in tokens):
      return [0], f"prompt {index} is neither a text nor a list of token ids: {str(prompt)[:60]}"
    ids = [int(t) for t in tokens]
  if not ids:
    return ids, f"prompt {index} is empty"
  if cap < 1:
    return ids, f"prompt {index} asks for {cap} new tokens; max_new_tokens must be at least 1"
  wrong = [t for t in ids if not 0 <= t < target.config.vocab]
  if wrong:
    return ids, f"prompt {index} holds ids outside the vocabulary of {target.config.vocab}: {wrong[:5]}"
  if len(ids) + cap > target.config.max_positions:
    return ids, (
        f"prompt {index} of {len(ids)} tokens and {cap} new ones do not fit the {target.config.max_positions} positions of {target.name}")
  return ids, None


def prompt_bucket(n: int) -> int:
  """Padded prompt length: powers of two from 64, so that few shapes are compiled."""
  return max(64, 1 << (n - 1).bit_length())


def round_up(n: int, step: int) -> int:
  """The smallest multiple of `step` that is at least n."""
  return -(-n // step) * step


def init_state(method: Method, batch: int, length: int, dtype: str = "float32", pending: int = 0) -> DecodeState:
  """An empty state of `batch` slots, each with room for `length` tokens; dtype: of the target's cache; pending: P, rows that the
  drafter may be behind."""
  zeros = jnp.zeros((batch,), jnp.int32)
  behind = None
  if method.drafter and pending:
    taps = jnp.zeros((batch, pending, len(method.taps), method.decoder.config.width), dtype)
    behind = Pending(taps, jnp.zeros((batch, pending), jnp.int32), zeros + 0)
  return DecodeState(
      cache=method.decoder.init_cache(batch, length, dtype), drafter=method.drafter.init_state(batch, length) if method.drafter else None,
      anchor=zeros, emitted=zeros + 0, finish=zeros + 0, pending=behind)


def room(prompt_length: int, cap: int, draft_length: int) -> int:
  """Rows that a slot needs for a padded prompt and `cap` tokens: the last round may overshoot the cap by a whole block. It follows
  from the padded length and the cap alone, so that prompts of one bucket share a compilation."""
  return round_up(prompt_length + cap + draft_length + 1, 128)


def init_transcript(method: Method, batch: int, cap: int) -> Transcript:
  """An empty transcript of at most `cap` tokens a request, and a block more."""
  width = round_up(cap + method.draft_length + 1, 64)
  return Transcript(
      tokens=jnp.zeros((batch, width), jnp.int32), logprobs=jnp.zeros((batch, width)) if method.logprobs else None,
      rounds=jnp.zeros((batch, width, 3), jnp.int32), round_count=jnp.zeros((batch,), jnp.int32),
      drafts=jnp.zeros((batch, width, method.draft_length), jnp.int32) if method.record else None,
      confidences=jnp.zeros((batch, width, method.draft_length)) if method.record else None)


def _completions(target: Target, state: DecodeState, transcript: Transcript, errors, ends=None) -> list[Completion]:
  host, emitted, finish_codes = sharding.fetch((transcript, state.emitted, state.finish), target.mesh)
  out = []
  for i, error in enumerate(errors):
    if error is not None:
      out.append(Completion([], None, "error", [], None, error))
      continue
    n, text, finish = int(emitted[i]), None, int(finish_codes[i])
    rounds = [tuple(r) for r in host.rounds[i, : int(host.round_count[i])].tolist()]
    if ends and i in ends:
      n, text = ends[i]
      rounds = cut_rounds(rounds, n - 1)
    tokens = host.tokens[i, :n].tolist()
    kept = lambda x, i=i, rounds=rounds: None if x is None else x[i, : len(rounds)].tolist()
    if target.tokenizer and text is None:
      text = target.tokenizer.decode(tokens)
    out.append(Completion(
        tokens, text, FINISH_REASONS[finish], rounds, host.logprobs[i, :n].tolist() if host.logprobs is not None else None,
        fault_text(finish, n), kept(host.drafts), kept(host.confidences)))
  return out


def cut_rounds(rounds: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
  """The rounds that emitted the first `count` tokens behind the prefill's, the last of them cut where they end."""
  out = []
  for drafted, accepted, emitted in rounds:
    if count <= 0:
      break
    emitted = min(emitted, count)
    out.append((drafted, min(accepted, emitted), emitted))
    count -= emitted
  return out
