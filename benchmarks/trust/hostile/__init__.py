"""Part `hostile`: inputs that nobody should send, each beside a witness, on two models.

    part
      ├── server     headrace-server serve, at its defaults, with a file of callers
      ├── witness    benchmarks.witness: a caller who behaves
      └── attacker   benchmarks.hostile.attacker: another caller, or a stranger

The inputs are those of `benchmarks.hostile`; a row is one of them on one model. Of each model the
witness sees a calm time first; then one input after the other is sent for some seconds, and what
the witness saw meanwhile is held against the criterion (`benchmarks.hostile.judging`).
"""
