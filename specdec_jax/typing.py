"""The axis legend of the whole project, and array aliases that use it.

  B  batch rows or request slots     D  model width
  T  query tokens                    F  MLP width
  S  cache (key) positions           V  vocabulary
  L  draft positions of a block      C  candidates of a draft position
  N  query heads, N = K * G          R  low rank
  K  key/value heads                 A  anchors (blocks) of a training sequence
  G  query heads per kv head         M  tapped layers
  H  head dimension                  Y  stacked layers
  n  entries of a table, samples of a statistic

Every einsum and every shape in an annotation uses these letters only.
"""

from typing import Annotated

import jax


class _Alias:
  def __class_getitem__(cls, axes: str):
    return Annotated[jax.Array, cls.__name__, axes]


class Float(_Alias):
  """Float["B T D"]: a floating-point array with these axes."""


class Int(_Alias):
  """Int["B T"]: an int32 array with these axes."""


class Bool(_Alias):
  """Bool["B T"]: a boolean array with these axes."""


class Key(_Alias):
  """Key["B"]: typed random keys (`jax.random.key`) with these axes."""
