"""Whether speculation changed anything: the losslessness contracts of METRICS for a target, drafters and prompts.

  python -m experiments.check_lossless --config=configs/tiny/lossless.py --workdir=runs/tiny_lossless

Temperature 0: texts against target-only texts, first differences with the gap of the logits there, every position
teacher-forced. Sampling: every token's surprisal under the target's own distribution, and each output position of many
samples of one prompt against the target's own samples. Exit code 1 on a fault.
"""

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
from absl import app
from rich import console as rich_console
from rich import progress

import specdec_jax
from experiments import common
from experiments.measure import decode_all, load_prompts
from specdec_jax import lossless, report
from specdec_jax.drafters.base import Drafter, DraftModel
from specdec_jax.verify import SparseDistribution

FALSE_ALARM = 0.01  # Probability that a run of right samples, all its tests together, is called a fault.
COLUMNS = (
    ("drafter", "drafter.name", ""), ("data set", "dataset", ""), ("T", "temperature", "g"), ("top-p", "metrics.top_p", "g"),
    ("rule", "rule", ""), ("runs", "metrics.runs", ""),
    ("equal texts", lambda r: r["metrics"]["equal"], ""), ("largest gap", "metrics.largest_gap", ".2g"),
    ("pooled z", "metrics.pooled_z", "+.2f"), ("p, runs", "metrics.run_p", ".2g"), ("p, pooled", "metrics.pooled_p", ".2g"),
    ("p, positions", "metrics.smallest_p", ".2g"),
    ("total variation", "metrics.total_variation", ".3f"), ("by chance", "metrics.noise_floor", ".3f"),
    ("contract", "lossless.contract", ""), ("holds", lambda r: "yes" if r["lossless"]["holds"] else "NO", ""))


@dataclasses.dataclass(frozen=True)
class Misreporting:
  """A drafter that drafts the best tokens of its q and says that it drew them: a fault that the check must find."""

  honest: DraftModel

  def __getattr__(self, name):
    return getattr(self.honest, name)

  def propose(self, params, state, anchor, position, keys, sampling):
    proposal = self.honest.propose(params, state, anchor, position, keys, sampling)
    if not isinstance(proposal.q, SparseDistribution):
      return proposal.replace(drafts=jnp.argmax(proposal.q, -1).astype(jnp.int32))
    best = jnp.argmax(proposal.q.probs, -1)[..., None]
    return proposal.replace(drafts=jnp.take_along_axis(proposal.q.ids, best, -1)[..., 0])


def check_greedy(config, target, drafters, prompts, tick):
  """One dict of figures for a drafter's greedy texts, all draft lengths and batch sizes together."""
  run = lambda drafter, batch, **kw: decode_all(
      target, drafter, prompts, batch, config.max_new_tokens, [0] * len(prompts), rule=config.rule, **kw)
  plain = {b: run(None, b) for b in config.batches}
  for drafter, lengths in drafters:
    equal = total = 0
    gaps, parted, late, failed = [], [], [], []
    for batch, length in itertools.product(config.batches, lengths):
      tick(f"{drafter.name}, {length} drafts, batch {batch}")
      done = run(drafter, batch, draft_length=[length] * batch)
      equal, total = equal + lossless.identical(done, plain[batch]), total + len(done)
      parted += [
          {"draft_length": length, "batch": batch, **dataclasses.asdict(d)}
          for d in lossless.first_divergences(target, prompts, done, plain[batch])]
      for i, (prompt, c) in enumerate(zip(prompts, done)):
        if c.tokens != plain[batch][i].tokens or length == lengths[0]:  # Equal texts need reading once.
          forced = lossless.teacher_force(target, prompt, c.tokens)
          gaps.append(float(forced.gap.max(initial=0.0)))
          late += [(i, int(k)) for k in (~(forced.gap <= forced.tie)).nonzero()[0]]
      failed += [c.error for c in done if c.error]
    contract = 1 if target.dtype == "float32" else 2
    holds = not late and not failed and (not parted if contract == 1 else all(d["near_tie"] for d in parted))
    yield drafter, {
        "contract": contract, "identical": equal, "n": total, "holds": holds}, {
        "runs": len(lengths) * len(config.batches), "equal": f"{equal}/{total}", "largest_gap": max(gaps), "divergences": parted[:20],
        "beyond_a_near_tie": late[:20], "errors": failed[:5]}


def check_sampled(config, target, drafters, prompts, tests, tick, **settings):
  """The same for samples at one temperature and top-p; `tests`: how many tests the whole run makes."""
  alpha = FALSE_ALARM / tests
  kinds = len(config.batches) * max(len(lengths) for _, lengths in drafters)
  one = [prompts[0]] * config.samples
  first = lambda done: [c.tokens for c in done]
  seeds = itertools.count(config.seed)
  take = lambda n: list(itertools.islice(seeds, n))
  run = lambda drafter, texts, batch, count, **kw: decode_all(
      target, drafter, texts, batch, count, take(len(texts)), rule=config.rule, **settings, **kw)
  plain = first(run(None, one * kinds, max(config.batches), config.positions))
  for drafter, lengths in drafters:
    runs, samples = [], []
    for batch, length in itertools.product(config.batches, lengths):
      tick(f"{drafter.name}, {length} drafts, batch {batch}, {settings}")
      done = run(drafter, prompts, batch, config.max_new_tokens, draft_length=[length] * batch)
      runs.append(lossless.surprisal(target, prompts, done, **settings))
      samples += first(run(drafter, one, batch, config.positions, draft_length=[length] * batch))
    found = lossless.two_samples(samples, plain, config.positions)
    together = functools.reduce(operator.add, runs)  # Sees what no single one does.
    run_p = min(r.p_value for r in runs)
    holds = min(run_p, together.p_value, *found.p_value) >= alpha
    worst = max(range(config.positions), key=lambda k: found.total_variation[k] - found.noise_floor[k])
    yield drafter, {"contract": 3, "identical": None, "n": len(prompts) * len(runs) + len(samples), "holds": holds}, {
        "runs": len(runs), "equal": None, "pooled_z": None if together.impossible else together.z, "impossible": together.impossible,
        "run_p": run_p, "pooled_p": together.p_value,
        "smallest_p": min(found.p_value), "total_variation": found.total_variation[worst], "noise_floor": found.noise_floor[worst],
        "samples": len(samples), "alpha": alpha}


def checked(config, target, drafters, prompts, tick):
  """A results record for every drafter, data set, temperature and top-p. drafters: (drafter, draft lengths); prompts: token ids by
  data set; tick: called with a text before each run."""
  sampled = [t for t in config.temperatures if t > 0]
  settings = len(sampled) * len(config.top_ps)
  tests = max(1, (cells(config, drafters, prompts) + len(drafters) * len(prompts) * (1 + config.positions)) * settings)
  blank = dict.fromkeys((
      "top_p", "runs", "equal", "largest_gap", "pooled_z", "impossible", "run_p", "pooled_p", "smallest_p", "total_variation",
      "noise_floor"))
  for dataset, ids in prompts.items():
    say = lambda note, where=f"{dataset}: ": tick(where + note)
    tagged = lambda temperature, top_p, results: ((temperature, top_p, *r) for r in results)
    greedy = [tagged(0.0, None, check_greedy(config, target, drafters, ids, say))] if 0 in config.temperatures else []
    drawn = (tagged(t, p, check_sampled(config, target, drafters, ids, tests, say, temperature=t, top_p=p))
             for t, p in itertools.product(sampled, config.top_ps))
    for temperature, top_p, drafter, verdict, found in itertools.chain(*greedy, itertools.chain.from_iterable(drawn)):
      yield common.record(
          "check_lossless", target, {"name": drafter.name, "hash": drafter.hash}, seed=config.seed, dataset=dataset,
          temperature=temperature, concurrency=list(config.batches), schedule="fixed", rule=config.rule, n_requests=verdict["n"],
          speculation={"on": True, "why": None}, lossless=verdict, metrics=blank | {"top_p": top_p} | found,
          notes=f"draft lengths {list(config.draft_lengths)}")


def cells(config, drafters, prompts) -> int:
  """Runs of one temperature."""
  return sum(len(lengths) for _, lengths in drafters) * len(config.batches) * len(prompts)


def lengths_of(config, drafter: Drafter) -> list[int]:
  """The configured draft lengths that the drafter reaches, or all of its drafts."""
  gamma = drafter.model.draft_length
  return [n for n in config.draft_lengths if n <= gamma] or [gamma]


def main(argv):
  del argv
  config, workdir = common.settings()
  screen = rich_console.Console()
  screen.width = max(screen.width, 160)
  target = specdec_jax.load_target(config.target, dtype=config.dtype)
  drafters = []
  for name in config.drafters:
    drafter: Drafter = specdec_jax.load_drafter(name, target)
    if config.misreport:
      drafter = dataclasses.replace(drafter, name=f"{drafter.name}, misreporting", model=Misreporting(drafter.model))
    drafters.append((drafter, lengths_of(config, drafter)))
  prompts = {d: [p for p in ids if len(p) <= config.longest_prompt][: config.requests] for d, ids in load_prompts(config, target).items()}
  records = []
  with progress.Progress(*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"), console=screen) as bar:
    settings = (0 in config.temperatures) + sum(t > 0 for t in config.temperatures) * len(config.top_ps)
    task = bar.add_task(target.name, total=cells(config, drafters, prompts) * settings, note="")
    for r in checked(config, target, drafters, prompts, lambda note: bar.update(task, advance=1, note=note)):
      report.append(workdir / "results.jsonl", r)
      records.append(r)
  screen.print(report.table(records, COLUMNS))
  (workdir / "lossless.md").write_text(report.markdown(records, COLUMNS) + "\n")
  screen.print(
      f"records: {workdir / 'results.jsonl'}   table: {workdir / 'lossless.md'}   {jax.device_count()} × {jax.devices()[0].device_kind}")
  faults = [r for r in records if not r["lossless"]["holds"]]
  for r in faults:
    screen.print(f"FAULT {r['drafter']['name']}, {r['dataset']}, temperature {r['temperature']:g}: " + str({
        k: v for k, v in r["metrics"].items() if v is not None and k in (
            "divergences", "beyond_a_near_tie", "errors", "impossible", "pooled_z", "run_p", "pooled_p", "smallest_p", "alpha")}))
  if faults:
    raise SystemExit(1)


if __name__ == "__main__":
  common.define("configs/tiny/lossless.py")
  app.run(main)
