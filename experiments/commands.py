"""The commands that configurations name in their docstrings."""

import ast
import dataclasses
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = re.compile(
    r"python -m experiments\.(\w+) --config=(configs/\w+/\w+\.py)(?::(\w+))?((?: --config\.\S+)*)(?: --workdir=runs/(\w+))?")


@dataclasses.dataclass(frozen=True)
class Command:
  """One command line: experiments/MODULE.py with a configuration, a variant of it and further values ("" for none), and the name of
  its run."""

  module: str
  config: str
  variant: str
  values: str
  run: str

  def __str__(self):
    config = f"{self.config}:{self.variant}" if self.variant else self.config
    return f"python -m experiments.{self.module} --config={config}{self.values} --workdir=runs/{self.run}"


def configs() -> list[str]:
  """Every configuration, as a path from the repository's root."""
  return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").glob("*/*.py") if p.name != "__init__.py")


@functools.cache
def commands(config: str) -> list[Command]:
  """The commands in a configuration's docstring, in order; a run without a name of its own has that of its configuration."""
  text = ast.get_docstring(ast.parse((ROOT / config).read_text(encoding="utf-8"))) or ""
  name = lambda path, variant: "_".join([*pathlib.Path(path).with_suffix("").parts[1:], *([variant] if variant else [])])
  return [
      Command(module, path, variant, values, run or name(path, variant)) for module, path, variant, values, run in COMMAND.findall(text)]


@functools.cache
def command_of(run: str) -> Command:
  """The command whose run has this name; KeyError where no configuration names it."""
  found = [c for path in configs() for c in commands(path) if c.run == run]
  if not found:
    raise KeyError(f"no configuration names a run {run!r}")
  return found[0]
