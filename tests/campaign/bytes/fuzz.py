"""The process of one target: `python -m tests.campaign.bytes.fuzz TARGET SECONDS SEED FOLDER`.

A finding does not end the process. Findings are written to FOLDER/findings.jsonl, one for each code
location that raised one, and counts of what was tried to FOLDER/stats.json. If the process crashes
in native code or hangs, its exit code shows that, and FOLDER/last holds the input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MOST_BYTES = 4096
SLOW_S = 1.0
"""The CPU time above which a small input counts as slow. It allows for the overhead of Atheris'
instrumentation.
"""
STATS_S = 0.5
POOL = 200
INSTRUMENTED = (
    "service.convert", "service.replies", "service.door.callers_file", "service.errors",
    "engine.text", "engine.structured", "engine.process", "engine.contract.sampling_params",
    "engine.loading.checkpoint", "engine.loading.gguf", "engine.loading.quantised",
    "engine.loading.tensor_heads",
)  # fmt: skip


class Fuzzing:
    """Runs a target's test on inputs and records the results."""

    def __init__(self, target: Any, folder: Path, seed: int, seconds: float) -> None:
        self.target = target
        self.test = target.prepare()
        self.source = random.Random(seed)
        self._folder = folder
        self._last = (folder / "last").open("wb", buffering=0)
        self._places: set[str] = set()
        self._ends = time.monotonic() + seconds
        self._told = 0.0
        self.tried = 0
        self.slowest_s = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._ends

    def give(self, data: bytes) -> None:
        self._last.seek(0)
        self._last.truncate()
        self._last.write(data)
        began = time.process_time()
        try:
            self.test(data)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [one for one in frames if "/tests/campaign/" not in one.filename] or frames
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
            self._note(f"{type(error).__name__} at {where}: {error}"[:400], where, data)
        took = time.process_time() - began
        self.slowest_s = max(self.slowest_s, took)
        if took > SLOW_S:
            self._note(f"{took:.2f} s of CPU time", "slow", data)
        self.tried += 1
        if (now := time.monotonic()) - self._told > STATS_S:
            self._told = now
            self.tell()

    def tell(self) -> None:
        told = {"tried": self.tried, "slowest_s": self.slowest_s}
        (self._folder / "stats.json").write_text(json.dumps(told))

    def _note(self, what: str, where: str, data: bytes) -> None:
        if where in self._places:
            return
        self._places.add(where)
        with (self._folder / "findings.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "input": data.hex()}) + "\n")

    def by_chance(self) -> None:
        """Test random inputs, without coverage guidance."""
        pool = self.target.seeds()
        for data in pool[:]:
            self.give(data)
        while True:  # the seeds may have taken all the time; one more is tried in any case
            data = self.target.mutate(self.source.choice(pool), self.source, MOST_BYTES)
            self.give(data)
            if self.is_over:
                break
            if self.source.random() < 0.05:
                if len(pool) < POOL:
                    pool.append(data)
                else:
                    pool[self.source.randrange(POOL)] = data
        self.tell()
        self._last.close()


def main() -> None:
    """Run the target. Under Atheris, this ends the process."""
    name, seconds, seed, folder = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        atheris = None
    counting = contextlib.nullcontext()
    if atheris is not None:
        counting = atheris.instrument_imports(include=list(INSTRUMENTED))
    with counting:
        targets = importlib.import_module("tests.campaign.bytes.targets").TARGETS
    place = Path(folder)
    fuzzing = Fuzzing(targets[name], place, seed, seconds)
    if atheris is None:
        fuzzing.by_chance()
        return
    corpus = place / "corpus"
    corpus.mkdir()
    for number, data in enumerate(fuzzing.target.seeds()):
        (corpus / str(number)).write_bytes(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        source = random.Random(seed)
        if source.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        return bytes(fuzzing.target.mutate(data, source, most))

    options = [
        f"-max_total_time={round(seconds)}",
        f"-seed={seed}",
        f"-max_len={MOST_BYTES}",
        "-timeout=30",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={place}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], fuzzing.give, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
