"""What all measurements share; and the example of docs/extending.md, run as it stands there."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.markdown import Aim, aims, span, table
from benchmarks.measures import compared, ratio_span
from benchmarks.processes import ROOT, SystemFailure
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, in_turns, option, paired
from benchmarks.rig.serving import process, scripted

PAGE = (ROOT / "docs" / "extending.md").read_text()


def example(folder: Path) -> ModuleType:
    """The module of the page."""
    section = PAGE.partition("\n## A measurement\n")[2]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    path = folder / "first_tokens.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("first_tokens", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_record_takes_no_device_s_place() -> None:
    """Not even by root, as which /dev/null could be replaced."""
    with pytest.raises(SystemFailure, match="/dev/null is there and is no file"):
        Record(Path("/dev/null"), "a device", {})


def test_the_example_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found" / "first_tokens.json"
    example(tmp_path).MEASUREMENT.run(["--quick", "--output", str(output)])
    record = json.loads(output.read_text())
    assert (record["format"], record["kind"]) == (1, "first_tokens")
    assert record["options"] == {"model": "demo", "turns": 1}
    assert {"date", "commit", "machine", "load_average", "versions"} < record.keys()
    assert set(record["requests"]) == {"1", "8", "32"}
    said = capsys.readouterr().out
    assert "| requests at once | aim | p99 ms, of the worst turn |" in said
    assert f"written to {output}" in said


def measurement(*rows: str, quick: int = 1) -> Measurement:
    def measure(options: argparse.Namespace, record: Record) -> None:
        for row in rows:
            record.put(options.count, "rows", row)

    return Measurement(
        name="it",
        measure=measure,
        options=(option("count", 3, "so many"), option("names", ["a"], nargs="+")),
        quick={"count": quick},
        resumes=("count",),
    )


@pytest.mark.parametrize(
    ("words", "count", "names"),
    [
        ([], 3, ["a"]),
        (["--count", "5", "--names", "b", "c"], 5, ["b", "c"]),
        (["--quick"], 1, ["a"]),
    ],
)
def test_options(words: Sequence[str], count: int, names: list[str]) -> None:
    found = measurement().parse(words)
    assert (found.count, found.names, found.output.name) == (count, names, "it.json")


def test_a_record_goes_on_if_it_is_of_the_same(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "it.json")]
    measurement("one").run(words)
    assert measurement("two").run([*words, "--resume"])["rows"] == {"one": 3, "two": 3}
    with pytest.raises(SystemExit, match="of another commit, or of other options"):
        measurement("two").run([*words, "--resume", "--quick"])
    assert measurement("two").run(words)["rows"] == {"two": 3}
    assert not list(tmp_path.glob("*.partial"))


def test_what_fails_is_said(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "raise SystemExit('it is broken')")
    with (
        pytest.raises(SystemFailure, match="did not start:\nit is broken"),
        process(words, tmp_path / "log"),
    ):
        pass


def test_a_server_is_read_while_it_runs() -> None:
    with scripted("together", 1, 10, 0.0) as server:
        assert server.address.startswith("unix:")
        assert server.start_s > 0.0
        assert server.resident_mib() > 10
        assert server.cpu_s() > 0.0
        pid = server.pid
    assert not Path(f"/proc/{pid}").exists()


def test_each_turn_begins_with_another_system() -> None:
    assert list(in_turns("ab", 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_turns_that_count_are_kept_and_saved() -> None:
    ran, saved = [], []

    def run(name: str) -> dict[str, float]:
        ran.append(name)
        return {"number": len(ran)}

    turns = paired("ab", 1, run, lambda found: saved.append(sum(map(len, found.values()))))
    assert ran == ["a", "b", "b", "a"]
    assert turns == {"a": [{"number": 4}], "b": [{"number": 3}]}
    assert saved == [1, 2]


def test_an_aim_that_is_missed_is_told() -> None:
    rows = [
        Aim("rate", 0.97, "0.970", least=0.98),
        Aim("time", 3, "3 s", most=3),
        Aim("size", 7, "7"),
    ]
    assert aims(rows).splitlines()[2:] == [
        "| rate | ≥ 0.98 | **0.970** |", "| time | ≤ 3 | 3 s |", "| size |  | 7 |",
    ]  # fmt: skip
    assert aims([]) == ""


def test_ratios_are_of_the_same_turn_and_do_not_see_what_slows_both() -> None:
    found = compared([{"x": 2.0}, {"x": 30.0}], [{"x": 1.0}, {"x": 10.0}], "x")
    assert found == {"ratios": [2.0, 3.0], "median": 2.5}
    assert ratio_span(found["ratios"], ".1f") == "2.5 (2.0–3.0)"


def test_tables() -> None:
    assert table("a | b", [["1", ""]]) == ["| a | b |", "|---|---|", "| 1 |  |"]
    assert table("a | b", []) == []
    assert span([2.0, 1.0], ".0f") == "1 to 2"
    assert span([1.0, 1.01], ".0f") == "1"
