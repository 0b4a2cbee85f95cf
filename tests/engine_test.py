"""The engine: every text equals its solo run, whatever came, went or failed beside it, and nothing compiles after warm-up."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import cost, decode, schedule, speculation
from specdec_jax.engine import Engine
from specdec_jax.models.cache import Cache
from specdec_jax.requests import QueueFull
from specdec_jax.sampling import make_sampling
from tests import toys

NEW = 12
rng = random.Random(0)
PROMPTS = [[rng.randrange(59) for _ in range(n)] for n in (1, 32, 7, 3, 20, 12, 28, 5)]
ALL = range(len(PROMPTS))
CHEAP = cost.CostTable((1, 20), (1.0, 1.01), (0.0, 0.0), {})  # Drafts cost next to nothing.
DEAR = cost.CostTable((1, 4, 5, 20), (1.0, 1.0, 50.0, 50.0), (0.0,) * 4, {})


@functools.lru_cache
def plain() -> list[list[int]]:
  return [c.tokens for c in specdec_jax.generate(toys.target(), None, PROMPTS, NEW, ignore_eos=True)]


def make(drafter="block", **changes) -> Engine:
  """An engine over toys; one set of shapes, so that tests share what is compiled."""
  target = toys.target()
  drafter = toys.block_drafter(target) if drafter == "block" else drafter
  options = dict(
      slots=4, max_length=60, slot_buckets=(2, 4), buckets={2: (6,), 4: (10,)}, draft_slots=(),
      needs=("greedy",), chunk=16, sps=CHEAP, adaptive=False)
  return Engine(target, drafter, **(options | changes))


def submit(engine: Engine, which=ALL, **settings) -> list[int]:
  return [engine.submit(PROMPTS[i], NEW, ignore_eos=True, **settings) for i in which]


def serve(engine: Engine, which=ALL, **settings):
  numbers = submit(engine, which, **settings)
  engine.run()
  return [engine.result(n) for n in numbers]


class Compilations:
  """Counts programs that XLA compiles while it is entered."""

  def __enter__(self):
    self.count, self._on = 0, True
    jax.monitoring.register_event_duration_secs_listener(self._heard)
    return self

  def _heard(self, event, seconds, **facts):
    self.count += self._on and event == "/jax/core/compile/backend_compile_duration"

  def __exit__(self, *error):
    self._on = False


def test_texts_equal_solo_runs_whoever_comes_and_goes():
  """C41, C67, C69, C101: staggered arrivals, cancels at every phase, speculation on and off by request and for all."""
  engine = make()
  assert engine.warm_up() > 0
  with Compilations() as compilations:
    numbers = submit(engine, (0, 1, 2))
    engine.step()
    alone = engine.submit(PROMPTS[3], NEW, ignore_eos=True, speculation=False)
    gone = [engine.submit(PROMPTS[4], NEW), engine.submit(PROMPTS[5], NEW)]
    engine.cancel(gone[0])  # Before it was read.
    engine.step()
    engine.set_speculation(False)
    numbers += submit(engine, (6,))
    for _ in range(3):
      engine.step()
    engine.set_speculation(True)
    for _ in range(4):
      engine.step()
    engine.cancel(gone[1])  # In some round.
    numbers += submit(engine, (7,))
    engine.run()
    got = [engine.result(n) for n in numbers]
    undrafted, cancelled = engine.result(alone), [engine.result(n) for n in gone]
  assert compilations.count == 0 and not engine.stats()["health"]
  assert [c.tokens for c in got] == [plain()[i] for i in (0, 1, 2, 6, 7)]
  assert undrafted.tokens == plain()[3] and all(d == 0 for d, _, _ in undrafted.rounds)
  assert undrafted.speculation == {"on": False, "why": "the request asked for none"}
  assert any(d for c in got for d, _, _ in c.rounds)
  assert [c.finish_reason for c in cancelled] == ["cancelled"] * 2
  assert cancelled[1].tokens == plain()[5][: len(cancelled[1].tokens)]
  assert not engine._live() and all(sum(e for _, _, e in c.rounds) == NEW - 1 for c in got)
  with pytest.raises(KeyError, match="no request"):
    engine.result(alone)


@pytest.mark.parametrize("kind", ["fixed", "causal", pytest.param("serial", marks=pytest.mark.slow), "target alone", "dear"])
def test_every_schedule_gives_the_targets_text(kind):
  """Lengths by host, by the device, none; C35: where drafts are too dear none is made."""
  target = toys.target()
  if kind == "causal":
    engine = make(schedule=functools.partial(schedule.causal, sps=CHEAP.sps(24)))
  elif kind == "serial":
    engine = make(toys.serial_drafter(target, "eagle3"), schedule="fixed", draft_length=3, overlap=False)
  elif kind == "dear":
    engine = make(sps=DEAR)
    engine._speculation.survival = np.full(5, 0.5)
  else:
    engine = make(None if kind == "target alone" else "block", schedule="fixed")
  got = serve(engine)
  assert [c.tokens for c in got] == plain()
  drafted = {d for c in got for d, _, _ in c.rounds}
  if kind == "causal":
    assert len(drafted) > 1
  else:
    assert drafted == {"target alone": {0}, "dear": {0}, "fixed": {5}, "serial": {3}}[kind]
  assert all(c.speculation["on"] == (kind != "target alone") for c in got)
  if kind == "dear":  # C35: all are offered drafts, none gets one, and that counts.
    assert engine.stats()["accepted_length"] == 1.0 and {c.speculation["why"] for c in got} == {"no draft was worth its cost"}


@pytest.mark.slow
def test_seed_belongs_to_the_request():
  """C19, C21: under fixed lengths sampled text depends on neither slot nor neighbours nor load, and is that of `generate`."""
  options = dict(temperature=1.0, top_p=0.9, presence_penalty=0.4)
  target = toys.target()
  drafter = toys.block_drafter(target)
  engine = make(schedule="fixed", needs=("full",))
  numbers = [engine.submit(PROMPTS[i], NEW, seed=i, ignore_eos=True, speculation=i != 3, **options) for i in range(6)]
  engine.cancel(numbers[4])
  engine.run()
  crowded = [engine.result(n).tokens for n in numbers]
  alone = engine.result(engine.submit(PROMPTS[2], NEW, seed=2, ignore_eos=True, **options)).tokens
  assert alone == crowded[2]
  same = specdec_jax.generate(target, drafter, PROMPTS[:3], NEW, seed=[0, 1, 2], ignore_eos=True, **options)
  assert [c.tokens for c in same] == crowded[:3]
  unseeded = [engine.result(engine.submit(PROMPTS[2], NEW, ignore_eos=True, **options)).tokens for _ in range(2)]
  assert unseeded[0] != unseeded[1]


def test_memory_for_three_of_six():
  """C71: those that find no room wait, one that fits nowhere fails alone."""
  slot = make().plan["slot_bytes"]
  engine = make(slots=8, memory=3 * slot + 5, slot_buckets=(3,), buckets={3: (9,)})
  assert engine.slots == 3 and engine.plan["cache_bytes"] == 3 * slot
  numbers = submit(engine, range(6))
  with pytest.raises(ValueError, match="do not fit a slot of 60"):
    engine.submit([1] * 50, 20)
  engine.run()
  assert [engine.result(n).tokens for n in numbers] == plain()[:6]
  with pytest.raises(ValueError, match="takes .* bytes, more than the 5 of memory"):
    make(memory=5)


def test_queue_deadline_stream():
  engine = make(queue=3)
  numbers = submit(engine, (0, 1))
  late = engine.submit(PROMPTS[2], NEW, deadline=0.0)
  with pytest.raises(QueueFull, match="3 requests wait"):
    engine.submit(PROMPTS[0])
  pieces = list(engine.stream(numbers[1]))
  assert sum(pieces, []) == plain()[1] and len(pieces) > 1
  served = engine.result(numbers[1])
  assert served.ttft <= served.latency and [n for _, n in served.deliveries] == [len(p) for p in pieces]
  assert served.tpot == pytest.approx((served.deliveries[-1][0] - served.deliveries[0][0]) / (NEW - 1))
  expired = engine.result(late)
  assert expired.finish_reason == "deadline" and expired.speculation == {"on": False, "why": "it ended before its first round"}
  assert not engine.result(numbers[0]).error
  for wrong, message in ((dict(prompt=[]), "empty"), (dict(prompt=[61]), "outside the vocabulary"),
                         (dict(prompt=[1], max_new_tokens=0), "at least 1"),
                         (dict(prompt=[1], max_new_tokens=4, temperature=1.0), "'plain' sampling"),
                         (dict(prompt=[1], max_new_tokens=4, stop=range(9)), "stop tokens"),
                         (dict(prompt=[1], max_new_tokens=2.7), "integer, not 2.7"),
                         (dict(prompt=[1], deadline=float("nan")), "seconds, not nan"),
                         (dict(prompt=[1], temperatur=1.0), "no such setting .* temperatur;")):
    with pytest.raises(ValueError, match=message):
      engine.submit(**wrong)
  with pytest.raises(cost.CostTableMissing, match="needs cost tables"):
    make(sps=None).submit([1], 4)
  for wrong, message in ((dict(slot_buckets=(0, 4)), "slot_buckets must be of integers from 1, not 0"), (dict(slots=2.5), "slots must be"),
                         (dict(buckets={4: (5.5,)}), r"buckets\[4\] must be"), (dict(reaches=(-5,)), "reaches must be"),
                         (dict(sps="x"), "sps must be"), (dict(schedule="typo"), "unknown schedule 'typo'"),
                         (dict(drafter=toys.scripted([[0] * 80], 4)), "toy/script gives no confidences")):
    with pytest.raises(ValueError, match=message):
      make(**wrong)


class Letters:
  """A tokenizer of one letter a token."""

  vocab = 61

  def decode(self, ids):
    return "".join(chr(48 + i) for i in ids)

  def encode(self, text):
    return [ord(c) - 48 for c in text]


def test_memory_that_grows_is_seen():
  """Arrays that stay behind, more than the plan has for caches, are named; those that the engine found there are not."""
  there = [jnp.zeros(make().plan["peak_bytes"], jnp.int8)]
  engine = make()
  serve(engine, (3,))
  assert not engine.stats()["health"]
  left = jnp.zeros(engine.plan["peak_bytes"], jnp.int8)
  assert "bytes of arrays more than before the first request" in engine.stats()["health"][0]
  del left
  assert there and not engine.stats()["health"]


def test_stop_texts_across_rounds():
  target = dataclasses.replace(toys.target(), tokenizer=Letters())
  drafter = toys.block_drafter(toys.target())
  engine = Engine(
      target, drafter, slots=2, max_length=60, schedule="fixed", slot_buckets=(2,), buckets={2: ()}, needs=("greedy",), chunk=16)
  for i in (1, 4):
    stop = target.tokenizer.decode(plain()[i][5:7])
    number = engine.submit(PROMPTS[i], NEW, stop=[stop], ignore_eos=True)
    pieces = sum(engine.stream(number), [])
    expected = specdec_jax.generate(target, None, [PROMPTS[i]], NEW, stop=[stop], ignore_eos=True)[0]
    got = engine.result(number)
    assert got.finish_reason == "stop" and stop not in got.text
    assert (got.tokens, got.text, pieces) == (expected.tokens, expected.text, expected.tokens)
    assert sum(e for _, _, e in got.rounds) == len(got.tokens) - 1


class Unextended(toys.Scripted):
  """A drafter that raises on the first prompt."""

  def extend(self, *args):
    raise RuntimeError("cannot extend")


def test_failures_lose_no_request():
  """C99 and faults under way: a drafter that is missing, raises, or gives no numbers; a device that fails in a round."""
  calls = []

  def fail(program, error, every=5):
    calls.append(program)
    if calls.count(program) % every == 0:
      raise error

  for program in ("empty", "read", "first", "insert", "reorder", "draft", "verify", "commit"):
    device = make(inject=lambda p, program=program: p == program and fail(p, jax.errors.JaxRuntimeError("INTERNAL: device lost"), 7))
    assert [c.tokens for c in serve(device)] == plain(), program
    assert device.restarts or program == "reorder"
    stopped = []  # Ctrl-C, once: it gets through, and what was asked for before comes out right afterwards.

    def interrupt(p, program=program, stopped=stopped):
      if p == program and not stopped:
        stopped.append(p)
        raise KeyboardInterrupt

    engine = make(inject=interrupt)
    numbers = submit(engine)
    with pytest.raises(KeyboardInterrupt):
      engine.run()
    engine.run()
    assert [engine.result(n).tokens for n in numbers] == plain(), program
  assert device.restarts and "device lost" in device.restarts[0] and any("failures of the device" in h for h in device.stats()["health"])
  broken = lambda p: p == "draft" and fail(p, RuntimeError("no such operation"), 3)
  got = serve(make(fallback=True, inject=broken))
  assert [c.tokens for c in got] == plain()
  assert any(c.speculation["on"] for c in got) and all("the drafter failed: RuntimeError: no such" in c.speculation["why"] for c in got)
  with pytest.raises(RuntimeError, match="no such operation"):
    serve(make(inject=broken))
  unfit = make(fallback=True, inject=lambda p: p == "draft" and fail(p, jax.errors.JaxRuntimeError("UNIMPLEMENTED"), 1))
  got = serve(unfit)
  assert [c.tokens for c in got] == plain() and all("UNIMPLEMENTED" in c.speculation["why"] for c in got)
  got = serve(make(dataclasses.replace(toys.scripted([[0] * 80], 4), model=Unextended(4)), schedule="fixed", fallback=True), range(2))
  assert [c.tokens for c in got] == plain()[:2] and all("cannot extend" in c.speculation["why"] for c in got)
  missing = serve(make("no/such/drafter", fallback=True), range(2))
  assert [c.tokens for c in missing] == plain()[:2]
  assert all(not c.speculation["on"] and "cannot be loaded" in c.speculation["why"] for c in missing)
  with pytest.raises(FileNotFoundError, match="no/such/drafter"):
    make("no/such/drafter")
  always = make(inject=lambda p: p == "commit" and fail(p, jax.errors.JaxRuntimeError("gone"), 1))
  with pytest.raises(RuntimeError, match="failed 6 times in a row, last with .*gone"):
    serve(always, range(1))


def test_drafter_without_numbers():
  """A request whose drafter gives NaN ends with that error, or goes on alone where that was asked for; mates never notice."""
  target = toys.target()
  good = toys.block_drafter(target)
  embedding = good.params["embedding"].at[plain()[2][3]].set(jnp.nan)  # Met by request 2, at least.
  bad = dataclasses.replace(good, params={**good.params, "embedding": embedding})
  alone = serve(make(bad, schedule="fixed", fallback=True))
  assert [c.tokens for c in alone] == plain()
  assert any("the drafter gave no distribution" in (c.speculation["why"] or "") for c in alone)
  ended = serve(make(bad, schedule="fixed"))
  assert any(c.error for c in ended) and not all(c.error for c in ended)
  for c, text in zip(ended, plain()):
    assert c.tokens == text[: len(c.tokens)]
    assert "the drafter gave no distribution" in c.error if c.error else c.tokens == text


def test_adaptive_speculation_pauses_what_does_not_pay(monkeypatch):
  """Drafts that are never right, at a price: the request goes on without, and is probed again."""
  monkeypatch.setattr(cost.ServedCosts, "observe", lambda *args: None)  # The price is the table's.
  wrong = toys.scripted(np.zeros((4, 80)), 4)
  table = cost.CostTable((1, 4, 20), (1.0, 1.0, 2.0), (0.0,) * 3, {})
  engine = make(wrong, schedule="fixed", adaptive=True, sps=table, max_length=140, slot_buckets=(4,))
  number = engine.submit(PROMPTS[0], 100, ignore_eos=True)
  got = engine.result(number)
  drafted = [d for d, _, _ in got.rounds]
  assert set(drafted[: speculation.JUDGED_AFTER]) == {4} and drafted.count(0) > 50 and 4 in drafted[24:]
  assert got.tokens == specdec_jax.generate(toys.target(), None, [PROMPTS[0]], 100, ignore_eos=True)[0].tokens


def same_context(context, slot: int, other, other_slot: int, length: int):
  """Asserts that a drafter's states have the same in these slots, `length` tokens."""
  for x, y in zip(*(jax.tree.leaves(z, is_leaf=lambda c: isinstance(c, Cache)) for z in (context, other)), strict=True):
    if not isinstance(x, Cache):
      np.testing.assert_allclose(x[slot], y[other_slot], rtol=1e-5, atol=1e-5)
      continue
    assert x.lengths[slot] == y.lengths[other_slot] == length
    for a, b in zip((*x.keys, *x.values), (*y.keys, *y.values), strict=True):
      a, b = (np.moveaxis(z, z.shape.index(c.capacity), 0)[1:length] for z, c in ((a[slot], x), (b[other_slot], y)))
      np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["block", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_context_put_off_is_the_same_context(kind):
  """C39: eleven rounds without drafts, whose rows the drafter gets eight at once and before it drafts again: then it has what it would
  have of the whole text, for requests that came before and in between."""
  target = toys.target()
  drafter = toys.block_drafter(target) if kind == "block" else toys.serial_drafter(target, "eagle3")
  engine = make(drafter, schedule="fixed", slot_buckets=(4,), buckets={4: ()}, max_length=60, overlap=False)
  numbers = {i: engine.submit(PROMPTS[i], 30, ignore_eos=True) for i in (0, 2)}
  for _ in range(4):
    engine.step()
  engine.set_speculation(False)
  for k in range(11):
    if k == 5:
      numbers[3] = engine.submit(PROMPTS[3], 30, ignore_eos=True)
    engine.step()
  engine.set_speculation(True)
  engine.step()
  context, slots = jax.device_get(engine._state.drafter), {r.id: b for b, r in enumerate(engine._held) if r}
  for i, number in numbers.items():
    b, request = slots[number], engine._requests[number]
    text = PROMPTS[i] + request.tokens[:-1]
    positions, count = jnp.arange(len(text))[None], jnp.array([len(text)])
    _, taps, _ = target.decoder.apply({"params": target.params}, jnp.array([text]), taps=drafter.model.taps)
    fresh = drafter.model.extend(drafter.params, drafter.model.init_state(1, 64), taps, jnp.array([text]), positions, count)
    assert sum(d == 0 for d, _, _ in request.rounds) >= 5 and request.rounds[-1][0]
    same_context(context, b, fresh, 0, len(text))
  engine.run()
  assert [engine.result(n).tokens for n in numbers.values()] == [
      c.tokens for c in specdec_jax.generate(target, None, [PROMPTS[i] for i in numbers], 30, ignore_eos=True)]


def test_a_round_reads_no_fewer_rows_than_there_are():
  """Rounds with and without drafts in turn, some in flight: what is asked for covers every request, and not much more."""
  engine = make(schedule="fixed", slot_buckets=(4,), buckets={4: ()})
  reach, spare = engine._reach, []

  def checked(drafting: bool) -> int:
    grid, engine.reaches = engine.reaches, tuple(range(engine.length + 1))
    asked, engine.reaches = reach(drafting), grid
    rows = max(int(n) for n, r in zip(engine._state.cache.lengths, engine._held) if r) + 1 + drafting * engine.method.draft_length
    spare.append(asked - rows)
    return reach(drafting)

  engine._reach = checked
  numbers = submit(engine)
  for step in range(200):
    engine.set_speculation(step % 5 < 2)
    engine.step()
  assert [engine.result(n).tokens for n in numbers] == plain()
  assert min(spare) >= 0 and 0 in spare and max(spare) <= 2 * engine.method.draft_length and np.mean(spare) < engine.method.draft_length


@pytest.mark.parametrize("kind", ["block", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_requests_without_a_drafters_context(kind):
  """Those that will not be drafted for are read and decoded as by the target alone, beside others and among themselves; the others are
  drafted for as if everybody had a context, also behind rounds that nobody had one in."""
  target = toys.target()
  drafter = toys.block_drafter(target) if kind == "block" else toys.serial_drafter(target, kind)
  served, contexts = [], []
  for keeps in (lambda request: True, lambda request: request.speculation):
    engine = make(drafter, schedule="fixed", needs=("plain",), slot_buckets=(4,), buckets={4: ()}, chunk=64)
    engine._keeps = keeps
    submit = lambda i, n, engine=engine: engine.submit(PROMPTS[i], n, ignore_eos=True, speculation=i % 2 == 0, seed=i, temperature=i / 4)
    numbers = [submit(0, 8), submit(1, 27), submit(3, 27)]
    for _ in range(22):
      engine.step()
    numbers += [submit(2, 30), submit(5, 3), submit(7, 9)]
    for step in range(100):
      engine.set_speculation(step >= 13)  # Rounds whose rows wait for the drafter.
      engine.step()
      if step == 17:
        slot = next(b for b, r in enumerate(engine._held) if r and r.id == numbers[3])
        contexts.append((jax.device_get(engine._state.drafter), slot))
    served.append([engine.result(n) for n in numbers])
  (context, slot), (other, other_slot) = contexts
  lengths = next(c.lengths for c in jax.tree.leaves(context, is_leaf=lambda c: isinstance(c, Cache)) if isinstance(c, Cache))
  same_context(context, slot, other, other_slot, int(lengths[slot]))
  every, some = served
  assert [(c.tokens, c.rounds) for c in some] == [(c.tokens, c.rounds) for c in every]
  assert [any(d for d, _, _ in c.rounds) for c in some] == [True, False, False, True, False, False]
  assert sum(d == 0 for d, _, _ in some[3].rounds) >= 10 and some[3].rounds[-1][0]


def test_contexts_are_kept_where_drafts_pay_and_nothing_compiles():
  """Dear drafts: when eight have ended that they did not pay for, others come without, and say so; cheap ones: they come with one again."""
  engine = make(adaptive=True, sps=CHEAP, slot_buckets=(4,), draft_slots=(2,))
  engine.warm_up()
  with Compilations() as compilations:
    first = serve(engine)
    engine.use_costs(DEAR)
    dear = serve(engine)
    engine.use_costs(CHEAP)
    cheap = serve(engine, speculation=True)
  assert compilations.count == 0
  assert [c.tokens for c in first] == [c.tokens for c in dear] == [c.tokens for c in cheap] == plain()
  assert all(c.speculation["on"] for c in (*first, *cheap))
  assert {(c.speculation["on"], c.speculation["why"]) for c in dear} == {(False, "no draft was worth its cost")}


def test_whether_a_context_is_kept_is_weighed_for_those_who_are_there():
  """One that comes alone is weighed as one, in as few slots; the third beside two as three."""
  engine, asked = make(adaptive=True), []
  engine._speculation.keeps = lambda running, size, passes: asked.append((running, size)) or True
  engine.result(submit(engine, (3,))[0])
  for i in (0, 3, 5):
    submit(engine, (i,))
    engine.step()
  engine.run()
  assert asked == [(1, 2), (1, 2), (2, 2), (3, 4)]


def test_one_without_a_context_gets_it_when_the_load_falls():
  """Drafts that pay for two requests at most: of four, the one that outlives the others is read again, once, and drafted for then."""
  engine = make(adaptive=True, sps=CHEAP, slot_buckets=(2, 4), needs=("plain",))
  engine.warm_up()
  engine._speculation.keeps = engine._speculation.pays = lambda running, size, passes: running <= 2
  again, requeue = [], engine._requeue
  engine._requeue = lambda requests: again.extend(requests) or requeue(requests)
  with Compilations() as compilations:
    alone = engine.result(engine.submit(PROMPTS[3], 40, ignore_eos=True, speculation=False))
    numbers = [engine.submit(PROMPTS[i], n, ignore_eos=True) for i, n in ((3, 40), (1, 4), (5, 5), (4, 4))]
    long, *short = [engine.result(n) for n in numbers]
  assert compilations.count == 0
  assert long.tokens == alone.tokens and [c.tokens for c in short] == [plain()[1][:4], plain()[5][:5], plain()[4][:4]]
  assert long.rounds[0][0] == 0 and long.rounds[-2][0] and long.speculation == {"on": True, "why": None}
  assert not any(c.speculation["on"] for c in short) and len(again) == 1


@pytest.mark.parametrize("left, change, again", [
    (1, {}, True), (2, {}, True), (3, {}, False), (1, {"kept": True}, False), (1, {"speculation": False}, False), (1, {"new": 9}, False),
    (1, {"pays": False}, False), (1, {"waiting": 1}, False)])
def test_who_is_read_again(left, change, again):
  """One of four at once when it was refused a context, of whom `left` are left: not before half have gone, not one that has a context
  already or wants no drafts, that has more to be read than to write, where drafts do not pay, or while another waits."""
  engine = make(adaptive=True)
  submit(engine, range(4), speculation=change.get("speculation", True))
  engine._held = [engine._queue.popleft() for _ in range(left)]
  for request in engine._held:
    request.kept, request.crowd = change.get("kept", False), 4
    request.prompt, request.settings["caps"] = [1] * 10, change.get("new", 12)
  waiting = change.get("waiting", 0)
  while len(engine._queue) > waiting:
    engine._queue.pop()
  engine._speculation.pays = lambda *load: change.get("pays", True)
  engine._reconsider()
  assert len(engine._queue) - waiting == again


def test_prompts_that_are_read_meanwhile_do_not_make_the_load_small():
  """Drafts that pay for one request only: beside one that is read, another is not alone, and is not read again and again."""
  engine = make(adaptive=True, sps=CHEAP, slots=2, slot_buckets=(2,), buckets={2: (6,)}, needs=("plain",))
  engine._speculation.keeps = engine._speculation.pays = lambda running, size, passes: running <= 1
  other = engine.submit(PROMPTS[0], 12, ignore_eos=True)
  engine.step()
  long = engine._requests[engine.submit(PROMPTS[3], 50, ignore_eos=True)]
  while long.served is None:
    if engine._requests[other].served and len(long.tokens) < 40:
      other = engine.submit(PROMPTS[1], 3, ignore_eos=True)  # Two chunks.
    engine.step()
  assert long.epoch <= 1 and len(long.tokens) == 50


def test_rows_put_off_of_one_who_has_gone():
  """Who has no context may sit where another's rows were put off, more of them than its own text has: none is written in front of it."""
  engine, written = make(schedule="fixed", slot_buckets=(4,), buckets={4: ()}, overlap=False), []
  engine._keeps = lambda request: request.speculation
  model = engine.method.drafter

  class Watched(type(model)):
    def extend(self, params, state, features, tokens, positions, valid):
      jax.debug.callback(lambda *x: written.append(x), positions, valid)
      return super().extend(params, state, features, tokens, positions, valid)

  engine.method = dataclasses.replace(engine.method, drafter=Watched(model.config))
  numbers = submit(engine, (0,)) + [engine.submit(PROMPTS[2], 7, ignore_eos=True)]
  for step in range(100):
    engine.set_speculation(step > 9)
    engine.step()
    if step == 7:  # The next round catches up.
      numbers.append(engine.submit(PROMPTS[0], NEW, ignore_eos=True, speculation=False))
  assert [engine.result(n).tokens for n in numbers] == [plain()[0], plain()[2][:7], plain()[0]]
  assert written and all(positions.min() >= 0 and (valid <= positions.shape[1]).all() for positions, valid in written)


def test_reading_in_chunks_is_reading_at_once():
  """C53: caches of target and drafter after 4, 4 and 2 tokens are those after 10."""
  target = toys.target()
  prompt = np.array([PROMPTS[1][:10]], np.int32)
  for drafter in (toys.block_drafter(target), toys.serial_drafter(target, "eagle3")):
    method = decode.make_method(target, drafter, None, "fixed", "token", False)
    read = jax.jit(decode.read, static_argnums=0)
    whole, last = read(method, target.params, drafter.params, decode.init_state(method, 1, 16), prompt, jnp.array([10]))
    state = decode.init_state(method, 1, 16)
    for part in (prompt[:, :4], prompt[:, 4:8], np.pad(prompt[:, 8:], ((0, 0), (0, 2)))):
      state, now = read(method, target.params, drafter.params, state, part, jnp.array([2 if part[0, 2:].sum() == 0 else 4]))
    np.testing.assert_allclose(now, last, atol=1e-5)
    for path, x in jax.tree_util.tree_leaves_with_path(whole):
      y = functools.reduce(lambda t, k: getattr(t, k.name) if hasattr(k, "name") else t[k.idx], path, state)
      rows = x.shape[-1] if x.ndim < 4 else 10  # Of the caches: what is committed.
      cut = lambda z, rows=rows: z[..., :rows] if z.shape[-1] in (16, 17) else z[..., :rows, :] if z.ndim == 4 else z
      np.testing.assert_allclose(cut(x), cut(y), atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_lengths_that_change_from_round_to_round():
  """C39: after rounds without drafts the drafter's cache is that of the committed text."""
  target = toys.target()
  drafter = toys.block_drafter(target)
  method = decode.make_method(target, drafter, None, "fixed", "token", False)
  sampling, limits = make_sampling(1, 61), decode.Limits(jnp.array([40]), jnp.array([[-1]]))
  state = decode.init_state(method, 1, 64)
  state, output = jax.jit(decode.prefill, static_argnums=0)(
      method, target.params, drafter.params, state, jnp.array([PROMPTS[2]]), jnp.array([7]), sampling, limits)
  text = output.tokens[0, :1].tolist()
  draft, verify, commit = (jax.jit(f, static_argnums=0) for f in (decode.draft, decode.verify_draft, decode.commit))
  for length in (4, 0, 0, 4, 2):
    made = draft(method, drafter.params, state, sampling, limits.replace(drafts=jnp.array([length]))) if length else decode.no_draft(1)
    state, output = commit(method, drafter.params, state, made, verify(method, target.params, state, made), sampling, limits)
    text += output.tokens[0, : output.count[0]].tolist()
    assert output.drafted[0] == length
  assert text[:NEW] == plain()[2][: len(text)]
  committed = PROMPTS[2] + text[:-1]
  read = jax.jit(decode.read, static_argnums=0)
  fresh, _ = read(
      method, target.params, drafter.params, decode.init_state(method, 1, 64), jnp.array([committed]), jnp.array([len(committed)]))
  for x, y in zip(state.drafter.keys, fresh.drafter.keys):
    np.testing.assert_allclose(x[..., : len(committed)], y[..., : len(committed)], atol=1e-5)


def test_prompt_beyond_the_drafters_positions():
  """C51: the long one goes on without drafts, its mate with them; no text changes."""
  target = toys.target()
  good = toys.block_drafter(target)
  config = dataclasses.replace(good.config, model=dataclasses.replace(good.config.model, max_positions=32))
  short = dataclasses.replace(good, config=config, model=dataclasses.replace(good.model, config=config))
  prompts = [PROMPTS[5][:10], (PROMPTS[1] + PROMPTS[2])[:36]]
  expected = specdec_jax.generate(target, None, prompts, NEW, ignore_eos=True)
  got = specdec_jax.generate(target, short, prompts, NEW, ignore_eos=True)
  assert [c.tokens for c in got] == [c.tokens for c in expected]
  assert {d for d, _, _ in got[1].rounds} == {0} and {d for d, _, _ in got[0].rounds} == {5}


def test_bucket_edges():
  """C103: one function for warm-up and for running."""
  engine = make(buckets={2: (6,), 4: (8, 16, 4, 300)})
  assert engine.buckets == {2: (2, 6, 12), 4: (4, 8, 16, 24)}
  assert [engine._bucket(4, n) for n in (1, 4, 5, 8, 9, 16, 17, 24)] == [4, 4, 8, 8, 16, 16, 24, 24]
  with pytest.raises(ValueError, match="no cost table for .2, 4."):
    make(sps={8: CHEAP})


@pytest.mark.parametrize("kind", [
    "greedy", "markov", pytest.param("selector", marks=pytest.mark.slow), pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_pass_over_some_slots_drafts_what_one_over_all_does(kind):
  """Requests with and without drafts side by side, greedy and sampled: the drafter's pass is cut to the slots that it is for, and tokens,
  drafts and what is accepted of them are those of a pass over every slot."""
  target, need = toys.target(), "greedy" if kind == "greedy" else "plain"
  drafter = toys.serial_drafter(target, kind) if kind == "eagle3" else toys.block_drafter(target, **(
      dict(head="selector", candidates=6, own_embedding=False, anchor_predicts=False) if kind == "selector" else {}))
  served = []
  for cuts in ((1, 2), ()):
    engine = make(drafter, schedule="fixed", needs=(need,), slot_buckets=(4,), buckets={4: ()}, draft_slots=cuts, chunk=64)
    engine.warm_up()
    seen = []
    engine._inject = lambda program, engine=engine, seen=seen: program == "verify" and seen.append(
        sum(r is not None and r.speculation for r in engine._held))
    numbers = [
        engine.submit(
            PROMPTS[i], NEW, ignore_eos=True, speculation=i % 2 == 0, seed=i, temperature=i / 4 if need == "plain" else 0.0) for i in ALL]
    with Compilations() as compilations:
      engine.run()
    assert compilations.count == 0 and {1, 2} <= set(seen)
    served.append([engine.result(n) for n in numbers])
  few, all_of_them = served
  assert [(c.tokens, c.rounds) for c in few] == [(c.tokens, c.rounds) for c in all_of_them]
  assert [any(d for d, _, _ in c.rounds) for c in few] == [i % 2 == 0 for i in ALL]


def test_cut_passes_in_front_of_every_bucket_compile_nothing():
  """Whatever the drafter's pass was cut to, the rounds behind it are those that were warmed up."""
  engine = make(buckets={4: (6, 10)}, draft_slots=(1, 2), slot_buckets=(4,))
  engine.warm_up()
  numbers = [engine.submit(PROMPTS[i], NEW, ignore_eos=True, speculation=i % 4 == 0) for i in ALL]
  with Compilations() as compilations:
    engine.run()
  assert compilations.count == 0 and set(engine.stats()["buckets"]) >= {6, 10}
  assert [engine.result(n).tokens for n in numbers] == plain()


def test_a_schedule_of_ones_own_sees_every_slot():
  """It weighs drafts by what a step of all slots costs, so a pass over some of them would tell it of too few tokens."""
  seen = set()

  def weighed(confidence):
    seen.add(confidence.shape)
    return schedule.causal(confidence, CHEAP.sps(24))

  engine = make(schedule=weighed, draft_slots=(1, 2), slot_buckets=(4,))
  numbers = [engine.submit(PROMPTS[i], NEW, ignore_eos=True, speculation=i % 4 == 0) for i in range(4)]
  engine.run()
  assert seen == {(4, 5)} and [engine.result(n).tokens for n in numbers] == plain()[:4]


def test_few_requests_in_many_slots_are_drafted_for():
  """As many tokens as slots are not a round without drafts."""
  target = toys.target()
  engine = make(toys.serial_drafter(target, "mtp", steps=1), schedule="fixed", slot_buckets=(4,), buckets={4: ()})
  engine.warm_up()
  with Compilations() as compilations:
    got = serve(engine, (0, 1))
  assert [c.tokens for c in got] == plain()[:2] and {d for c in got for d, _, _ in c.rounds} == {1} and compilations.count == 0


@pytest.mark.parametrize("bucket", [5, 7, 12])
def test_flattened_rows_are_the_padded_ones(bucket):
  """Logits and taps of the rows that exist, and the cache behind them, whatever the bucket and how much of the cache is read."""
  target = toys.target()
  method = dataclasses.replace(decode.make_method(target, toys.block_drafter(target), 3, "fixed", "token", False))
  state = decode.init_state(method, 3, 32)
  state, _ = jax.jit(decode.read, static_argnums=0)(
      method, target.params, toys.block_drafter(target).params, state, jnp.array([PROMPTS[1][:6]] * 3), jnp.array([6, 4, 1]))
  state = state.replace(anchor=jnp.array([3, 9, 27]), finish=jnp.array([decode.RUNNING, decode.STOP, decode.RUNNING]))
  made = decode.no_draft(3)
  made = made.replace(
      proposal=made.proposal.replace(drafts=jnp.arange(9).reshape(3, 3)), lengths=jnp.array([2, 0, 1]))
  verify = jax.jit(decode.verify_draft, static_argnums=(0, 4, 5))
  padded, flat = verify(method, target.params, state, made, None, None), verify(method, target.params, state, made, bucket, 4 + bucket)
  for b, rows in ((0, 3), (2, 2)):
    np.testing.assert_allclose(flat.logits[b, :rows], padded.logits[b, :rows], atol=1e-5)
    np.testing.assert_allclose(flat.taps[b, :rows], padded.taps[b, :rows], atol=1e-5)
    n = int(state.cache.lengths[b]) + rows
    for x, y in zip(flat.cache.keys, padded.cache.keys):
      np.testing.assert_allclose(x[b, ..., :n], y[b, ..., :n], atol=1e-5)
  for x, y in zip(flat.cache.values, state.cache.values):
    np.testing.assert_allclose(x[1, :, :4], y[1, :, :4])


@pytest.mark.slow
def test_a_thousand_requests_compile_and_leak_nothing():
  """After warm-up: no program, no byte (within 1 %), every text that of its solo run."""
  engine = make(needs=("greedy", "plain"), logprobs=True)
  engine.warm_up()
  draws = random.Random(1)
  assert [c.tokens for c in serve(engine)] == plain()
  before = sum(x.nbytes for x in jax.live_arrays())
  with Compilations() as compilations:
    held = {}
    for i in range(1000):
      which = draws.randrange(len(PROMPTS))
      greedy = draws.random() < 0.5
      settings = {} if greedy else dict(temperature=1.0, seed=draws.choice([None, i]))
      new = draws.randint(1, NEW)
      number = engine.submit(PROMPTS[which], new, ignore_eos=draws.random() < 0.5, speculation=draws.random() < 0.8, **settings)
      held[number] = which if greedy else None
      for _ in range(draws.randrange(6)):
        engine.step()
      if draws.random() < 0.1:
        engine.cancel(draws.choice(list(held)))
      for n in [n for n in held if engine._requests[n].served]:
        c, which = engine.result(n), held.pop(n)
        assert which is None or c.tokens == plain()[which][: len(c.tokens)]
    engine.run()
    assert all(engine.result(n).finish_reason in ("length", "stop", "cancelled") for n in held)
  after = sum(x.nbytes for x in jax.live_arrays())
  assert compilations.count == 0 and after <= 1.01 * before
