"""What a drafter is: four pure functions over explicit parameters, and what they exchange."""

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.calibrate import Calibration
from specdec_jax.config import DrafterConfig, SerialConfig
from specdec_jax.sampling import Sampling, adjusted
from specdec_jax.typing import Float, Int, Key
from specdec_jax.verify import SparseDistribution


@flax.struct.dataclass
class Proposal:
  """drafts [B,L]; q: the distributions they were drawn from; confidence [B,L]: logit that draft k is accepted given that
  all before it were, of a trained head or, without one, `best_logit`; None where a drafter has neither."""

  drafts: Int["B L"]
  q: Float["B L V"] | SparseDistribution
  confidence: Float["B L"] | None = None


def best_logit(logits: Float["B V"], sampling: Sampling, ids: Int["B C"] | None = None) -> Float["B"]:
  """The logit of the probability of the best token of a slot: a proxy for a trained confidence. It knows the drafts before the
  slot and not the slot's own, which the probability of the drawn token itself would (and is not lossless to schedule by)."""
  adjust = adjusted(logits, sampling, ids)
  return logit(adjust.max(-1) - jax.nn.logsumexp(adjust, -1))


def logit(log_p: Float["B"]) -> Float["B"]:
  """The logit, from -30 to 30, of the probability whose logarithm is log_p."""
  return jnp.clip(log_p - jnp.log(-jnp.expm1(jnp.minimum(log_p, -1e-7))), -30.0, 30.0)


def proposal(drafts: Int["L B"], ids: Int["B L C"] | None, q: Float["L B V"], confidence: Float["L B"], sampling: Sampling) -> Proposal:
  """What a walk slot by slot gathered; q [L,B,V], of the candidates `ids` [B,L,C], of the drafts alone in a greedy batch."""
  drafts, q = drafts.swapaxes(0, 1), q.swapaxes(0, 1)
  if sampling.greedy:
    ids = drafts[..., None]
  return Proposal(drafts, q if ids is None else SparseDistribution(ids, q), confidence.swapaxes(0, 1))


@flax.struct.dataclass
class DraftOutputs:
  """Teacher-forced outputs of training blocks (of a serial drafter: A = S columns, L steps). hidden [B,A,L,D]; rows [B,A,L,D], or D+R
  beside a bias head: their products with the model's `table` are the draft logits (capped: `losses.capped_logits`); embedded [B,A,L,R]:
  previous tokens as the sequential head sees them, or None; confidence [B,A,L]: logits, or None."""

  hidden: Float["B A L D"]
  rows: Float["B A L D"]
  embedded: Float["B A L R"] | None = None
  confidence: Float["B A L"] | None = None


class DraftModel(Protocol):
  """The functions of a drafter; hashable, without parameters. `taps` are the target layers it reads, `draft_length` is γ."""

  taps: tuple[int, ...]
  draft_length: int

  def init_state(self, batch: int, length: int) -> Any:
    """An empty state for `batch` slots of up to `length` committed tokens."""

  def extend(self, params, state, features: Float["B T M D"], tokens: Int["B T"], positions: Int["B T"], valid: Int["B"]) -> Any:
    """Consumes the first `valid` of T rows that were just committed: the target's taps at `positions`, and its tokens."""

  def propose(self, params, state, anchor: Int["B"], position: Int["B"], keys: Key["B L"], sampling: Sampling) -> Proposal:
    """γ drafts after `anchor`, which stands at `position`; keys [B,γ], one an output position."""

  def block_outputs(self, params, batch) -> Any:
    """Teacher-forced outputs of the blocks of a training batch."""


class FromConfig:
  """What the functions of every drafter take from their `config`."""

  config: DrafterConfig | SerialConfig

  @property
  def taps(self) -> tuple[int, ...]:
    return self.config.taps

  @property
  def draft_length(self) -> int:
    return self.config.draft_length


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
  """A drafter attached to a target: its functions, parameters, configuration and origin; its confidences' calibration, if any."""

  name: str
  config: DrafterConfig | SerialConfig
  model: DraftModel
  params: Any
  hash: str
  calibration: Calibration | None = None
