"""`python -m benchmarks gpu`: systems are processes here too, but compute nothing; the slow test at
the end runs the real ones on a CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapters.loop import Turn
from benchmarks.gpu import checking, command, parts
from benchmarks.gpu.record import Part, record_name
from benchmarks.gpu.sizes import GPU_SIZES, SMOKE_BATCHES, smoke_sizes
from benchmarks.gpu.tables import NO_GPU, render_part
from benchmarks.processes import ROOT
from benchmarks.records import FORMAT, Record, read_record
from benchmarks.report import render
from benchmarks.rig import bench
from benchmarks.systems import SystemSpec
from tests.gpu import checks

FAKES = '''
import os, sys, time
from benchmarks.adapters.loop import main

STEP = 0.002


class Machine:
    def load(self, order):
        return {"settings": {"name": "a CPU", "type": "cpu"}, "versions": {"torch": "2.11.0"}}

    def run(self, turn):
        return {"bandwidth": 1e9, "matrix": 1e9}


class Checks:
    def load(self, order):
        return {}

    def run(self, turn):
        state = os.environ.get("CHECK_STATE", "passed")
        key = "greedy tokens equal model.generate's: qwen3"
        return [{"key": key, "state": state, "detail": "5 prompts"}]


class Engine:
    """A token for each request with every step; tokens are the prompt's last."""

    def load(self, order):
        if order["options"].get("fails"):
            raise RuntimeError("out of memory")
        self.slow = order["options"].get("slow", 1)
        self.dies = order["options"].get("dies")
        return {"settings": order["options"], "versions": {}}

    def run(self, turn):
        live = turn.due()
        longest = max(turn.requests[index]["max_tokens"] for index in live)
        if self.dies and longest > 4:
            sys.exit(3)
        time.sleep(STEP)  # the prompts
        for step in range(longest):
            time.sleep(STEP * self.slow)
            for index in live:
                if step < turn.requests[index]["max_tokens"]:
                    turn.add(index, [turn.requests[index]["prompt"][-1]])
        for index in live:
            turn.finish(index)


class Judge:
    def load(self, order):
        return {}

    def run(self, turn):
        found = {"best": 12, "near": 12, "distinct": 1, "worst_gap": 0.5}
        return [{**found, "tokens": len(one["tokens"])} for one in turn.requests]


name = sys.argv[0].split("fake_")[1].removesuffix(".py")
main({"machine": Machine, "checks": Checks, "engine": Engine, "judge": Judge}[name]())
'''


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("machine", "checks", "engine", "judge"):
        (tmp_path / f"fake_{name}.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(bench, "MACHINE", "fake_machine")
    monkeypatch.setattr(checking, "MODULE", "fake_checks")
    monkeypatch.setattr(bench, "JUDGE", "fake_judge")
    monkeypatch.setattr(parts, "ENGINE", SystemSpec("headrace", "fake_engine"))


def run(folder: Path, *words: str) -> tuple[bool, dict[str, Any], list[str]]:
    """Whether it failed, the record, what it said."""
    said, has_failed = io.StringIO(), False
    with contextlib.redirect_stdout(said):
        try:
            command.MEASUREMENT.run(
                ["--device", "cpu", "--output", str(folder), "--cache", str(folder / "cache"),
                 "--commit", "abc1234", *words]
            )  # fmt: skip
        except SystemExit:
            has_failed = True
    record = read_record(folder / "gpu-command-on-a-cpu.json")
    assert record is not None
    return has_failed, record, said.getvalue().splitlines()


KEYS = [
    *("decode at 1", "decode at 1, sampled", "decode at 4", "decode at 4, sampled"),
    *("prefill", "tokens"),
]


def test_a_part_says_what_was_measured_and_how_far_from_the_floor(tmp_path: Path) -> None:
    has_failed, record, _ = run(tmp_path, "--part", "floors,decode-8b", "--turns", "2")
    assert not has_failed
    assert (record["format"], record["kind"]) == (FORMAT, "gpu")
    assert list(record["parts"]) == ["checks", "floors", "decode-8b"], "checks come unasked"
    assert record["parts"]["checks"]["state"] == "quick"
    part = record["parts"]["decode-8b"]
    assert (part["state"], part["model"], part["commit"]) == ("complete", "qwen3-8b", "abc1234")
    assert part["versions"]["torch"] == "2.11.0"
    rows = {row["key"]: row for row in part["rows"]}
    assert list(rows) == KEYS
    assert rows["decode at 4"]["sampling"] is None
    assert rows["decode at 4, sampled"]["sampling"] == parts.SAMPLED
    four = rows["decode at 4"]
    assert len(four["turns"]) == 2
    assert "partial" not in four
    floor = (2 * 7.567e9 + 4 * four["median"]["context"] * 147456) / 1e9
    floor = max(floor, 2 * 4 * 7.567e9 / 1e9 + 4 * four["median"]["context"] * 147456 / 1e9)
    assert four["floor"]["step_s"] == pytest.approx(floor, rel=1e-3)
    assert four["of_floor"]["decode_rate"] == pytest.approx(
        floor / four["median"]["step_s"], rel=0.05
    )
    assert {"ttft_p99_s", "tpot_s", "itl_p50_s", "itl_p90_s", "itl_p99_s"} <= set(four["median"])
    assert rows["tokens"]["best"] == 1.0
    assert part["left_out"] == ["the GPU's busy share: needs a CUDA device"]


def test_a_check_that_fails_bars_what_needs_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--part", "floors,decode-8b")
    monkeypatch.setenv("CHECK_STATE", "failed")
    has_failed, record, said = run(tmp_path, *words)
    assert has_failed
    states = {name: part["state"] for name, part in record["parts"].items()}
    assert states == {"checks": "failed", "floors": "complete", "decode-8b": "left out"}
    why = f"{parts.GREEDY} has failed: 5 prompts"
    assert f"  not measured: {why}" in said
    assert record["parts"]["decode-8b"]["left_out"] == [f"decode-8b: {why}"]
    monkeypatch.delenv("CHECK_STATE")
    has_failed, record, _ = run(tmp_path, *words)
    assert not has_failed, "once they pass again"
    assert record["parts"]["decode-8b"]["state"] == "complete"
    assert "checks: passed before, of these sources" in run(tmp_path, *words)[2]
    monkeypatch.setenv("CHECK_STATE", "failed")
    assert run(tmp_path, "--part", "floors", "--commit", "other")[0], "of other sources"


def test_what_a_failed_check_bars() -> None:
    kernels = {"key": parts.KERNELS, "detail": "off"}
    other = {"key": "greedy tokens equal model.generate's: gpt_oss", "detail": "x"}
    everything = {"key": checking.ALL, "detail": "the process ended"}
    assert checking.bars(parts.COMPUTING, [other]) is None, "no part measures that family"
    assert checking.bars(parts.COMPUTING, [other, kernels]) == f"{parts.KERNELS} has failed: off"
    assert checking.bars(parts.COMPUTING, [everything]) is not None
    assert checking.bars(frozenset(), [kernels, everything]) is None


def test_the_checks_that_parts_need_are_there() -> None:
    keys = {f"greedy tokens equal model.generate's: {family}" for family in checks.FAMILIES}
    assert keys.union({parts.KERNELS}).issuperset(parts.COMPUTING)
    assert f'"{parts.KERNELS}"' in Path(checks.__file__).read_text()


def test_processes_share_all_checks_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_outcome", lambda name, check: {"key": name})
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    found = []
    for share in range(2):
        one = checks.Checks()
        one.load({"device": "cuda", "threads": 1, "share": share, "count": 2})
        found.append([row["key"] for row in one.run(Turn([]))])
    assert [len(one) for one in found] == [3, 2]
    keys = {f"greedy tokens equal model.generate's: {family}" for family in checks.FAMILIES}
    assert set(found[0] + found[1]) == keys | {parts.KERNELS}


def test_what_the_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton looks for gcc and clang, not for cc, and compiles its launchers with Python.h."""
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", {"cc": "/usr/bin/cc"}.get)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert checking.lacking(["smoke"]) == [
        "triton, a C compiler (gcc, clang or what CC names), Python.h (of a package like "
        "python3-dev): Triton's kernels do not run, and what needs them is barred"
    ]
    assert checking.lacking(["checks", "grpc"])[1:] == [
        "pytest, hypothesis: tests/gpu is not run",
        "grpc, msgspec, llguidance, typer: the part grpc is left out (WHEELS=folder brings them)",
    ]


def test_smoke_is_short_and_says_what_a_step_launches(tmp_path: Path) -> None:
    assert smoke_sizes(GPU_SIZES).batches == SMOKE_BATCHES
    assert smoke_sizes(GPU_SIZES).profiled == SMOKE_BATCHES
    assert parts.MEASURING["smoke"].most_s == 240.0
    _, record, _ = run(tmp_path, "--part", "smoke")
    part = record["parts"]["smoke"]
    assert part["state"] == "complete"
    assert part["sizes"]["turns"] == 1
    busy = {
        "key": "busy at 1",
        "requests": 1,
        "busy_share": 0.75,
        "steps": 10,
        "span_s": 0.05,
        "busy_s": 0.0375,
        "launches": 4200,
        "kernels": [{"name": "paged|decode", "count": 360, "seconds": 0.0072}],
    }
    text = render_part("smoke", {**part, "rows": [*part["rows"], busy]})
    assert (
        "A step at 1: 420 kernels and copies in 5.00 ms; the device is busy for 75.0% of that time."
        in (text)
    )
    assert "| `paged/decode` | 36.0 | 20.0 | 14.4% |" in text


def test_systems_are_compared_in_paired_turns_and_one_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def variant(name: str, **options: object) -> SystemSpec:
        return SystemSpec(name, "fake_engine", options=options)

    monkeypatch.setattr(
        parts,
        "OPTIONS",
        (
            variant("no room", fails=True),
            variant("dies", dies=True),
            variant("slower", slow=4),
            SystemSpec("graphs", "fake_engine", needs_gpu=True),
        ),
    )
    has_failed, record, _ = run(tmp_path, "--part", "options")
    assert not has_failed
    part = record["parts"]["options"]
    [row] = part["rows"]
    assert (row["key"], row["settings"]["slow"]) == ("slower at 2", 4)
    assert row["ratio"]["decode_rate"] > 2.0
    assert row["reference"]["median"]["output_rate"] > 1.5 * row["median"]["output_rate"]
    failed, died, graphs = part["left_out"]
    assert failed.startswith("no room: no room: RuntimeError: out of memory")
    assert died.startswith("dies: dies ended")
    assert graphs == "graphs: needs a CUDA device"


def test_what_is_measured_is_kept_when_time_is_over_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--part", "decode-8b")
    run(tmp_path, "--part", "checks")
    kept = parts.Session.measure

    def once(session: parts.Session, *rest: Any) -> Any:
        found = kept(session, *rest)
        session.bench.time = bench.TimeLimit(0.0, command.LEAST_S)
        return found

    monkeypatch.setattr(parts.Session, "measure", once)
    _, record, said = run(tmp_path, *words)
    part = record["parts"]["decode-8b"]
    assert part["state"] == "out of time"
    assert [row["key"] for row in part["rows"]] == ["decode at 1"]
    assert part["left_out"] == ["decode at 1, sampled: out of time (8 minutes)"]
    assert any("Its time was over" in line for line in said)
    before = part["rows"][0]
    monkeypatch.setattr(parts.Session, "measure", kept)
    _, record, _ = run(tmp_path, *words, "--resume")
    part = record["parts"]["decode-8b"]
    assert part["state"] == "complete"
    assert part["rows"][0] == before, "it was not measured again"
    assert [row["key"] for row in part["rows"]] == KEYS
    assert "decode-8b: complete before" in run(tmp_path, *words, "--resume")[2]
    _, record, _ = run(tmp_path, *words)
    assert record["parts"]["decode-8b"]["rows"][0] != before, "without --resume it is"


def test_the_record_is_saved_with_every_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[str, int, bool]] = []
    save = Record.save

    def watch(record: Record) -> None:
        save(record)
        assert record.path is not None
        part = json.loads(record.path.read_text())["parts"].get("decode-8b", {"rows": []})
        saved.extend(
            (row["key"], len(row.get("turns", [])), "partial" in row) for row in part["rows"][-1:]
        )

    monkeypatch.setattr(Record, "save", watch)
    run(tmp_path, "--part", "decode-8b", "--turns", "2", "--batches", "2")
    assert saved[:3] == [
        ("decode at 2", 1, True),
        ("decode at 2", 2, False),
        ("decode at 2, sampled", 1, True),
    ]


def test_a_dirty_tree_and_other_versions_are_not_taken_up() -> None:
    record = Record(None, "gpu", {"date": "2026-11-29", "parts": {}})

    def part(commit: str | None, torch: str = "2.11.0", model: str = "m") -> Part:
        return Part(record, "floors", {"commit": commit, "versions": torch, "model": model})

    for commit, other, is_current in (
        ("abc", "abc", True),
        ("abc+", "abc+", False),
        (None, None, False),
        ("abc", "def", False),
    ):
        part(commit).begin(resume=False)
        assert part(other).is_current() is is_current
        assert not part(other, model="n").is_current()
    part("abc").begin(resume=False)
    assert not part("abc", torch="2.12.0").is_current()
    device = {"name": "NVIDIA H100 80GB HBM3", "type": "cuda"}
    assert record_name(device) == "gpu-nvidia-h100-80gb-hbm3.json"
    assert record_name({"name": "x", "type": "cpu"}) == "gpu-command-on-a-cpu.json"


def test_a_record_in_the_document(tmp_path: Path) -> None:
    _, record, _ = run(tmp_path, "--part", "floors,decode-8b")
    text = render(record, "benchmarks/results/x.json")
    assert text.startswith(NO_GPU)
    assert "| requests | decode tok/s | of the floor |" in text
    gpu = {
        **record,
        "device": {
            "name": "NVIDIA H200",
            "type": "cuda",
            "capability": "9.0",
            "multiprocessors": 132,
            "driver": "580.1",
            "memory_bytes": 140 << 30,
        },
    }
    text = render(gpu, "benchmarks/results/x.json")
    assert text.startswith(
        "NVIDIA H200 (compute capability 9.0, 132 multiprocessors, driver 580.1, 140 GiB); "
    )
    assert NO_GPU not in text


def test_pytest_is_counted_and_stopped(tmp_path: Path) -> None:
    def write(name: str, text: str) -> str:
        path = tmp_path / f"test_{name}.py"
        path.write_text(text)
        return str(path)

    def outcome(name: str, text: str, seconds: float = 60.0) -> tuple[str, str]:
        row = checking.run_pytest([write(name, text)], tmp_path / "log", seconds)
        return row["state"], row["detail"]

    assert outcome("good", "def test_a(): pass\ndef test_b(): pass\n") == ("passed", "2 passed")
    state, detail = outcome("bad", "def test_a(): pass\ndef test_b(): assert False\n")
    assert state == "failed"
    assert "1 passed, 1 failed: " in detail
    assert detail.endswith("::test_b")
    assert outcome("none", "x = 1\n")[0] == "failed"
    endless = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n"
    state, detail = outcome("late", endless, 2.0)
    assert state == "not finished"
    assert detail.endswith(" in 2 s")


def test_there_is_no_such_device_part_or_size(tmp_path: Path) -> None:
    for words, message in (
        (("--part", "x"), "'x' is no part; there are checks, smoke, smoke-0.6b, floors"),
        (("--batches", "0"), "--batches: each must be at least 1"),
        (("--turns", "0"), "--turns must be at least 1"),
    ):
        refused = subprocess.run(
            [sys.executable, "-m", "benchmarks", "gpu", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 1
        assert message in refused.stderr


BARE = """
import sys

HIDDEN = {"llguidance", "msgspec", "grpc", "google", "opentelemetry", "typer"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import benchmarks.__main__, benchmarks.gpu.command
import benchmarks.adapters.headrace_engine, tests.gpu.checks
"""


def test_a_bare_host_has_all_that_is_needed_without_grpc() -> None:
    subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    """Every measurement once: smoke is decode-8b's, and options that of peers."""
    found = subprocess.run(
        [
            sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--model", "tiny",
            "--part", "checks,floors,decode-8b,compile,peers,grpc,itl",
            "--output", str(tmp_path), "--cache", str(tmp_path / "cache"),
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python/src'}"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    record = read_record(tmp_path / "gpu-command-on-a-cpu.json")
    assert record is not None
    states = {name: part["state"] for name, part in record["parts"].items()}
    assert states == {
        **dict.fromkeys(["checks", "floors", "decode-8b", "peers", "grpc", "itl"], "complete"),
        "compile": "left out",
    }
    for name in ("peers", "grpc"):
        assert all(row["ratio"]["output_rate"] > 0 for row in record["parts"][name]["rows"])
    [peer] = record["parts"]["peers"]["rows"]
    assert peer["system"] == "generate_batch"
