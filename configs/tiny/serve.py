"""The embedded target under load, greedy: alone, MTP-1, fixed lengths, and the asynchronous schedule.

  python -m experiments.serve_load --config=configs/tiny/serve.py --workdir=runs/tiny_serve

2 CPU cores, half an hour. DSpark Figures 7 and 8: 60 to 85 % faster per user than MTP-1 at the same throughput. Ours:
docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.dtype = "float32"  # or bfloat16
  fixed = lambda n: dict(drafter="tiny/dspark", schedule="fixed", draft_length=n)
  c.methods = ml_collections.ConfigDict({  # The last two take their turns one behind the other.
      "MTP-1": dict(drafter="tiny/mtp", schedule="fixed"), "fixed 2": fixed(2), "fixed 4": fixed(4), "fixed 7": fixed(7),
      "asynchronous": dict(drafter="tiny/dspark", schedule="asynchronous"), "target alone": dict(drafter="", schedule="fixed")})
  c.prompts = ml_collections.ConfigDict(dict(maths="tiny", code="tiny", chat="tiny"))
  c.prompts_per_dataset = 100
  c.system = ""
  c.temperature = 0.0
  c.needs = ("greedy",)
  c.max_new_tokens = (32, 64, 128)  # drawn for each request
  c.max_length = 384
  c.concurrencies = (1, 2, 4, 8, 16, 32)
  c.requests_each = 3  # requests of a turn for each one at once
  c.least_requests = 16  # of a turn
  c.warm_up = 3  # turns' worth of requests before the first that counts
  c.open_loops = ("poisson", "bursts")
  c.open_slots = (4, 16)
  c.rates = (8.0, 16.0)  # requests a second
  c.open_requests = 96  # of a turn
  c.burst = 16
  c.rows_per_slot = (1.5, 2.5, 4, 6)  # buckets of a verify call, between one row a slot and all
  c.reaches = (192, 384)  # rows of the cache that attention may read
  c.context = 120  # of the cost tables
  c.profile_repeats = 15
  c.repeats = 15  # turns, forwards and backwards
  c.open_repeats = 1
  c.seed = 0
  if variant == "smoke":
    c.methods = ml_collections.ConfigDict({
        "target alone": dict(drafter="", schedule="fixed"), "asynchronous": dict(drafter="tiny/dspark", schedule="asynchronous")})
    c.prompts_per_dataset, c.max_new_tokens, c.concurrencies, c.requests_each, c.least_requests = 2, (6, 12), (2,), 3, 6
    c.rows_per_slot, c.open_loops, c.open_slots, c.rates, c.profile_repeats, c.repeats = (3,), ("poisson", "bursts"), (2,), (50.0,), 2, 1
    c.open_requests, c.warm_up = 6, 1
  return c
