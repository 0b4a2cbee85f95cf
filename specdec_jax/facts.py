"""What stored work was made from: written beside it, compared before it is used again."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
  """What of `wanted` is otherwise in `found`, as "key is …, not …; …"; empty where nothing is. Objects inside are compared
  key by key."""
  found, wanted = _flat(found), _flat(wanted)
  return "; ".join(f"{k} is {found.get(k)}, not {v}" for k, v in wanted.items() if found.get(k) != v)


def claim(path: pathlib.Path, facts: Mapping[str, Any], started: bool) -> None:
  """Writes `facts` (as JSON) to `path`, or compares them with what stands there.

  started: whether there is work that `path` speaks of. Raises ValueError, naming what differs, for work that was made from
  something else, or that nothing is known of.
  """
  if not path.exists() and started:
    raise ValueError(f"{path.parent} holds work of unknown origin: {path.name} is missing. Take another work folder")
  if path.exists() and started:
    wrong = differences(json.loads(path.read_text()), facts)
    if wrong:
      raise ValueError(f"{path.parent} holds other work ({path.name}): {wrong}. Take another work folder")
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh = path.with_name(path.name + ".new")
  fresh.write_text(json.dumps(facts, indent=2) + "\n")
  os.replace(fresh, path)  # Whole or not at all.


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
  out = {}
  for key, value in json.loads(json.dumps(dict(facts))).items():
    out |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
  return out
