"""What heads, path selector and convolution cost on the embedded target's block backbone (DSpark Figure 4, right; DFlash 2).

  python -m experiments.bench_drafters --config=configs/tiny/overhead.py --workdir=runs/tiny_overhead

2 CPU cores, ten minutes, most of them compilation. The papers, with drafters of five layers on a GPU: 0.2 to 1.3 % of a round for a
sequential head, about 1.3 % for selector and convolution together. Ours: docs/results.md.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.target = "tiny"
  c.dtype = "float32"
  c.mask_token = "<|mask|>"
  c.backbone = ml_collections.ConfigDict(dict(kind="block", layers=2, block=7, taps=(1, 4, 6), own_embedding=False))
  forms = {
      "backbone": {}, "confidence": dict(confidence=True), "Markov head": dict(head="markov", rank=64),
      "gated head": dict(head="gated", rank=64), "RNN head": dict(head="rnn", rank=64), "convolution": dict(conv=2, conv_group=16),
      "path selector": dict(head="selector", rank=64, candidates=16),
      "convolution and selector": dict(conv=2, conv_group=16, head="selector", rank=64, candidates=16)}
  c.forms = ml_collections.ConfigDict(forms)
  c.slots = (1, 16)
  c.context = 200
  c.max_length = 384
  c.need = "plain"
  c.turns = 5
  c.repeats = 20  # rounds of a turn
  if variant == "smoke":
    c.forms = ml_collections.ConfigDict({name: forms[name] for name in ("backbone", "convolution and selector")})
    c.slots, c.turns, c.repeats, c.max_length, c.context = (1,), 1, 2, 64, 16
  return c
