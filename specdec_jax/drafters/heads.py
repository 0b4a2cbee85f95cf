"""The light heads on a block drafter's hidden states."""

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.models.layers import project_vocab
from specdec_jax.typing import Float, Int


class MarkovHead(nn.Module):
  """The bias that the previous token puts on the next one's logits, B = W₁[x] W₂ (DSpark §3.1)."""

  vocab: int
  rank: int

  def setup(self):
    self.previous = self.param("previous", nn.initializers.normal(0.02), (self.vocab, self.rank))
    self.bias = self.param("bias", nn.initializers.zeros, (self.vocab, self.rank))

  def embed(self, tokens: Int["B L"]) -> Float["B L R"]:
    """W₁[x], also a feature of the confidence head."""
    return jnp.take(self.previous, tokens, axis=0, mode="clip")

  def __call__(self, embedded: Float["B L R"], hidden: Float["B L D"]) -> Float["B L V"]:
    """The bias [B,L,V] of embedded previous tokens; `hidden` is for heads that gate it."""
    return project_vocab(embedded, self.bias)


class ConfidenceHead(nn.Module):
  """c = wᵀ[h; W₁[x_prev]] + b, a logit (DSpark §3.1; the published code has the bias)."""

  inputs: int

  @nn.compact
  def __call__(self, features: Float["B L D"]) -> Float["B L"]:
    kernel = self.param("kernel", nn.initializers.zeros, (1, self.inputs))
    bias = self.param("bias", nn.initializers.zeros, (1,))
    return (features.astype(jnp.float32) @ kernel[0].astype(jnp.float32)) + bias.astype(jnp.float32)
