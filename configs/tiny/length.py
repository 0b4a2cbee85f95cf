"""Drafters of 4, 8, 12 and 16 drafts a round, with a Markov and with an RNN head, for the embedded target (DSpark Figure 4): the
trainings; configs/tiny/length_compare.py evaluates them.

  python -m experiments.train_drafter --config=configs/tiny/length.py:markov_4 --workdir=runs/tiny_length_markov_4
  python -m experiments.train_drafter --config=configs/tiny/length.py:markov_8 --workdir=runs/tiny_length_markov_8
  python -m experiments.train_drafter --config=configs/tiny/length.py:markov_12 --workdir=runs/tiny_length_markov_12
  python -m experiments.train_drafter --config=configs/tiny/length.py:markov_16 --workdir=runs/tiny_length_markov_16
  python -m experiments.train_drafter --config=configs/tiny/length.py:rnn_4 --workdir=runs/tiny_length_rnn_4
  python -m experiments.train_drafter --config=configs/tiny/length.py:rnn_8 --workdir=runs/tiny_length_rnn_8
  python -m experiments.train_drafter --config=configs/tiny/length.py:rnn_12 --workdir=runs/tiny_length_rnn_12
  python -m experiments.train_drafter --config=configs/tiny/length.py:rnn_16 --workdir=runs/tiny_length_rnn_16

One CPU core, 10 to 40 minutes each. Share the responses: --config.responses=FILE. Steps, data and optimizer are those of
configs/tiny/dspark.py. Ours: not measured.
"""

import ml_collections

from configs.tiny import dspark


def get_config(variant: str = "markov_8") -> ml_collections.ConfigDict:
  smoke = variant == "smoke"
  head, _, drafts = "rnn_4".partition("_") if smoke else variant.partition("_")
  c = dspark.get_config("smoke" if smoke else "full")
  c.name = f"{head}_{drafts}"
  c.drafter.head, c.drafter.block = head, int(drafts)
  return c
