"""A campaign that attacks the promises of docs/promises.md: `make trust`, or
`python -m benchmarks.trust`.

    parts ──run, one after the other──▶ rows (what was tried, how often, the worst, what was wrong)
                                        │  each is written as soon as it is known
                                        ▼
    benchmarks/results/trust-PART.json ──`python -m benchmarks.trust --report`──▶ docs/trust.md

A single part can be run (`--part ends`). An interrupted run resumes: rows with the same commit,
seed and length are not tried again. `--cut` selects the few minutes that CI runs. The scripted
engine, the fault proxy and the callers come from the tests (`tests.service`). The tests try
selected cases; the campaign tries every case and random ones.
"""
