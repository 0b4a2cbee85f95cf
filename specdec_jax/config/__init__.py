"""Frozen descriptions of models and drafters, to and from the published config.json files."""

from specdec_jax.config.drafter import HEADS, DrafterConfig, SerialConfig, drafter_config, spread_taps
from specdec_jax.config.error import ConfigError
from specdec_jax.config.model import FAMILIES, GEMMA, DeltaConfig, FullAttention, ModelConfig, ids, text_config
from specdec_jax.config.rotary import Rotary, rotary_from_published

__all__ = [
    "FAMILIES", "GEMMA", "HEADS", "ConfigError", "DeltaConfig", "DrafterConfig", "FullAttention", "ModelConfig", "Rotary", "SerialConfig",
    "drafter_config", "ids", "rotary_from_published", "spread_taps", "text_config"]
