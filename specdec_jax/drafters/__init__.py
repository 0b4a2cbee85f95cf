"""Drafters: the block drafter with its parts, and the serial ones."""

from specdec_jax.config import DrafterConfig, SerialConfig
from specdec_jax.drafters.block import BlockDrafter
from specdec_jax.drafters.serial import SerialDrafter


def drafter_model(config: DrafterConfig | SerialConfig, transposed: bool = False, dtype: str = "float32") -> BlockDrafter | SerialDrafter:
  """The functions of the drafter that `config` describes."""
  return (SerialDrafter if isinstance(config, SerialConfig) else BlockDrafter)(config, transposed, dtype)
