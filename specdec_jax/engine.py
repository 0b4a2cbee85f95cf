"""Continuous batching: requests come and go while rounds of scheduled speculative decoding run over the slots that they hold.

This is the host's half; `slots` has the compiled functions. The host picks the bucket of a round, the rows that it verifies, from
confidences of rounds before (`schedule.asynchronous`) and launches it while the round before still runs, so nothing waits for the
device. Slots live in arrays of one of a few sizes; going from one to another re-orders them. After `warm_up` nothing compiles.
"""

import bisect
import collections
import dataclasses
import datetime
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import calibrate, cost, decode, metrics, report, sharding
from specdec_jax import schedule as schedules
from specdec_jax.cost import CostTable, CostTableMissing
from specdec_jax.decode import DRAFTER_FAULT, RUNNING, STOP, DecodeState, Draft, Method, RoundOutput
from specdec_jax.drafters.base import Drafter
from specdec_jax.hub import load_drafter
from specdec_jax.models.cache import Cache
from specdec_jax.models.target import Target
from specdec_jax.requests import Filling, Flight, QueueFull, Request, Served
from specdec_jax.sampling import host_sampling
from specdec_jax.slots import DEFAULTS, DEFERRED, NEEDS, PROGRAMS, STOP_IDS, Packed, Settings, stack
from specdec_jax.speculation import Speculation
from specdec_jax.typing import Int

ROUNDS_IN_A_ROW = 4  # That a cost table is measured on: served rounds do not wait for each other.
SHRINK_AFTER = 16  # Rounds that fewer slots must have been enough for.
MOST_FAILURES = 5  # Of the device, in a row.
FAILED_DRAFTS = 3  # Failures in a row, all while drafting, that are called the drafter's.


def memory_plan(target: Target, drafter: Drafter | None, method: Method, slots: int, length: int) -> dict[str, int]:
  """Bytes: of the weights (a table that both share counts once), of one slot's caches, of what a round keeps of a slot to rewind its
  recurrent states, of all caches, and at the peak, while slots are re-ordered and a prompt is read."""
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  shared = {id(x) for x in jax.tree.leaves(target.params)}
  weights = size(target.params)
  drafter_bytes = 0 if drafter is None else size([x for x in jax.tree.leaves(drafter.params) if id(x) not in shared])
  slot = size(jax.eval_shape(lambda: decode.init_state(method, 1, length, target.dtype, DEFERRED))) + 4 * target.vocab  # With its counts.
  rewind = size(jax.eval_shape(functools.partial(_verified_cache, method, target.dtype, length), target.params).fed)
  return {"target_bytes": weights, "drafter_bytes": drafter_bytes, "slot_bytes": slot, "rewind_bytes": rewind, "cache_bytes": slots * slot,
          "peak_bytes": weights + drafter_bytes + (2 * slots + 1) * slot + slots * rewind}


def _verified_cache(method: Method, dtype: str, length: int, params) -> Cache:
  """A slot's cache between verify and commit."""
  tokens = jnp.zeros((1, 1 + method.draft_length), jnp.int32)
  return method.decoder.apply({"params": params}, tokens, method.decoder.init_cache(1, length, dtype))[2]


def _live_bytes() -> int:
  """Of all arrays of this process."""
  return sum(x.nbytes for x in jax.live_arrays())


def _powers(slots: int) -> tuple[int, ...]:
  """1, 4, 16, … and `slots`."""
  return tuple(sorted({4**i for i in range(10) if 4**i < slots} | {slots}))


def _chunk_bucket(n: int, chunk: int) -> int:
  """Padded length of a part of a prompt: powers of two from 16, at most `chunk`."""
  return min(max(16, 1 << (n - 1).bit_length()), chunk)


_SAMPLING_OPTIONS = set(inspect.signature(host_sampling).parameters) - {"batch", "vocab", "seed", "prompts"}


class Engine:
  """A target, perhaps with a drafter, that serves requests as they come. One thread drives it, through `step` or what calls it.

  slots: requests decoded at once, in arrays of one of the sizes `slot_buckets`, split over the batch axes of the target's mesh, if it has
  one; max_length: tokens of prompt and answer (None: 2048, or as many as the target has positions). schedule: "fixed" (draft_length
  drafts), "asynchronous" (by cost tables `sps`: one for each slot bucket, or one for all; `profile` measures them), or a function of the
  confidences, for whose lengths the host has to wait. buckets: rows of a verify call, by slot bucket; draft_slots: how many slots the
  drafter's pass may be cut to where not all are drafted for (None: a half and a quarter; none on a mesh of several, or for a schedule that
  is a function); reaches: cache rows that a round reads (128, 256, …); needs: what code is compiled for (NEEDS), requests that need more
  are refused. queue: requests that may wait. chunk: prompt tokens read between two rounds. memory: bytes that caches may take; fewer slots
  where more do not fit. adaptive: correct the cost tables by the rounds that are served, and pause drafting for a request that it does not
  pay for. overlap: launch a round before the one before is read. drafter may be a name; fallback: go on without a drafter that cannot be
  loaded, raises while it drafts or gives no numbers, and say so in every result. inject: called with the name of every program before it is
  launched; may raise (for tests of faults).

  Under a schedule, or where drafting is paused or switched, a sampled text depends on what was served beside it, though its distribution
  does not, and a seed gives other noise to every request; under "fixed" lengths and rule "token" it depends on the request and its seed
  alone (`Sampling.round_keys`). Raises ValueError for settings that do not fit; `submit` raises CostTableMissing for an asynchronous
  schedule without tables.
  """

  def __init__(
      self, target: Target, drafter: Drafter | str | None = None, slots: int = 16, max_length: int | None = None,
      schedule: str | schedules.Schedule = "asynchronous", sps: CostTable | Mapping[int, CostTable] | None = None, rule: str = "token",
      draft_length: int | None = None, logprobs: bool = False, slot_buckets: Sequence[int] | None = None,
      buckets: Mapping[int, Sequence[int]] | None = None, draft_slots: Sequence[int] | None = None, reaches: Sequence[int] | None = None,
      needs: Sequence[str] = NEEDS, queue: int = 1024, chunk: int = 128,
      memory: int | None = None, adaptive: bool = True, overlap: bool = True, fallback: bool = False,
      inject: Callable[[str], None] | None = None,
  ):
    self.why_off = None if drafter is not None else "no drafter"
    if isinstance(drafter, str):
      try:
        drafter = load_drafter(drafter, target)
      except (OSError, ValueError) as e:
        if not fallback:
          raise
        drafter, self.why_off = None, f"the drafter cannot be loaded: {e}"
    positions = target.config.max_positions
    max_length = min(2048, positions) if max_length is None else max_length
    if not 2 <= max_length <= positions:
      raise ValueError(f"max_length {max_length} must be from 2 to the {positions} positions of {target.name}")
    for name, values in (
        ("slots", [slots]), ("queue", [queue]), ("chunk", [chunk]), ("slot_buckets", slot_buckets or ()), ("reaches", reaches or ()),
        ("draft_slots", draft_slots or ()),
        *((f"buckets[{s}]", b) for s, b in (buckets or {}).items())):
      wrong = [v for v in values if not isinstance(v, (int, np.integer)) or v < 1]
      if wrong:
        raise ValueError(f"{name} must be of integers from 1, not {wrong[0]!r}")
    if not needs or not set(needs) <= set(NEEDS):
      raise ValueError(f"needs must be some of {', '.join(NEEDS)}, not {needs}")
    if not callable(schedule) and schedule not in ("fixed", "asynchronous"):
      raise ValueError(f"unknown schedule {schedule!r}: 'fixed', 'asynchronous', or a function of the confidences")
    self.asynchronous = schedule == "asynchronous" and drafter is not None
    chosen = "fixed" if drafter is None else schedules.by_rank if self.asynchronous else schedule
    self.method = decode.make_method(target, drafter, draft_length if drafter else None, chosen, rule, logprobs)
    if self.method.schedule is not None and not decode.gives_confidences(self.method, drafter.params, target.vocab):
      raise ValueError(f"{drafter.name} gives no confidences, so its drafts cannot be scheduled: use schedule='fixed'")
    self.target, self.drafter, self.schedule = target, drafter, schedule if drafter else "fixed"
    self.needs = tuple(n for n in NEEDS if n in needs)
    self.max_length, self.length = max_length, decode.round_up(max_length + self.method.draft_length + 1, 128)
    self.queue_limit, self.chunk, self.overlap, self.fallback = queue, chunk, overlap, fallback
    if memory is not None:
      slot = memory_plan(target, drafter, self.method, 1, self.length)["slot_bytes"]
      if memory < slot:
        raise ValueError(f"a slot of {max_length} tokens takes {slot} bytes, more than the {memory} of memory")
      slots = min(slots, memory // slot)
    ways = sharding.ways(target.mesh)
    slots -= slots % ways if memory is not None else 0
    wanted = [ways * s for s in _powers(slots // ways)] if slot_buckets is None else slot_buckets
    self._check_mesh([slots, *wanted])
    self.slots, self.plan = slots, memory_plan(target, drafter, self.method, slots, self.length)
    self.slot_buckets = tuple(sorted({s for s in wanted if s < slots} | {slots}))
    self.buckets = {s: self._grid(s, (buckets or {}).get(s)) for s in self.slot_buckets}
    whole = ways > 1 or callable(schedule)  # Such a schedule weighs the drafts of all slots beside the tokens of all.
    cuts = {s: [] if whole else [s // 4, s // 2] if draft_slots is None else draft_slots for s in self.slot_buckets}
    self.draft_slots = {s: tuple(sorted({n for n in cuts[s] if 0 < n < s} | {s})) for s in self.slot_buckets}
    self.reaches = tuple(sorted(
        {n for n in ([128 * 2**i for i in range(20)] if reaches is None else reaches) if n < self.length} | {self.length}))
    self.costs: dict[int, CostTable] = {}
    self._speculation = Speculation(self.method.draft_length, self.buckets, adaptive)
    self._choosing = self.asynchronous and adaptive  # Which requests get a drafter's context.
    self._alone = dataclasses.replace(self.method, drafter=None)  # For those that do not: from the same noise.
    if sps is not None:
      self.use_costs(sps)
    self._inject = inject or (lambda program: None)
    self._weights = drafter.params if drafter else None
    self.compiled = 0
    self._none = {s: decode.no_draft(s) for s in self.slot_buckets}
    self._speculate, self._warm = drafter is not None, None
    self._behind = 0  # Rounds whose rows the drafter's context lacks.
    self._follows, self._collected = False, 0.0
    self._queue: collections.deque[Request] = collections.deque()
    self._requests: dict[int, Request] = {}
    self._ids = itertools.count()
    self._flights: collections.deque[Flight] = collections.deque()
    self._filling: Filling | None = None
    self._held: list[Request | None] = [None] * self.slot_buckets[0]
    self._state: DecodeState | None = self._empty(self.slot_buckets[0])
    self._settings: dict[str, Settings] = {}
    self._small = self._failures = self._failed_drafts = 0
    self._launching: str | None = None
    self.restarts: list[str] = []
    self.forget()

  def forget(self) -> None:
    """Begins the counts of `stats` anew."""
    self._invalid, self._bytes_before = 0, None
    self._done: collections.deque[Served] = collections.deque(maxlen=4096)
    self._counts = {name: collections.Counter() for name in ("bucket", "verify_tokens", "queue", "slots")}

  def _check_mesh(self, sizes: Sequence[int]) -> None:
    ways = sharding.ways(self.target.mesh)
    wrong = [s for s in sizes if s % ways or not s]
    if wrong:
      raise ValueError(
          f"slots, and each of slot_buckets, must be multiples of the {ways} devices "
          f"of mesh axes {' × '.join(sharding.BATCH)}, not {wrong[0]}")
    if self.target.mesh is not None and not all(d.process_index == jax.process_index() for d in self.target.mesh.devices.flat):
      raise ValueError("an engine drives the devices of its own process: give it a mesh of jax.local_devices(), one engine a process")

  def _grid(self, size: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Rows that a verify call of `size` slots may have: one a slot, every draft of every slot, and some between."""
    most = size * (1 + self.method.draft_length)
    return tuple(sorted({n for n in (cost.buckets(most) if wanted is None else wanted) if size < n < most} | {size, most}))

  def _bucket(self, size: int, tokens: int) -> int:
    """The smallest bucket that holds so many tokens."""
    return self._bucket_of(self.buckets[size], tokens)

  def _draft_bucket(self, size: int, tokens: int) -> int:
    """The same for a round with drafts: `size` itself is that of rounds without."""
    return self._bucket(size, max(tokens, size + 1))

  @staticmethod
  def _bucket_of(grid: Sequence[int], n: int) -> int:
    return grid[bisect.bisect_left(grid, n)]

  def _reach(self, drafting: bool) -> int:
    """Cache rows that a round reads: those of the longest request, what rounds in flight may add, and its own; the last token has none yet.
    """
    longest = max(len(r.prompt) + len(r.tokens) for r in self._live())
    drafts = drafting + sum(f.bucket is not None and f.bucket != len(f.requests) for f in self._flights)  # Rounds with some.
    return self._bucket_of(self.reaches, min(longest + len(self._flights) + drafts * self.method.draft_length, self.length))

  def use_costs(self, sps: CostTable | Mapping[int, CostTable]) -> None:
    """Cost tables for the asynchronous schedule and for judging drafts. Raises ValueError where one is missing."""
    if not isinstance(sps, (CostTable, Mapping)):
      raise ValueError(f"sps must be a cost table, or one for each of {self.slot_buckets} slots, not {sps!r}")
    tables = dict.fromkeys(self.slot_buckets, sps) if isinstance(sps, CostTable) else dict(sps)
    missing = [s for s in self.slot_buckets if s not in tables]
    if missing:
      raise ValueError(f"no cost table for {missing} slots; there are some for {sorted(tables)}")
    self.costs = {s: tables[s] for s in self.slot_buckets}
    self._speculation.use_costs(self.costs)

  # Requests.

  def submit(
      self, prompt: str | Sequence[int], max_new_tokens: int = 64, seed: int | None = None, stop: Sequence[int | str] | None = None,
      ignore_eos: bool = False, speculation: bool = True, deadline: float | None = None, **sampling_options,
  ) -> int:
    """Queues a request and returns its number. sampling_options: as of `generate` (temperature, top_k, …). speculation False: no
    drafts for it. deadline: seconds from now after which it ends with what it has. Raises QueueFull, or ValueError for a
    request that cannot be served."""
    if len(self._queue) >= self.queue_limit:
      raise QueueFull(f"{self.queue_limit} requests wait already")
    unknown = set(sampling_options) - _SAMPLING_OPTIONS
    if unknown:
      raise ValueError(f"no such setting of a request: {', '.join(sorted(unknown))}; there are {', '.join(sorted(_SAMPLING_OPTIONS))}")
    if not isinstance(max_new_tokens, (int, np.integer)):
      raise ValueError(f"max_new_tokens must be an integer, not {max_new_tokens!r}")
    if deadline is not None and not (isinstance(deadline, (int, float)) and math.isfinite(deadline)):
      raise ValueError(f"deadline must be a number of seconds, not {deadline!r}")
    ids, wrong = decode.prompt_ids(self.target, 0, prompt, max_new_tokens)
    if wrong is None and len(ids) + max_new_tokens > self.max_length:
      wrong = f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones do not fit a slot of {self.max_length}"
    if wrong:
      raise ValueError(wrong)
    stop_ids, stop_texts = decode.stops_of(self.target, stop, ignore_eos)
    stop_ids = [i for i in stop_ids if i >= 0]
    if len(stop_ids) > STOP_IDS:
      raise ValueError(f"{len(stop_ids)} stop tokens; a request may have {STOP_IDS}")
    if self.asynchronous and not self.costs:
      raise CostTableMissing("the asynchronous schedule needs cost tables: Engine(sps=…), or engine.use_costs(engine.profile(context))")
    made = host_sampling(1, self.target.vocab, seed=seed, prompts=[ids], **sampling_options)
    need = ("full" if any(x is not None for x in (made.bias, made.counts)) else "greedy" if made.temperature is None else
            "filtered" if any(x is not None for x in (made.top_k, made.top_p, made.min_p)) else "plain")
    able = [n for n in self.needs if NEEDS.index(n) >= NEEDS.index(need)]
    if not able:
      raise ValueError(f"this request needs {need!r} sampling code; the engine was built for {', '.join(self.needs)}")
    row = {k: v if getattr(made, k) is None else getattr(made, k)[0] for k, v in (DEFAULTS | {"bias": None, "prompt": None}).items()}
    row |= {"caps": max_new_tokens, "stops": np.array(stop_ids + [-1] * (STOP_IDS - len(stop_ids)), np.int32),
            "seeds": np.array([made.keys[0], 0], np.uint32)}
    if self._bytes_before is None:
      self._bytes_before = _live_bytes()
    now, number = time.perf_counter(), next(self._ids)
    if self.method.schedule is not None or self.method.rule == "block":
      row["seeds"][1] = number % 2**32
    request = Request(
        number, ids, row, able[0], stop_texts, speculation and self.drafter is not None, now, None if deadline is None else now + deadline,
        None if speculation else "the request asked for none")
    self._requests[request.id] = request
    self._queue.append(request)
    return request.id

  def cancel(self, number: int) -> None:
    """Ends a request with what it has; nothing happens to one that has ended."""
    request = self._request(number)
    if request.served is None:
      self._finish(request, "cancelled")

  def stream(self, number: int) -> Iterator[list[int]]:
    """The request's tokens as they are delivered, one list a round, to one reader; drives the engine while it waits."""
    request = self._request(number)
    while True:
      if len(request.tokens) > request.streamed:
        new, request.streamed = request.tokens[request.streamed :], len(request.tokens)
        yield new
      elif request.served:
        return
      else:
        self.step()

  def result(self, number: int) -> Served:
    """What a request got; drives the engine until it has ended. The engine forgets the request."""
    request = self._request(number)
    while request.served is None:
      self.step()
    return self._requests.pop(number).served

  def ended(self) -> list[int]:
    """Requests that have ended and whose results were not taken."""
    return [r.id for r in self._requests.values() if r.served]

  def run(self) -> None:
    """Steps until nothing is left to do."""
    while self.step():
      pass

  def set_speculation(self, on: bool) -> None:
    """Turns drafting off, or on again, for all; contexts are kept up meanwhile."""
    if on and self.method.drafter is None:
      raise ValueError(f"there is nothing to draft with: {self.why_off}")
    self._speculate = on
    if self.method.drafter is not None:  # Else the reason stays what it was.
      self.why_off = None if on else "turned off"

  def _request(self, number: int) -> Request:
    if number not in self._requests:
      raise KeyError(f"no request {number}: there never was, or its result was taken")
    return self._requests[number]

  # The loop.

  def step(self) -> bool:
    """Reads some of a prompt, launches a round, takes in the round before. False when there is nothing left to do."""
    self._expire()
    self._counts["queue"][len(self._queue)] += 1
    try:
      if self._state is None:
        self._state = self._empty(self.slot_buckets[0], launch=self._launch)
      if self._choosing and self._speculate:
        self._reconsider()
      self._fill()
      busy = any(self._held)
      if busy:
        self._round()
      while len(self._flights) > (1 if busy and self.overlap else 0):
        self._collect()
    except BaseException as e:  # Also an interrupt leaves arrays behind that were given away.
      self._give_up()
      if not self._survives(e):
        raise
    return bool(self._queue or self._filling or self._flights or any(self._held))

  def _expire(self) -> None:
    now = time.perf_counter()
    for request in [*self._queue, *self._live(), *([self._filling.request] if self._filling else ())]:
      if request.served is None and request.deadline is not None and now > request.deadline:
        self._finish(request, "deadline")

  def _live(self) -> list[Request]:
    return [r for r in self._held if r is not None]

  def _fill(self) -> None:
    """Reads the next `chunk` tokens of waiting prompts, of several where they are short; all of one while nobody is kept waiting by that.
    """
    spent = 0
    while True:
      if self._filling is not None and self._filling.request.served:
        self._filling = None
      if self._filling is None:
        if not self._queue or len(self._live()) >= self.slots:
          return
        request = self._queue[0]
        counts = np.zeros((1, self.target.vocab), np.int32)
        np.add.at(counts[0], request.tokens, 1)  # It has some where it was interrupted.
        request.kept = self._keeps(request)  # Anew, where it comes a second time.
        row = self._empty(1, np.array([len(request.tokens)], np.int32), counts, RUNNING, self._launch, request.kept)
        self._filling = Filling(request, request.prompt + request.tokens, 0, row)
        self._queue.popleft()
      filling = self._filling
      part = filling.text[filling.done : filling.done + self.chunk]
      tokens = np.zeros((1, _chunk_bucket(len(part), self.chunk)), np.int32)
      spent += tokens.size
      if any(self._held) and spent > self.chunk:
        return
      tokens[0, : len(part)] = part
      reach = self._bucket_of(self.reaches, filling.done + len(part))
      method, weights = self._keeper(filling.request.kept)
      row, last = self._launch("read", method, self.target.params, weights, filling.row, tokens, np.array([len(part)], np.int32), reach)
      self._filling = dataclasses.replace(filling, done=filling.done + len(part), row=row)
      if self._filling.done == len(filling.text):
        self._admit(filling.request, row, last)
        self._filling = None

  def _admit(self, request: Request, row: DecodeState, last) -> None:
    live = self._live()
    if len(live) == len(self._held):
      self._resize(min(s for s in self.slot_buckets if s > len(live)))
    row, output = self._launch(
        "first", self._keeper(request.kept)[0], request.need, self.target.vocab, self.target.params, row, last,
        stack([request.settings], request.need, self.target.vocab))
    slot = self._held.index(None)
    if not any(r.kept for r in live):  # Whatever the others lack, nobody drafts for them.
      self._behind = 0
    self._insert(row, slot, request.kept, self._launch)
    self._held[slot] = request
    self._settings.clear()
    self._fly((request,), None, output, None, None, request.kept)

  def _insert(self, row: DecodeState, slot: int, kept: bool, launch: Callable) -> None:
    aside = self._aside(kept)
    part = self._state.replace(**dict.fromkeys(aside))
    self._state = launch("insert", self.target.decoder.stacked, part, row, np.int32(slot)).replace(**aside)

  def _round(self) -> None:
    """Launches a round over the slots."""
    self._shrink()
    held, size = tuple(self._held), len(self._held)
    alive = np.array([r is not None for r in held])
    most = np.array([0 if r is None else self._most(r) for r in held], np.int32)
    need = max((r.need for r in self._live()), key=NEEDS.index)
    if need not in self._settings:
      self._settings[need] = jax.device_put(stack([r and r.settings for r in held], need, self.target.vocab))
    budget, bucket, places = self._pick(held, most)
    drafting = bucket != size
    reach = self._reach(drafting)
    made = self._none[size]
    kept = any(r.kept for r in self._live())
    if self._behind and self.method.drafter and kept and (drafting or self._behind == DEFERRED):
      self._state = self._launch("catch_up", self.method, self._weights, self._state)
      self._behind = 0
    if drafting:
      made = self._draft(self._launch, need, reach, self._settings[need], alive, most, budget, places)
      if bucket is None:
        bucket = self._draft_bucket(size, int(alive.sum() + np.asarray(made.lengths).sum()))
    self._speculation.launched(drafting)
    self._behind += not drafting
    output = self._judge(self._launch, need, reach, self._settings[need], alive, made, bucket, kept)
    self._fly(held, bucket, output, made.proposal.confidence, places, kept)

  def _draft(
      self, launch: Callable, need: str, reach: int, settings: Settings, alive, most, budget: int | None, places: Sequence[int] | None,
  ) -> Draft:
    budget = None if budget is None else np.int32(budget)
    places = None if places is None else np.array(places, np.int32)
    return launch("draft", self.method, need, self.target.vocab, reach, self._weights, self._state, settings, alive, most, budget, places)

  def _judge(
      self, launch: Callable, need: str, reach: int, settings: Settings, alive, made: Draft, bucket: int, kept: bool = True,
  ) -> Packed:
    """Verifies and commits; the state is that after the round then. kept: whether any request's context is kept up for the drafter."""
    (method, weights), aside = self._keeper(kept), self._aside(kept)
    cache, rest = self._state.cache, self._state.replace(cache=None, **dict.fromkeys(aside))
    verified = launch("verify", method, bucket, reach, self.target.params, cache, rest, made, alive)
    cache, fed = verified.cache.replace(fed=()), verified.cache.fed  # The one is given away, the other cannot be used again.
    state, output = launch(
        "commit", method, need, self.target.vocab, weights, rest, cache, verified.replace(cache=None), made, settings, alive, fed)
    self._state = state.replace(**aside) if aside else state
    return output

  def _launch(self, program: str, *args):
    self._launching = program
    self._follows &= program in ("draft", "verify", "commit")
    self._inject(program)
    out = self._run(program, *args)
    self._launching = None
    return out

  def _run(self, program: str, *args):
    before = PROGRAMS[program]._cache_size()
    with sharding.use(self.target.mesh):
      out = PROGRAMS[program](*args)
    self.compiled += PROGRAMS[program]._cache_size() - before
    return out

  def _fly(self, requests, bucket, output, confidence, places, kept) -> None:
    for leaf in jax.tree.leaves((output, confidence)):
      leaf.copy_to_host_async()
    self._flights.append(Flight(
        tuple(r and (r, r.epoch) for r in requests), bucket, output, confidence, self._follows and bucket is not None, places, kept))
    self._follows = bucket is not None

  def _collect(self) -> None:
    """Takes in the oldest round in flight: tokens, ends, confidences."""
    flight = self._flights.popleft()
    packed, logits = jax.device_get((flight.output, flight.confidence))
    output = packed.unpacked()
    before, self._collected = self._collected, time.perf_counter()
    if flight.follows and (self._flights[0].follows if self._flights else self._follows):  # Else it shared the device with a prompt.
      self._speculation.observe(
          len(flight.requests), flight.bucket, self._collected - before, flight.places and len(flight.places), flight.kept)
    survival = None
    if logits is not None:
      self._invalid += int(np.isnan(logits[output.ran]).sum())
      survival = calibrate.survivals(logits, self.method.temperatures and self.method.temperatures[: logits.shape[1]])
    verified = 0
    for slot, (request, epoch) in enumerate(r or (None, 0) for r in flight.requests):
      if request is None or request.served or request.epoch != epoch:
        continue
      if flight.bucket is not None:
        if not output.ran[slot]:
          continue
        counts = int(output.drafted[slot]), int(output.accepted[slot]), int(output.count[slot])
        request.rounds.append(counts)
        verified += 1 + counts[0]
        if request.speculation and request.kept:
          self._speculation.learn(
              request.worth, *counts[:2], None if survival is None or slot not in (flight.places or (slot,)) else survival[slot],
              len(self._live()), len(self._held))
      self._deliver(request, output, slot, flight.bucket is not None)
    if flight.bucket is not None:
      self._counts["verify_tokens"][verified] += 1
      self._counts["bucket"][flight.bucket] += 1
      self._counts["slots"][len(flight.requests)] += 1

  def _deliver(self, request: Request, output: RoundOutput, slot: int, flight_round: bool) -> None:
    """Takes in a request's tokens of a round, or its first one."""
    new, finish = output.tokens[slot, : output.count[slot]].tolist(), int(output.finish[slot])
    before = len(request.tokens)
    request.tokens += new
    self._failures = 0
    if output.logprobs is not None:
      request.logprobs += output.logprobs[slot, : len(new)].tolist()
    if request.stop_texts:
      end = decode.find_stop_text(self.target, request.tokens, request.stop_texts, before)
      if end is not None:
        count, text = end
        new = request.tokens[before:count]
        del request.tokens[count:], request.logprobs[count:]
        if flight_round:
          drafted, accepted, _ = request.rounds.pop()
          request.rounds.append((drafted, min(accepted, len(new)), len(new)))
        request.deliveries.append((time.perf_counter() - request.submitted, len(new)))
        return self._finish(request, "stop", text=text)
    if new:
      request.deliveries.append((time.perf_counter() - request.submitted, len(new)))
    if finish == DRAFTER_FAULT and self.fallback:  # It goes on alone.
      request.speculation, request.why = False, decode.fault_text(finish, len(request.tokens))
      self._requeue([request])
    elif finish != RUNNING:
      self._finish(request, decode.FINISH_REASONS[finish], decode.fault_text(finish, len(request.tokens)))

  def _finish(self, request: Request, reason: str, error: str | None = None, text: str | None = None) -> None:
    if text is None and self.target.tokenizer:
      text = self.target.tokenizer.decode(request.tokens)
    drafted = any(d for d, _, _ in request.rounds)
    unused = "no draft was worth its cost" if request.rounds else "it ended before its first round"
    self._speculation.ended(request.worth)
    why = request.why or self.why_off or (None if drafted else unused)
    request.served = Served(
        list(request.tokens), text, reason, list(request.rounds), list(request.logprobs) if self.method.logprobs else None, error,
        ttft=request.deliveries[0][0] if request.deliveries else None, latency=time.perf_counter() - request.submitted,
        deliveries=tuple(request.deliveries), speculation={"on": request.offered, "why": why})
    if request in self._queue:
      self._queue.remove(request)
    self._held = [None if r is request else r for r in self._held]
    self._settings.clear()
    self._done.append(request.served)

  # Slots.

  def _empty(
      self, size: int, emitted=None, counts=None, finish: int = STOP, launch: Callable | None = None, kept: bool = True,
  ) -> DecodeState:
    emitted = np.zeros(size, np.int32) if emitted is None else emitted
    counts = np.zeros((size, self.target.vocab), np.int32) if counts is None else counts
    return (launch or self._run)(
        "empty", self._keeper(kept)[0], self.length, self.target.dtype, emitted, counts, np.full(size, finish, np.int32))

  def _resize(self, size: int) -> None:
    """Moves the running requests to the first of `size` slots."""
    order = [i for i, r in enumerate(self._held) if r is not None]
    held = [self._held[i] for i in order] + [None] * (size - len(order))
    self._state = self._launch("reorder", self.target.decoder.stacked, self._state, np.array(order + [0] * (size - len(order)), np.int32))
    self._held = held
    self._settings.clear()

  def _shrink(self) -> None:
    """To fewer slots, when fewer have been enough for a while."""
    enough = min(s for s in self.slot_buckets if s >= len(self._live()))
    self._small = self._small + 1 if enough < len(self._held) else 0
    if self._small >= SHRINK_AFTER:
      self._resize(enough)
      self._small = 0

  def _requeue(self, requests: Sequence[Request]) -> None:
    """Gives up their slots; they come back in front of the queue and go on behind the tokens they have."""
    for request in reversed(requests):
      request.epoch += 1
      if request not in self._queue:
        self._queue.appendleft(request)
    self._held = [None if r in requests else r for r in self._held]
    self._settings.clear()

  def _give_up(self) -> None:
    """What the device held is lost, what was delivered is not: the requests go on behind it."""
    filling = [self._filling.request] if self._filling else []
    self._requeue([r for r in dict.fromkeys([*self._live(), *filling]) if r.served is None])
    self._flights.clear()
    self._filling, self._state, self._held = None, None, [None] * self.slot_buckets[0]
    self._behind = 0

  def _survives(self, error: BaseException) -> bool:
    """Whether to go on after a failure: of the device, some times in a row; of the drafter, without it, where that was asked for."""
    why, program, self._launching = f"{type(error).__name__}: {error}", self._launching, None
    device = isinstance(error, jax.errors.JaxRuntimeError)
    self._failed_drafts = self._failed_drafts + 1 if program == "draft" else 0
    if self.fallback and self.method.drafter is not None and isinstance(error, Exception) and (
        self._failed_drafts >= FAILED_DRAFTS if device else program in ("read", "catch_up", "draft", "commit")):  # Those run its code.
      self.method = decode.make_method(self.target, None, None, "fixed", self.method.rule, self.method.logprobs)
      self._weights, self._speculate, self.why_off = None, False, f"the drafter failed: {why}"
      return True
    if not device:
      return False
    self._failures += 1
    if self._failures > MOST_FAILURES:
      raise RuntimeError(f"the device failed {self._failures} times in a row, last with {why}") from error
    self.restarts.append(why)
    return True

  # What to verify.

  def _most(self, request: Request) -> int:
    """Drafts that a request may have verified this round."""
    if not self._speculate or not request.speculation or not request.kept:
      return 0
    request.offered = True
    return self._speculation.most(request.worth)

  def _keeps(self, request: Request) -> bool:
    """Whether the drafter reads a request's text, too. Where costs are not weighed it always does."""
    if not self._choosing or self.method.drafter is None:
      return True
    load = self._load()
    request.crowd = load[0]
    return request.speculation and self._speculation.keeps(*load)

  def _load(self) -> tuple[int, int, tuple[int, ...]]:
    """(requests at once, those that wait among them, slots for so many, how many of those the drafter's pass may be cut to)."""
    running = min(len(self._live()) + len(self._queue), self.slots)
    size = self._bucket_of(self.slot_buckets, running)
    return running, size, self.draft_slots[size]

  def _reconsider(self) -> None:
    """One without a drafter's context is read again, with one, where the load has fallen to half, drafts pay for those who are left, and
    it has more to write than to be read. One at a time, and while no other is read: it would stand behind that one."""
    if self._queue or self._filling is not None:
      return
    load = self._load()
    for request in self._live():
      if request.kept or not request.speculation or 2 * load[0] > request.crowd:
        continue
      if int(request.settings["caps"]) - len(request.tokens) < len(request.prompt) + len(request.tokens):
        continue
      request.crowd = load[0]
      if self._speculation.pays(*load):
        return self._requeue([request])

  def _keeper(self, kept: bool) -> tuple[Method, Any]:
    """(method, weights of the drafter) of programs that keep its context up, or not."""
    return (self.method, self._weights) if kept else (self._alone, None)

  def _aside(self, kept: bool) -> dict[str, Any]:
    """The fields of the state that such programs do not take."""
    return {} if kept else {"drafter": self._state.drafter, "pending": self._state.pending}

  def _pick(self, held: Sequence[Request | None], most: Int["B"]) -> tuple[int | None, int | None, tuple[int, ...] | None]:
    """(drafts that the schedule may admit, rows of the verify call, slots to draft for). No budget where the lengths are fixed; no bucket
    where the schedule has to be asked first; no slots where it is for all."""
    size, running = len(held), sum(r is not None for r in held)
    able = np.flatnonzero(most).tolist()
    if not able:
      return None, size, None
    if self.method.schedule is None:
      return None, self._draft_bucket(size, running + int(most.sum())), self._places(size, able)
    if not self.asynchronous:
      return None, None, self._places(size, able)
    wanted, chosen = self._speculation.plan([held[i].worth for i in able], running, size, self.draft_slots[size])
    if not wanted:
      return 0, size, None
    bucket = self._draft_bucket(size, running + wanted)
    return bucket - running, bucket, self._places(size, [able[i] for i in chosen])

  def _places(self, size: int, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The slots that a pass over those `wanted` covers, and others up to a size that is compiled; None for all."""
    count = self._bucket_of(self.draft_slots[size], len(wanted))
    return None if count == size else (*wanted, *(i for i in range(size) if i not in wanted))[:count]

  # Warm-up, cost, state of health.

  def warm_up(self) -> int:
    """Compiles everything that serving can need and returns how many programs that were. Raises RuntimeError while requests are served."""
    self._check_idle("warm_up")
    before, whole = self.compiled, (self.method, self._weights)
    alone = (decode.make_method(self.target, None, None, "fixed", self.method.rule, self.method.logprobs), None)
    for used in [whole] + [alone] * (self.fallback and self.drafter is not None):
      self.method, self._weights = used
      chunks = sorted({_chunk_bucket(k, self.chunk) for k in range(1, self.chunk + 1)})
      keeping = (False, True) if self._choosing and self.method.drafter else (True,)
      rows = {}
      for kept in keeping:
        (method, weights), row = self._keeper(kept), self._empty(1, finish=RUNNING, kept=kept)
        for n, reach in itertools.product(chunks, self.reaches):
          row, last = self._run(
              "read", method, self.target.params, weights, row, np.zeros((1, n), np.int32), np.array([1], np.int32), reach)
        for need in self.needs:
          table = stack([None], need, self.target.vocab)
          row, _ = self._run("first", method, need, self.target.vocab, self.target.params, row, last, table)
        rows[kept] = row
      for size in self.slot_buckets:
        for other in self.slot_buckets:
          self._run("reorder", self.target.decoder.stacked, self._empty(other), np.zeros(size, np.int32))
        self._state = self._empty(size)
        for kept in keeping:
          self._insert(rows[kept], 0, kept, self._run)
        for need in self.needs:
          for bucket, reach in itertools.product(self.buckets[size] if self.method.drafter else (size,), self.reaches):
            for drafted in self.draft_slots[size] if bucket == self.buckets[size][-1] else (size,):
              self._dry_round(size, need, bucket, reach, self._nobody(size, need), self._run, drafted)
            if bucket == size and False in keeping:
              self._dry_round(size, need, bucket, reach, self._nobody(size, need), self._run, size, kept=False)
        if self.method.drafter:
          self._run("catch_up", self.method, self._weights, self._state)
    self.method, self._weights = whole
    self._state = self._empty(self.slot_buckets[0])
    self._held = [None] * self.slot_buckets[0]
    self.forget()
    self._warm = self.compiled
    return self.compiled - before

  def _nobody(self, size: int, need: str) -> Settings:
    return jax.device_put(stack([None] * size, need, self.target.vocab))

  def _dry_round(
      self, size: int, need: str, bucket: int, reach: int, settings: Settings, launch: Callable, drafted: int, kept: bool = True,
  ) -> Packed:
    """A round for nobody, in which `drafted` slots are drafted for; kept: as in `_judge`."""
    alive = np.ones(size, bool)
    made = self._none[size]
    if bucket != size:
      most = np.full(size, self.method.draft_length, np.int32)
      made = self._draft(
          launch, need, reach, settings, alive, most, bucket - size if self.asynchronous else None, self._places(size, range(drafted)))
    return self._judge(launch, need, reach, settings, alive, made, bucket, kept)

  def profile(self, context: int, repeats: int = 10, need: str | None = None) -> dict[int, CostTable]:
    """A cost table for each slot bucket: rounds one behind another with every slot taken, `context` tokens each, drafting included where
    there are rows for drafts; need: what sampling code, the first of `needs` where None. Raises RuntimeError while requests are served,
    ValueError for a context that does not fit."""
    need, tables = need or self.needs[0], {}
    for size in self.slot_buckets:
      steps = {
          n: functools.partial(lambda step: sum(step().values()), self._timed_round(size, n, context, need, whole=True))
          for n in self.buckets[size]}
      made_from = {**self.manifest(), "slots": size, "context": context, "need": need, "date": datetime.date.today().isoformat()}
      tables[size] = cost.measure(steps, repeats, made_from)
      if self.method.drafter is not None:
        most = self.buckets[size][-1]
        passes = {
            n: functools.partial(lambda step: step()["draft"], self._timed_round(size, most, context, need, drafted=n))
            for n in self.draft_slots[size]}
        found = cost.measure(passes, repeats, {})
        tables[size] = dataclasses.replace(tables[size], draft=tuple(zip(found.tokens, found.seconds)))
      if self._choosing:
        rounds = {
            1 + kept: functools.partial(lambda step: step()["round"], self._timed_round(size, size, context, need, whole=True, kept=kept))
            for kept in (False, True)}
        alone, plain = cost.measure(rounds, repeats, {}).seconds
        tables[size] = dataclasses.replace(tables[size], alone=tables[size].seconds[0] * alone / plain)
    self._state = self._empty(self.slot_buckets[0])
    self._held = [None] * self.slot_buckets[0]
    return tables

  def parts(self, size: int, context: int, repeats: int = 10, need: str | None = None) -> dict[str, float]:
    """Median seconds of draft, verify and commit of a round with all drafts of `size` slots, each alone: the host waits for it.
    Raises as `profile`."""
    step = self._timed_round(size, self.buckets[size][-1], context, need or self.needs[0])
    step()
    runs = [step() for _ in range(repeats)]
    self._state = self._empty(self.slot_buckets[0])
    self._held = [None] * self.slot_buckets[0]
    return {name: float(np.median([r[name] for r in runs])) for name in runs[0]}

  def _timed_round(
      self, size: int, bucket: int, context: int, need: str, whole: bool = False, drafted: int | None = None, kept: bool = True,
  ) -> Callable[[], dict[str, float]]:
    """A function that runs a round for nobody and says how many seconds its parts took, or the `whole` of one of some in a row."""
    self._check_idle("measuring")
    if not 1 <= context <= self.max_length:
      raise ValueError(f"context {context} must be from 1 to {self.max_length} tokens")
    if need not in self.needs:
      raise ValueError(f"need {need!r} is none of {', '.join(self.needs)}, which the engine was built for")
    rounds = ROUNDS_IN_A_ROW if whole else 1
    reach = self._bucket_of(self.reaches, min(context + rounds * (1 + self.method.draft_length), self.length))
    settings = self._nobody(size, need)
    settings = settings.replace(caps=jnp.full_like(settings.caps, 2**30))  # They go on to the end.

    def step() -> dict[str, float]:
      if self._state is None or len(self._state.anchor) != size:
        self._state = self._empty(size)
      self._state = jax.block_until_ready(self._state.replace(
          cache=self._state.cache.replace(lengths=jnp.full_like(self._state.cache.lengths, context)),
          finish=jnp.full_like(self._state.finish, RUNNING)))
      times, began = {}, time.perf_counter()

      def timed(program, *args):
        nonlocal began
        out = jax.block_until_ready(self._run(program, *args))
        times[program], began = time.perf_counter() - began, time.perf_counter()
        return out

      for _ in range(rounds):
        output = self._dry_round(size, need, bucket, reach, settings, self._run if whole else timed, drafted or size, kept)
      jax.block_until_ready((output, self._state))
      return {"round": (time.perf_counter() - began) / rounds} if whole else times

    return step

  def _check_idle(self, what: str) -> None:
    if self._queue or self._filling or self._flights or any(self._held):
      raise RuntimeError(f"{what} while requests are served: run() first")

  def manifest(self) -> dict[str, Any]:
    """What results of this engine depend on: weights, versions, device, schedule, calibration, cost tables."""
    calibration = self.drafter.calibration if self.drafter else None
    return {
        "target": self.target.hash, "drafter": self.drafter.hash if self.drafter else None,
        "versions": report.versions(), "device": report.device(),
        "schedule": self.schedule if isinstance(self.schedule, str) else getattr(self.schedule, "__name__", repr(self.schedule)),
        "rule": self.method.rule, "draft_length": self.method.draft_length, "slots": self.slots, "max_length": self.max_length,
        "calibration": dataclasses.asdict(calibration) if calibration else None,
        "costs": {str(s): [list(t.tokens), list(t.seconds), list(t.draft), t.alone] for s, t in self.costs.items()} or None}

  def stats(self) -> dict[str, Any]:
    """Of the requests that ended since `warm_up` or `forget` (4096 at most): acceptance figures (METRICS.md); distributions of verify
    tokens, buckets, slots and queue length over rounds and steps; seconds of a round by slots and bucket as last seen; health: what looks
    wrong, in words."""
    drafted = [s for s in self._done if s.speculation["on"]]
    found = metrics.acceptance([s.rounds for s in drafted])
    rows = lambda name: dict(sorted(self._counts[name].items()))
    total = lambda name: sum(n * c for n, c in self._counts[name].items())
    live, planned = _live_bytes(), self.plan["peak_bytes"] - self.plan["target_bytes"] - self.plan["drafter_bytes"]
    health = []
    if found["rounds"] >= 64 and found["accepted_length"] == 1.0:
      health.append(f"not one draft accepted in {found['rounds']} rounds")
    repeats = max((metrics.longest_repeat(s.tokens) for s in self._done), default=0)
    if repeats >= report.REPEAT_WARNING:
      health.append(f"one token {repeats} times in a row")
    if self._warm is not None and self.compiled > self._warm:
      health.append(f"{self.compiled - self._warm} programs compiled after warm-up")
    if self._bytes_before is not None and live - self._bytes_before > planned:
      health.append(f"{live - self._bytes_before} bytes of arrays more than before the first request, with {planned} planned for caches")
    if self.restarts:
      health.append(f"{len(self.restarts)} failures of the device, last {self.restarts[-1]}")
    if self._invalid:
      health.append(f"{self._invalid} confidences that are no numbers")
    if self.drafter is None or self.method.drafter is None:
      health += [self.why_off] if self.why_off != "no drafter" else []
    return {
        **found, "batch_use": total("verify_tokens") / total("bucket") if self._counts["bucket"] else None,
        "verify_tokens": rows("verify_tokens"), "buckets": rows("bucket"), "slots": rows("slots"), "queue": rows("queue"),
        "waiting": len(self._queue), "running": len(self._live()), "ended": len(self._done), "live_bytes": live,
        "round_seconds": {str(size): {str(n): s for n, s in costs.served.items()} for size, costs in self._speculation.costs.items()},
        "benefit": [metrics.acceptance([s.rounds])["accepted_length"] for s in drafted], "health": health,
        "speculation": {"on": self._speculate, "why": self.why_off}}
