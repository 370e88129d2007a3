"""A well-behaved caller in a separate process that reports what it sees while something is tried.

    test or campaign ──"begin", "report"──▶ python -m benchmarks.witness ──▶ server
                     ◀─────reports────────   streams greedy tokens, tokenizes, asks health

`Witness` (benchmarks.witness.process) starts it and asks for its reports. To run it by hand, see
`python -m benchmarks.witness --help`. It needs only the `headrace` package.
"""
