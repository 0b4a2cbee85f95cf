"""Models from and to disk: published folders and GGUF files in, published folders out."""

from specdec_jax.hub.load import find, load_drafter, load_target, reduced_head, target_tables
from specdec_jax.hub.save import export, save_target

__all__ = ["export", "find", "load_drafter", "load_target", "reduced_head", "save_target", "target_tables"]
