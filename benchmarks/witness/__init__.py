"""A caller who behaves, in a process of its own, and what it saw beside whatever is tried.

    test or campaign ──"begin", "report"──▶ python -m benchmarks.witness ──▶ server
                     ◀─────reports────────   streams greedy tokens, tokenizes, asks health

`Witness` (benchmarks.witness.process) starts it and asks for its reports; `python -m
benchmarks.witness --help` is the same by hand. It needs the `headrace` package alone.
"""
