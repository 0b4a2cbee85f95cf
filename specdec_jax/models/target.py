"""A target model, ready to use: config, parameters, tokenizer, and where it came from."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specdec_jax import sharding
from specdec_jax.config import ModelConfig
from specdec_jax.data.tokenizer import Tokenizer
from specdec_jax.models.cache import Cache
from specdec_jax.models.decoder import Decoder
from specdec_jax.typing import Float, Int


@dataclasses.dataclass(frozen=True)
class TargetOutput:
  """logits [B,T,V]; taps [B,T,M,D], the raw outputs of the tapped layers in the order asked for."""

  logits: Float["B T V"]
  taps: Float["B T M D"]


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
  """A frozen target. `params` is the tree of `decoder`; `hash` identifies the weights; mesh: that they lie on, if any."""

  name: str
  config: ModelConfig
  decoder: Decoder
  params: Any
  tokenizer: Tokenizer | None
  hash: str
  dtype: str
  mesh: Mesh | None = None

  @property
  def vocab(self) -> int:
    """Ids that may be emitted: those of the tokenizer. Checkpoints pad the head beyond it; such rows have probability 0."""
    return min(self.tokenizer.vocab, self.config.vocab) if self.tokenizer else self.config.vocab

  def forward(self, tokens: Int["B T"], mask: Int["B T"] | None = None, taps: Sequence[int] = ()) -> TargetOutput:
    """Logits and taps of whole texts. mask [B,T]: 0 for padding, left or right, whose rows are undefined.

    taps: layer numbers from 0, -1 for the embedding. Raises ValueError for wrong shapes, ids or taps.
    """
    tokens = self.check_tokens(tokens)
    self.check_taps(taps)
    segments = None if mask is None else jnp.asarray(mask, jnp.int32)
    if segments is not None and segments.shape != tokens.shape:
      raise ValueError(f"mask has shape {segments.shape}, tokens {tokens.shape}")
    with sharding.use(self.mesh):
      return TargetOutput(*_forward(self.decoder, tuple(taps), self.params, tokens, segments))

  def check_tokens(self, tokens) -> Int["B T"]:
    """`tokens` as int32 [B,T]; raises ValueError for another rank, no tokens, or an id outside the vocabulary."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise ValueError(f"tokens must be integers [B,T] with at least one token, not {tokens.dtype} {tokens.shape}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab:
      raise ValueError(f"token ids must be 0 … {self.config.vocab - 1}, found {int(tokens.min())} … {int(tokens.max())}")
    return tokens.astype(jnp.int32)

  def check_taps(self, taps: Sequence[int]) -> None:
    wrong = [t for t in taps if not -1 <= t < self.config.layers]
    if wrong:
      raise ValueError(f"taps {wrong} do not exist: {self.name} has layers 0 … {self.config.layers - 1}, and -1 is the embedding")

  def init_cache(self, batch: int, length: int) -> Cache:
    """An empty cache of `length` rows for each of `batch` slots."""
    return self.decoder.init_cache(batch, length, self.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(decoder: Decoder, taps, params, tokens, segments):
  hidden, tapped, _ = decoder.apply({"params": params}, tokens, segments=segments, taps=taps)
  return decoder.apply({"params": params}, hidden, method="logits"), tapped
