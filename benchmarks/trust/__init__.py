"""The promises of docs/promises.md, attacked: `make trust`, or `python -m benchmarks.trust`.

    parts ──run, one after the other──▶ rows (what was tried, how often, the worst, what was wrong)
                                        │  each is written as soon as it is known
                                        ▼
    benchmarks/results/trust-PART.json ──`python -m benchmarks.trust --report`──▶ docs/trust.md

A part runs alone (`--part ends`) and goes on where it was stopped: rows of the same commit, seed
and length are not tried again. `--cut` is the few minutes of it that CI runs. The scripted engine,
the fault proxy and the callers are those of the tests (`tests.service`): what the tests try at
chosen places, this tries everywhere and by chance.
"""
