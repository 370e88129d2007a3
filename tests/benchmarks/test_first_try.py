"""The parts of a first run, read from what `make run` prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.first_try import PARTS, Run, fresh_environment, parts, running, size
from benchmarks.processes import SystemFailure
from benchmarks.report import render


def printed(*lines: tuple[float, str]) -> Run:
    """A run that printed these lines, and has ended."""
    run = Run.__new__(Run)
    run.lines = list(lines)
    return run


def test_the_parts_add_up_to_the_whole() -> None:
    run = printed(
        (0.1, "==> setting up .venv\n"),
        (7.5, "Resolved 84 packages in 500ms\n"),
        (69.5, "Prepared 84 packages in 1m 02s\n"),
        (70.5, "Installed 84 packages in 1.00s\n"),
        (70.6, "    installed by uv in 65 s\n"),
    )
    found = parts(run, ready=75.5, first_token=0.5)
    assert found == {
        "environment": 7.0,
        "resolve": 0.5,
        "fetch": 62.0,
        "link": 1.0,
        "start": 5.0,
        "first token": 0.5,
    }
    assert tuple(found) == PARTS
    one = {
        "parts_s": found,
        "seconds": 76.0,
        "downloaded_mb": 2742.0,
        "mb_per_s": 44.2,
        "again_ready_s": [3.0, 4.0, 3.5],
        "environment_mb": 4804.0,
    }
    record = {
        "format": 1,
        "kind": "first_try",
        "date": "2026-11-23",
        "commit": "abc",
        "machine": {"cpus": 2, "cpu": "a CPU", "memory_bytes": 2**34},
        "runs": [one, one],
    }
    rows = render(record, "results/first_try.json").splitlines()
    assert "4,804 MiB on disk" in rows[0]
    assert "| fetch | 62.0 | 62.0 |" in rows
    assert "| to the first token | **76.0** | **76.0** |" in rows
    assert "| `make run` again, until ready (median) | 3.5 | 3.5 |" in rows
    assert "| MiB that came | 2,742 (44 a second) | 2,742 (44 a second) |" in rows


@pytest.mark.parametrize(("told", "seconds"), [("809ms", 0.809), ("1m 02s", 62.0), ("4.31s", 4.31)])
def test_how_uv_tells_times(told: str, seconds: float) -> None:
    run = printed(
        (100.0, f"Resolved 1 package in {told}\n"),
        (100.0, "Prepared 1 package in 1ms\n"),
        (100.0, "Installed 1 package in 1ms\n"),
    )
    assert parts(run, 100.0, 0.0)["resolve"] == pytest.approx(seconds)


def test_a_set_up_by_pip_is_not_taken_for_one_by_uv() -> None:
    run = printed((50.0, "    installed by pip in 50 s\n"))
    with pytest.raises(SystemFailure, match="installed by pip"):
        parts(run, 60.0, 1.0)


def test_a_run_that_ends_says_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("run:\n\t@echo no room; exit 3\n")
    with (
        pytest.raises(SystemFailure, match="no room"),
        running(tmp_path, {"PATH": "/usr/bin:/bin"}),
    ):
        pass


def test_a_size_is_of_files_and_not_of_links(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "large" / "inner").mkdir(parents=True)
    (packages / "large" / "inner" / "file").write_bytes(b"x" * 2**21)
    (packages / "large" / "link").symlink_to(packages / "large" / "inner" / "file")
    (packages / "one.py").write_bytes(b"x" * 2**20)
    assert size(tmp_path) == 3 << 20


def test_a_newcomer_has_no_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{own}:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("UV_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    environment = fresh_environment(tmp_path)
    assert environment["PATH"] == "/usr/bin"
    assert environment["HOME"] == str(tmp_path)
    assert environment["PIP_FIND_LINKS"] == "/wheels"
    assert not {"XDG_CACHE_HOME", "UV_CACHE_DIR"} & environment.keys()
