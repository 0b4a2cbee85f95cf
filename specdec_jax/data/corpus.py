"""The text that the embedded target learns, made from what every machine has.

Three domains whose entropies differ, as in the papers' evaluation sets: `maths` (generated word problems, solved step
by step), `code` (the functions of Python's own library: to complete, to edit, to turn into classes) and `chat`
(questions about the library's documentation). A document is one question and one answer; whether it may be trained on
or only evaluated on is a function of the hash of its source, so that no module is on both sides.
"""

import ast
import dataclasses
import functools
import hashlib
import keyword
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterator

DOMAINS = ("maths", "code", "chat")
EVALUATION_SHARE = 0.06
_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__", "ensurepip")


@dataclasses.dataclass(frozen=True)
class Document:
  """One question and its answer; `source` names the module or the problem that it was made from."""

  domain: str
  source: str
  prompt: str
  answer: str


def is_evaluation(source: str) -> bool:
  """Whether a source belongs to the evaluation split: a fixed hash, the same on every machine."""
  digest = hashlib.sha256(source.encode()).digest()
  return int.from_bytes(digest[:4], "big") < EVALUATION_SHARE * 2**32


def documents(domain: str, seed: int = 0, problems: int = 30_000) -> Iterator[Document]:
  """All documents of a domain in a fixed order. `problems` is the number of generated maths problems."""
  if domain == "maths":
    yield from _maths(random.Random(seed), problems)
  elif domain == "code":
    yield from _code(random.Random(seed + 1))
  elif domain == "chat":
    yield from _chat(random.Random(seed + 2))
  else:
    raise ValueError(f"unknown domain {domain!r}: one of {', '.join(DOMAINS)}")


# Python's own library.


@dataclasses.dataclass(frozen=True)
class Function:
  """A library function: where it stands, its signature line, docstring and body, without the common indentation."""

  module: str
  name: str
  arguments: tuple[tuple[str, str | None], ...]  # (name, default as source or None)
  signature: str
  doc: str
  body: str


def _modules() -> Iterator[tuple[str, str, ast.Module]]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if any(p in _SKIPPED or p.startswith("_sysconfigdata") for p in parts):
      continue
    try:
      text = path.read_text(encoding="utf-8")
      tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
      continue  # The library keeps a few deliberately broken files.
    yield ".".join(parts).removesuffix(".__init__"), text, tree


def _dedent(lines: list[str]) -> str:
  margin = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
  return "\n".join(x[margin:].rstrip() for x in lines).strip("\n")


@functools.cache
def library() -> tuple[tuple[Function, ...], tuple[tuple[str, str], ...]]:
  """Every function of the library with a body of 60 to 4000 characters, and every (module, docstring), in file order."""
  functions, docs = [], []
  for module, text, tree in _modules():
    docs.append((module, ast.get_docstring(tree) or ""))
    lines = text.splitlines()
    for node in ast.walk(tree):
      if not isinstance(node, ast.FunctionDef):
        continue
      doc = ast.get_docstring(node) or ""
      body = node.body[1:] if doc else node.body
      if not body:
        continue
      source = _dedent(lines[body[0].lineno - 1 : node.end_lineno])
      if 60 <= len(source) <= 4000 and "\t" not in source:
        signature = f"def {node.name}({ast.unparse(node.args)}):"
        functions.append(Function(module, node.name, _arguments(node.args), signature, doc, source))
  return tuple(functions), tuple(docs)


def _arguments(args: ast.arguments) -> tuple[tuple[str, str | None], ...]:
  plain = args.posonlyargs + args.args
  defaults = [None] * (len(plain) - len(args.defaults)) + [ast.unparse(x) for x in args.defaults]
  pairs = list(zip([a.arg for a in plain], defaults))
  pairs += [(a.arg, None if d is None else ast.unparse(d)) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
  return tuple(p for p in pairs if p[0] not in ("self", "cls"))


def _indent(text: str) -> str:
  return "\n".join("    " + x if x else x for x in text.split("\n"))


# Code.

_SUFFIXES = ("_value", "_item", "_new", "2", "_copy", "_local")


def _code(rng: random.Random) -> Iterator[Document]:
  seen = set()
  for f in library()[0]:
    if len(f.body) > 700:
      continue
    whole = f"{f.signature}\n{_indent(f.body)}"
    summary = f.doc.split("\n")[0]
    if f.body not in seen:
      head = f"{f.signature}\n" + (f'    """{summary}"""\n' if summary else "")
      yield Document("code", f.module, f"Complete this function of the module {f.module}.\n{head}", _indent(f.body))
    seen.add(f.body)
    names = sorted({x for x in re.findall(r"\b[a-z_][a-z_0-9]{2,}\b", f.body) if not keyword.iskeyword(x)})
    local = [x for x in names if any(x == a for a, _ in f.arguments) or re.search(rf"^\s*{x} = ", f.body, re.M)]
    if local and len(whole) < 480:
      old = rng.choice(local)
      new = old + rng.choice(_SUFFIXES)
      yield Document(
          "code", f.module, f"Rename {old} to {new} in this function.\n{whole}",
          re.sub(rf"(?<![\w.'\"]){old}\b", new, whole))
    if 2 <= len(f.arguments) <= 6:
      yield _record(rng, f)


def _record(rng: random.Random, f: Function) -> Document:
  """A class that holds a function's arguments: real names, boilerplate that follows from the question."""
  title = "".join(w.capitalize() for w in f.name.strip("_").split("_")) or "Record"
  title += rng.choice(("Options", "Record", "Call", "State", "Request"))
  fields = [a for a, _ in f.arguments]
  shown = ", ".join(fields[:-1]) + f" and {fields[-1]}"
  given = ", ".join(a if d is None else f"{a}={d}" for a, d in f.arguments)
  lines = [f"class {title}:", f"    def __init__(self, {given}):"]
  lines += [f"        self.{a} = {a}" for a in fields]
  kind = rng.randrange(3)
  if kind == 0:
    lines += ["", "    def __repr__(self):"]
    lines += [f"        return f\"{title}({', '.join(f'{a}={{self.{a}!r}}' for a in fields)})\""]
  elif kind == 1:
    lines += ["", "    def __eq__(self, other):", f"        if not isinstance(other, {title}):", "            return NotImplemented"]
    lines += ["        return (" + "\n            and ".join(f"self.{a} == other.{a}" for a in fields) + ")"]
  else:
    lines += ["", "    def as_dict(self):", "        return {"]
    lines += [f'            "{a}": self.{a},' for a in fields] + ["        }"]
  asked = ("a repr", "an equality test", "a method as_dict")[kind]
  return Document("code", f.module, f"Write a class {title} with the fields {shown} and {asked}.", "\n".join(lines))


# Chat.

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _chat(rng: random.Random) -> Iterator[Document]:
  described = set()
  functions, module_docs = library()
  for f in functions:
    if 1 <= len(f.arguments) <= 6 and not f.name.startswith("__"):
      yield _explained_signature(rng, f)
    text = " ".join(f.doc.split())
    if not 60 <= len(text) <= 700 or text in described or not text.isascii():
      continue
    described.add(text)
    sentences = re.split(r"(?<=[.!?]) ", text)
    first = sentences[0].rstrip(".")
    if len(text) <= 420:
      yield Document(
          "chat", f.module, f"Here is a note on {f.name}: {text}\nPlease tell me what {f.name} does.",
          f"The function {f.name} of the module {f.module} is described as follows. {text}\n"
          f"In short: {first}. You call it as {f.signature[4:-1]}.")
    yield Document(
        "chat", f.module, f"What does the function {f.name} of the module {f.module} do?", f"The function {f.name} does this: {text}")
  for module, doc in module_docs:
    for paragraph in doc.split("\n\n"):
      text = " ".join(paragraph.split())
      if 120 <= len(text) <= 600 and text.isascii():
        yield Document("chat", module, f"Tell me something about the module {module}.", text)


def _explained_signature(rng: random.Random, f: Function) -> Document:
  call = f.signature[4:-1].replace("self, ", "").replace("(self)", "()")
  count = _NUMBERS[len(f.arguments)] + (" argument" if len(f.arguments) == 1 else " arguments")
  lines = [f"The function {f.name} belongs to the module {f.module} and takes {count}:"]
  for name, default in f.arguments:
    lines.append(f"- {name} is required." if default is None else f"- {name} is optional, and its default is {default}.")
  required = [a for a, d in f.arguments if d is None]
  if required:
    lines.append(f"The shortest call is {f.name}({', '.join(required)}).")
  else:
    lines.append(f"The shortest call is {f.name}(), as nothing is required.")
  question = rng.choice(("How do I call {} from {}?", "Which arguments does {} in {} take?", "Explain the signature {} of {}."))
  return Document("chat", f.module, question.format(call, f.module), "\n".join(lines))


# Maths.

_PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga", "Paul")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_PLACES = ("at the market", "at school", "in the garden", "at home", "in the park", "at the fair")


def _maths(rng: random.Random, problems: int) -> Iterator[Document]:
  makers = (_running_total, _running_total, _shopping, _rates, _sharing, _compare)
  for _ in range(problems):
    prompt, answer = rng.choice(makers)(rng)
    yield Document("maths", prompt, prompt, answer)


def _running_total(rng: random.Random) -> tuple[str, str]:
  who, what, where = rng.choice(_PEOPLE), rng.choice(_THINGS), rng.choice(_PLACES)
  total = rng.randint(5, 60)
  story, steps = [f"{who} has {total} {what} {where}."], [f"{who} starts with {total} {what}."]
  for _ in range(rng.randint(3, 5)):
    n = rng.randint(2, 40)
    kind = rng.randrange(4)
    if kind == 0 and total > n:
      story.append(f"{who} gives away {n} {what}.")
      steps.append(f"After giving away {n}, there are {total} - {n} = {total - n} {what}.")
      total -= n
    elif kind == 1 and total * 2 < 400:
      story.append(f"Then the number of {what} doubles.")
      steps.append(f"After doubling, there are {total} * 2 = {total * 2} {what}.")
      total *= 2
    elif kind == 2:
      a, b = rng.randint(2, 9), rng.randint(2, 9)
      story.append(f"{who} finds {a} boxes with {b} {what} each.")
      steps.append(f"The boxes hold {a} * {b} = {a * b} {what}, so there are {total} + {a * b} = {total + a * b} {what}.")
      total += a * b
    else:
      story.append(f"{who} buys {n} more {what}.")
      steps.append(f"After buying {n}, there are {total} + {n} = {total + n} {what}.")
      total += n
  return " ".join(story) + f" How many {what} does {who} have now?", _solution(steps, total)


def _shopping(rng: random.Random) -> tuple[str, str]:
  who, items = rng.choice(_PEOPLE), rng.sample(_THINGS, rng.randint(2, 3))
  total, story, steps, sums = 0, [], [], []
  for item in items:
    n, price = rng.randint(2, 12), rng.randint(2, 15)
    story.append(f"{n} {item} at {price} dollars each")
    steps.append(f"The {item} cost {n} * {price} = {n * price} dollars.")
    total += n * price
    sums.append(str(n * price))
  steps.append(f"Together this is {' + '.join(sums)} = {total} dollars.")
  paid = total + rng.randint(1, 60)
  steps.append(f"{who} pays {paid} dollars and gets back {paid} - {total} = {paid - total} dollars.")
  return (
      f"{who} buys {', and '.join(story)}, and pays with {paid} dollars. How much money does {who} get back?",
      _solution(steps, paid - total))


def _rates(rng: random.Random) -> tuple[str, str]:
  who, what = rng.choice(_PEOPLE), rng.choice(_THINGS)
  rate, hours, days = rng.randint(3, 15), rng.randint(2, 8), rng.randint(2, 7)
  sold = rng.randint(1, rate * hours * days - 1)
  daily, made = rate * hours, rate * hours * days
  steps = [
      f"In one day {who} packs {rate} * {hours} = {daily} {what}.",
      f"In {days} days {who} packs {daily} * {days} = {made} {what}.",
      f"After selling {sold}, there are {made} - {sold} = {made - sold} {what} left."]
  return (f"{who} packs {rate} {what} an hour, {hours} hours a day, for {days} days, and then sells {sold} of them. "
          f"How many {what} are left?"), _solution(steps, made - sold)


def _sharing(rng: random.Random) -> tuple[str, str]:
  who, what = rng.choice(_PEOPLE), rng.choice(_THINGS)
  friends, each, kept = rng.randint(2, 9), rng.randint(3, 20), rng.randint(2, 20)
  bags = rng.randint(2, 6)
  total = friends * each * bags + kept
  steps = [
      f"{who} keeps {kept}, so {total} - {kept} = {total - kept} {what} are shared.",
      f"There are {bags} * {friends} = {bags * friends} friends in all the groups.",
      f"Every friend gets {total - kept} / {bags * friends} = {each} {what}."]
  return (f"{who} has {total} {what}, keeps {kept} of them and shares the rest equally among {bags} groups of {friends} friends. "
          f"How many {what} does every friend get?"), _solution(steps, each)


def _compare(rng: random.Random) -> tuple[str, str]:
  (a, b, c), what = rng.sample(_PEOPLE, 3), rng.choice(_THINGS)
  n, more, times = rng.randint(4, 50), rng.randint(2, 40), rng.randint(2, 5)
  second, third = n + more, (n + more) * times
  steps = [
      f"{a} has {n} {what}.",
      f"{b} has {n} + {more} = {second} {what}.",
      f"{c} has {second} * {times} = {third} {what}.",
      f"Together they have {n} + {second} + {third} = {n + second + third} {what}."]
  return (f"{a} has {n} {what}. {b} has {more} more than {a}. {c} has {times} times as many as {b}. "
          f"How many {what} do they have together?"), _solution(steps, n + second + third)


def _solution(steps: list[str], answer: int) -> str:
  numbered = "\n".join(f"Step {i}: {s}" for i, s in enumerate(steps, 1))
  return f"Let us solve this step by step.\n{numbered}\nThe answer is {answer}."
