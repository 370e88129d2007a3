"""Part `hostile`: hostile inputs, each beside a witness, on two models.

    part
      ├── server     headrace-server serve, at its defaults, with a file of callers
      ├── witness    benchmarks.witness: a caller who behaves
      └── attacker   benchmarks.hostile.attacker: another caller, or a stranger

The inputs are those of `benchmarks.hostile`; a row is one input on one model. For each model, the
witness first records a calm period. Each input is then sent for some seconds, and what the witness
saw meanwhile is compared with the criterion (`benchmarks.hostile.judging`).
"""
