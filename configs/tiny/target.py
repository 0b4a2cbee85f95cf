"""The embedded target: 3 M parameters, three domains.

  python -m experiments.train_target --config=configs/tiny/target.py --workdir=runs/tiny_target

2 CPU cores, an hour. Held-out loss per domain beside a unigram and a bigram model is in the run's report; figures: README.
"""

import ml_collections


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.vocab = 2048
  c.model = ml_collections.ConfigDict(dict(width=160, layers=8, heads=4, kv_heads=2, head_dim=40, mlp=416, rotary_base=10_000.0))
  c.max_positions = 1024
  c.problems = 13_000  # generated maths problems
  c.documents = 0  # at most so many a domain, 0 for all
  c.passes = ml_collections.ConfigDict(dict(maths=1, code=1, chat=2))  # over the training documents of each domain
  c.document_length = 256  # longer documents are left out and counted
  c.row_length = 256
  c.batch = 12  # rows a step
  c.learning_rate = 2.5e-3
  c.prompt_weight = 0.2  # of the loss on question tokens; answers count 1
  c.weight_decay = 0.05
  c.max_steps = 1800  # at most; the passes may give fewer
  c.prompts = 120  # shipped evaluation prompts a domain
  if variant == "smoke":
    c.model.update(width=32, layers=2, mlp=64, heads=2, kv_heads=1, head_dim=16)
    c.problems, c.documents, c.max_steps, c.prompts, c.batch = 200, 300, 4, 4, 2
  return c
