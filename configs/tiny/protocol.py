"""The whole evaluation of a serving set-up, for the embedded target with DSpark's drafter.

  python -m experiments.protocol --config=configs/tiny/protocol.py --workdir=runs/tiny_protocol
  python -m experiments.protocol --config=configs/tiny/protocol.py:soak --workdir=runs/tiny_soak    (30 minutes; --config.soak_seconds=…)

2 CPU cores, an hour. The second seed's protocol (sections 4 to 7). Figures: docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target, c.drafter = "tiny", "tiny/dspark"
  c.schedule = "asynchronous"
  c.tasks = ("extraction", "summary", "dialogue", "code", "writing")  # shipped prompts; or {task: a {"turns": […]} JSONL}
  c.prompts_per_task = 8
  c.new_tokens = ml_collections.ConfigDict(dict(short=16, medium=64, long=256))
  c.concurrencies = (1, 4, 8, 16)
  c.max_length = 448
  c.rows_per_slot = (1.5, 2, 3, 4, 6)
  c.context = 120
  c.profile_repeats = 10
  c.repeats = 3  # runs of each engine, in turn; the median counts
  c.device_cost = 1.0  # of a device-second, in any unit
  c.soak_seconds = 120.0
  c.fault_every = 200  # launches of programs between two injected failures of the device
  c.seed = 0
  if variant == "soak":
    c.concurrencies, c.soak_seconds, c.prompts_per_task, c.repeats = (16,), 1800.0, 4, 1
  if variant == "smoke":
    c.tasks, c.prompts_per_task, c.concurrencies, c.soak_seconds, c.fault_every = ("code",), 2, (2,), 3.0, 30
    c.new_tokens = ml_collections.ConfigDict(dict(short=4, long=12))
    c.rows_per_slot, c.profile_repeats, c.repeats, c.max_length = (3,), 2, 1, 256
  return c
