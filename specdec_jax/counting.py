"""What a program computes, moves and exchanges, counted from shapes: products in its jaxpr, collectives in its compiled module.

XLA's own cost analysis counts the body of a loop once; here every body counts as often as it runs.
"""

import collections
import dataclasses
import math
import re

import numpy as np


@dataclasses.dataclass
class Work:
  """flops: of matrix products, 2 a multiply-add; bytes: of their operands and results, and of looked-up rows, all devices together."""

  flops: float = 0.0
  bytes: float = 0.0

  def add(self, other: "Work", times: float = 1.0) -> None:
    self.flops += times * other.flops
    self.bytes += times * other.bytes


def work(jaxpr) -> Work:
  """The products of a (closed) jaxpr, bodies of scans as often as they run, of the branches of a condition the dearest. A loop
  without a known count counts once."""
  total = Work()
  for e in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name, outs = e.primitive.name, sum(_bytes(v) for v in e.outvars)
    if name == "dot_general":
      contracted = math.prod(e.invars[0].aval.shape[d] for d in e.params["dimension_numbers"][0][0])
      total.add(Work(2.0 * e.outvars[0].aval.size * contracted, outs + sum(_bytes(v) for v in e.invars)))
    elif name == "gather":
      total.add(Work(0.0, outs))
    elif name == "cond":
      branches = [work(b) for b in e.params["branches"]]
      total.add(max(branches, key=lambda w: w.flops))
    else:
      times = e.params["length"] if name == "scan" else math.prod(e.params["mesh"].shape.values()) if name == "shard_map" else 1
      for inner in inner_jaxprs(e.params):
        total.add(work(inner), times)
  return total


def inner_jaxprs(params):
  """The jaxprs among the parameters of an equation, but for branches."""
  for value in params.values():
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
      yield value


def _bytes(v) -> float:
  dtype = getattr(v.aval, "dtype", None)
  return v.aval.size * dtype.itemsize if isinstance(dtype, np.dtype) else 0.0


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)")


@dataclasses.dataclass(frozen=True)
class Exchange:
  """One collective of a device: bytes of its result, devices that take part, how often it runs; sent: bytes that a device of a
  ring sends in all."""

  kind: str
  bytes: int
  group: int
  times: int

  @property
  def sent(self) -> float:
    share = (self.group - 1) / self.group
    whole = self.bytes * (self.group if self.kind == "reduce-scatter" else 1)
    return self.times * whole * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def exchanges(module: str, devices: int) -> list[Exchange]:
  """The collectives of a compiled module's text, those in loops with the loop's count."""
  bodies, entry = _computations(module)
  found: collections.Counter[Exchange] = collections.Counter()

  def visit(name: str, times: int) -> None:
    for line in bodies.get(name, ()):
      m = _OP.match(line)
      if not m:
        continue
      op = m["op"].removesuffix("-start")
      if op in KINDS:
        size = _type_bytes(m["type"], largest=m["op"].endswith("-start"))
        found[Exchange(op, size, _group(line, devices), 1)] += times
      inner = times * (_trips(line, bodies) if op == "while" else 1)
      for callees in _CALLS.findall(m["rest"]):
        for callee in callees.strip("{}").split(","):
          visit(callee.strip().lstrip("%"), inner)

  visit(entry, 1)
  return sorted((dataclasses.replace(e, times=n) for e, n in found.items() if e.group > 1), key=lambda e: -e.sent)


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
  """How often a loop runs: as the compiler says, else up to the largest constant of its condition, else once."""
  known = re.search(r"known_trip_count[^0-9]*(\d+)", line)
  if known:
    return int(known[1])
  condition = re.search(r"condition=%?([\w.-]+)", line)
  return max((int(n) for b in bodies.get(condition[1], ()) for n in re.findall(r" s32\[\]\S* constant\((\d+)\)", b)), default=1)


def _computations(module: str) -> tuple[dict[str, list[str]], str]:
  bodies: dict[str, list[str]] = {}
  name, entry = "", ""
  for line in module.splitlines():
    head = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
    if head and " = " not in line.split("(")[0]:
      name = head[2]
      entry = name if head[1] else entry
      bodies[name] = []
    elif name:
      bodies[name].append(line)
  return bodies, entry


def _type_bytes(text: str, largest: bool) -> int:
  sizes = [_SIZES.get(t, 4) * math.prod(int(n) for n in dims.split(",") if n) for t, dims in re.findall(r"(\w+)\[([\d,]*)\]", text)]
  return (max(sizes) if largest else sum(sizes)) if sizes else 0


def _group(line: str, devices: int) -> int:
  shape = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
  if shape:
    return int(shape[2])
  listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
  if listed:
    return len(listed[1].split(","))
  return devices
