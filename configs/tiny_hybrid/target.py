"""The embedded hybrid: 1.4 M parameters of Qwen3.5's form, three layers in four recurrent, on the corpus and tokenizer of `tiny`.

  python -m experiments.train_target --config=configs/tiny_hybrid/target.py --workdir=runs/tiny_hybrid_target

One CPU core, 15 minutes. Held-out loss per domain beside a unigram and a bigram model is in the run's report.
"""

import ml_collections

from configs.tiny import target


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = target.get_config(variant)
  c.name = "tiny_hybrid"
  c.tokenizer = "tiny"
  c.model = ml_collections.ConfigDict(dict(
      width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384, rotary_base=10_000.0, rotary_share=0.25, attention_every=4,
      delta=dict(key_heads=4, value_heads=4, key_dim=32, value_dim=32)))
  c.batch = 8
  c.learning_rate = 4e-3
  c.max_steps = 700
  if variant == "smoke":
    c.model.update(width=32, layers=4, mlp=64, heads=2, kv_heads=1, head_dim=16)
    c.model.delta.update(key_heads=1, value_heads=2, key_dim=8, value_dim=8)
    c.batch = 2
    c.max_steps = 4
  return c
