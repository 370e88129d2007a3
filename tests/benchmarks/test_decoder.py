"""An older checkout beside this one: systems take turns, a record goes on, and its tables."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decoder
from benchmarks.decoder import BASELINE, OURS, render
from benchmarks.decoder_shapes import FAMILIES
from benchmarks.processes import ROOT
from benchmarks.records import Record
from benchmarks.report import render as render_any

FAKE = """
import pathlib
from benchmarks.adapters.loop import Turn, main

HERE = pathlib.Path(__file__).parents[2]

class Fake:
    def load(self, order):
        with (HERE.parent / "said").open("a") as said:
            said.write(f"{HERE.name} loads {pathlib.Path(order['model']).name}\\n")
        return {"settings": {}, "versions": {}}

    def run(self, turn):
        with (HERE.parent / "said").open("a") as said:
            said.write(f"{HERE.name} {len(turn.requests)}\\n")
        if (HERE / "fails").exists():
            raise RuntimeError("no more")
        for index in turn.due():
            count = turn.requests[index]["max_tokens"]
            begin = turn.started
            turn.add(index, range(count), [begin + SECONDS * (k + 1) for k in range(count)])
            turn.finish(index)

main(Fake())
"""
MACHINE = """
from benchmarks.adapters.loop import main

class Machine:
    def load(self, order):
        return {}

    def run(self, turn):
        return {"bandwidth": 4e10, "matrix": 1e12}

main(Machine())
"""


def _checkout(folder: Path, seconds: float) -> Path:
    adapters = folder / "benchmarks" / "adapters"
    adapters.mkdir(parents=True)
    for package in (adapters, adapters.parent):
        (package / "__init__.py").touch()
    shutil.copy(ROOT / "benchmarks" / "adapters" / "loop.py", adapters)
    fake = FAKE.replace("SECONDS", str(seconds))
    (adapters / "headrace_engine.py").write_text(fake)
    (adapters / "machine.py").write_text(MACHINE)
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty",
         "-m", "first"], cwd=folder, check=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two checkouts, ours twice as fast, and the checkpoint of a family."""
    monkeypatch.setattr(decoder, "ROOT", _checkout(tmp_path / "new", 0.25))
    baseline = _checkout(tmp_path / "old", 0.5)
    model = tmp_path / "models" / "decoder-llama"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return argparse.Namespace(
        baseline=baseline, cache=tmp_path, threads=1, minutes=5.0, turns=2,
        output=tmp_path / "decoder.json", family=["llama"],
    )  # fmt: skip


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    about = {"date": "2026-11-23T10:00:00", "commit": "abc"}
    record = Record(arguments.output, "decoder", about)
    decoder.Comparison(arguments, record).measure("families")
    return record.data


def test_systems_take_turns_and_a_record_goes_on(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    record = _measure(arguments)
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [
        "new loads decoder-llama", "old loads decoder-llama",
        "old 1", "new 1", "new 1", "old 1", "old 1", "new 1",
        "old 16", "new 16", "new 16", "old 16", "old 16", "new 16",
    ]  # fmt: skip
    cases = record["cases"]["families"]
    assert cases["llama, 1"]["turns"] == {OURS: [4.0, 4.0], BASELINE: [2.0, 2.0]}
    assert cases["llama, 16"]["turns"] == {OURS: [64.0, 64.0], BASELINE: [32.0, 32.0]}
    assert json.loads(arguments.output.read_text()) == record
    assert _measure(arguments)["cases"] == record["cases"]
    assert (tmp_path / "said").read_text().splitlines() == said
    arguments.turns = 3
    assert len(_measure(arguments)["cases"]["families"]["llama, 1"]["turns"][OURS]) == 3


def test_what_fails_is_told_and_measured_again(arguments: argparse.Namespace) -> None:
    broken = arguments.baseline / "fails"
    broken.touch()
    cases = _measure(arguments)["cases"]["families"]
    assert "no more" in cases["llama, 1"]["failure"]
    assert "turns" not in cases["llama, 16"]
    broken.unlink()
    cases = _measure(arguments)["cases"]["families"]
    assert "failure" not in cases["llama, 1"]


def test_out_of_time_nothing_is_begun(arguments: argparse.Namespace, tmp_path: Path) -> None:
    arguments.minutes = -1.0
    assert not _measure(arguments)["cases"]
    assert not (tmp_path / "said").exists()


def _case(aim: float | None, **turns: list[float]) -> dict[str, Any]:
    return {
        "date": "2026-11-23T10:00:00", "commit": "abc", "baseline": "def", "about": "1B",
        "unit": "tok/s", "aim": aim, "turns": turns,
        "machine": {"bandwidth": 4e10, "matrix": 1e12, "load": 0.5},
    }  # fmt: skip


def test_the_tables() -> None:
    record = {
        "format": 1,
        "kind": "decoder",
        "threads": 2,
        "machine": {"cpus": 2, "cpu": "a CPU", "memory_bytes": 2**34, "system": "Linux"},
        "cases": {
            "families": {
                "gemma2, 1": _case(1.2, ours=[100.0, 130.0], baseline=[100.0, 100.0]),
                "gemma2, 16": _case(1.2, ours=[130.0, 130.0], baseline=[100.0, 100.0]),
                "glm4, 1": {"about": "9B", "failure": "it ended", "date": "2026-11-23",
                            "commit": "abc", "baseline": "def"},
            },
            "ready": {"start": _case(None, ours=[6.0], baseline=[5.0])},
            "float32": {
                "demo W2": _case(2.5, **{"ours": [20.0], "baseline": [19.0],
                                         "generate-batch": [10.0]}),
                "demo W1": {"about": "16", "failure": "it ended", "date": "2026-11-23",
                            "commit": "abc", "baseline": "def"},
            },
        },
    }  # fmt: skip
    text = render(record, "results/decoder.json")
    assert render_any(record, "results/decoder.json") == text
    lines = text.splitlines()
    assert "Commit abc, baseline def." in lines[0]
    assert (
        "| gemma2 | 1B | 115, 100 | **1.15 (1.00–1.30, 2 turns)** | 130, 100 "
        "| 1.30 (1.30–1.30, 2 turns) | 1.2 |" in lines
    )
    assert "| glm4 | 9B | it ended |  |  |  |  |" in lines
    assert "| start, tok/s | 1B | ours: 6, 5 | 1.20 (1.20–1.20, 1 turns) |  |" in lines
    rows = [line for line in lines if line.startswith("| demo W")]
    assert ["**" in row for row in rows] == [True, False, False]  # what failed is told once
    assert rows[1].endswith("| baseline: 19, 10 | 1.90 (1.90–1.90, 1 turns) |  |")


def test_families_are_known_to_transformers() -> None:
    from transformers import AutoConfig

    for part in FAMILIES.values():
        for family in part.values():
            config = AutoConfig.for_model(family.model_type, **family.config())
            assert config.num_hidden_layers == family.sizes[2]
