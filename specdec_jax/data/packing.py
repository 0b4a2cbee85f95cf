"""Documents of mixed lengths into rows of one length."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
  """tokens [B,T]; segments [B,T]: 0 padding, 1, 2, … the texts of a row; answer [B,T]: True on the tokens of answers."""

  tokens: np.ndarray
  segments: np.ndarray
  answer: np.ndarray


def pack(documents: Iterable[tuple[Sequence[int], Sequence[int]]], length: int, open_rows: int = 64) -> Rows:
  """`pack_marked` for (prompt ids, answer ids) pairs."""
  return pack_marked((([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in documents), length, open_rows)


def pack_marked(documents: Iterable[tuple[Sequence[int], Sequence[bool]]], length: int, open_rows: int = 64) -> Rows:
  """Packs (ids, which of them are answers) whole into rows of `length`, each into the fullest open row that still holds it.

  Raises ValueError for a document longer than a row: cutting is the caller's decision.
  """
  rows: list[list[tuple[Sequence[int], Sequence[bool]]]] = []
  free: list[int] = []
  active: list[int] = []
  for ids, marks in documents:
    need = len(ids)
    if need > length:
      raise ValueError(f"a document of {need} tokens does not fit a row of {length}")
    fitting = [i for i in active if free[i] >= need]
    if fitting:
      i = min(fitting, key=lambda j: free[j])
    else:
      i = len(rows)
      rows.append([])
      free.append(length)
      active.append(i)
      if len(active) > open_rows:
        active.remove(min(active, key=lambda j: free[j]))
    rows[i].append((ids, marks))
    free[i] -= need
  shape = (len(rows), length)
  tokens, segments, answers = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
  for i, texts in enumerate(rows):
    at = 0
    for n, (ids, marks) in enumerate(texts, 1):
      end = at + len(ids)
      tokens[i, at:end], segments[i, at:end], answers[i, at:end] = ids, n, marks
      at = end
  return Rows(tokens, segments, answers)
