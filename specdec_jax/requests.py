"""What an engine knows of the requests that it serves, and of what it launched for them and has not read yet."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from specdec_jax.decode import Completion, DecodeState
from specdec_jax.slots import Packed
from specdec_jax.speculation import Worth


class QueueFull(RuntimeError):
  """The engine holds as many waiting requests as it was built for; try again later."""


@dataclasses.dataclass(frozen=True)
class Served(Completion):
  """A completion, and when: seconds from submission to the first token and to the end, and of every delivery (at, tokens).
  speculation: whether it could be drafted for, and why it was not, or not to the end. finish_reason may be
  "cancelled" or "deadline", too."""

  ttft: float | None = None
  latency: float = 0.0
  deliveries: tuple[tuple[float, int], ...] = ()
  speculation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def tpot(self) -> float | None:
    """Seconds a token behind the first one."""
    return None if len(self.tokens) < 2 else (self.deliveries[-1][0] - self.deliveries[0][0]) / (len(self.tokens) - 1)


@dataclasses.dataclass(eq=False)
class Request:
  """A request and what the host knows of it. epoch: how often it was put back into the queue."""

  id: int
  prompt: list[int]
  settings: dict[str, Any]  # One row of each field of Settings.
  need: str
  stop_texts: list[str]
  speculation: bool
  submitted: float
  deadline: float | None
  why: str | None = None  # Why it is not drafted for.
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  rounds: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  worth: Worth = dataclasses.field(default_factory=Worth)
  kept: bool = True  # Whether its context is kept up for the drafter.
  crowd: int = 0  # Requests at once when it was last asked whether drafts pay for it.
  offered: bool = False  # Whether it could be drafted for at all.
  epoch: int = 0
  streamed: int = 0
  served: Served | None = None


@dataclasses.dataclass(frozen=True)
class Filling:
  """A request whose text is being read: `done` of it so far, into `row`."""

  request: Request
  text: list[int]
  done: int
  row: DecodeState


@dataclasses.dataclass(frozen=True)
class Flight:
  """A launched round, or first token (bucket None), that was not read yet: who held its slots, at which epoch; follows: whether it is
  a round and nothing but its programs was launched behind the round before it; places: the slots that were drafted for, where not all;
  kept: whether a drafter's context was kept up."""

  requests: tuple[tuple[Request, int] | None, ...]
  bucket: int | None
  output: Packed
  confidence: jax.Array | None
  follows: bool
  places: tuple[int, ...] | None
  kept: bool
