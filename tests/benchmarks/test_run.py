"""A run as a whole, with systems that only note their prompts."""

from __future__ import annotations

import argparse
import itertools
import json
import stat
import sys
from pathlib import Path
from typing import Any

from benchmarks.models import DEMO
from benchmarks.processes import ROOT
from benchmarks.records import Record
from benchmarks.run import case_of, compare
from benchmarks.systems import SystemSpec
from benchmarks.workloads import WORKLOADS, parse_load
from engine.models.formats.native import native_library

NOTING = '''
"""A system that repeats its prompts, and notes them in a file of its own."""
import json
from pathlib import Path
from benchmarks.adapters.loop import main


class Noting:
    def load(self, order):
        self.notes = Path(order["cache"]) / order["options"]["notes"]
        return {"settings": {}, "versions": {}}

    def run(self, turn):
        while not turn.is_over:
            for index in turn.due():
                request = turn.requests[index]
                turn.add(index, request["prompt"][: request["max_tokens"]])
                turn.finish(index)
        with self.notes.open("a") as file:
            file.write(json.dumps([request["prompt"] for request in turn.requests]) + "\\n")


main(Noting())
'''


def run(folder: Path, *cases: tuple[str, str], python: str = sys.executable) -> dict[str, Any]:
    """Two systems with one turn that counts. Returns the record."""
    (folder / "noting.py").write_text(NOTING)
    environment = {"PYTHONPATH": f"{folder}:{ROOT}"}
    systems = [
        SystemSpec(name, "noting", options={"notes": name}, environment=environment, python=python)
        for name in ("one", "other")
    ]
    options = argparse.Namespace(
        dtype="float32", threads=1, instructions=None, turns=1, check=0, minutes=None,
        turn_seconds=60.0, cache=folder,
    )  # fmt: skip
    record = Record(None, "run", {"machine": {}})
    chosen = [case_of(WORKLOADS[workload], parse_load(load)) for workload, load in cases]
    compare(options, record, DEMO, chosen, systems)
    return record.data


def noted(path: Path) -> list[list[list[int]]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_case_and_no_turn_repeats_anothers_prompts(tmp_path: Path) -> None:
    run(tmp_path, ("W1", "all"), ("W1", "closed:2"), ("W3", "all"))
    turns = noted(tmp_path / "one")
    assert [len(prompts) for prompts in turns] == [16, 16, 16, 16, 1, 1]
    for prompts, others in itertools.combinations(turns, 2):
        starts = {tuple(prompt[:8]) for prompt in prompts}
        assert not starts & {tuple(prompt[:8]) for prompt in others}
    assert noted(tmp_path / "other") == turns  # the same for every system


def test_a_run_of_peers_alone_measures_the_machine(tmp_path: Path) -> None:
    missing = tmp_path / "without"
    missing.mkdir()
    (missing / "torch.py").write_text("raise ImportError('a peer without torch')")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{missing}:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    record = run(tmp_path, ("W3", "all"), python=str(python))
    assert list(record["systems"]) == ["one", "other"]
    [case] = record["cases"]
    assert [set(rates) for rates in case["machine"]] == [{"bandwidth", "matrix", "load_average"}]
    assert record["machine"]["instructions"] == native_library().isa
