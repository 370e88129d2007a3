"""Inputs that nobody should send, each beside a witness: what a neighbour feels of them.

    campaign (python -m benchmarks.hostile)
      ├── server     headrace-server serve, at its defaults, with a file of callers
      ├── witness    benchmarks.witness: a caller who behaves
      └── attacker   one process for each input, of another caller's identity or of none

Of each server the witness sees a calm minute first; then one input after the other is tried for
some seconds. What the witness saw meanwhile is held against the criterion (`judging`) and written
to a record, one file for each model.
"""
