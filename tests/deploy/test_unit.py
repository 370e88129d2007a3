"""deploy/headrace.service: systemd takes it, and it says what the server and its page say."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from service.command.config_file import filled
from service.command.flags import Given
from service.config import ServiceConfig
from tests.service.readme import ROOT, code_blocks

UNIT = ROOT / "deploy" / "headrace.service"
PAGE = ROOT / "docs" / "configuration.md"
PROGRAM = "/opt/headrace/bin/headrace-server"
MOST_EXPOSED = 2.0
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of systemd"
)


def settings() -> dict[str, str]:
    """The last value of each setting of the service."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text("utf-8"))
    return dict(parser["Service"])


@needs_systemd
def test_systemd_takes_it(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text("utf-8").replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_it_is_hardened() -> None:
    threshold = f"--threshold={int(MOST_EXPOSED * 10)}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", threshold, str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_it_waits_for_the_drain_and_tells_the_server_alone() -> None:
    found = settings()
    assert int(found["TimeoutStopSec"]) == ServiceConfig().drain_timeout_s + 25
    assert found["KillMode"] == "mixed"
    assert found["Type"] == "notify"
    assert found["ExecStart"].startswith(f"{PROGRAM} serve --config /etc/headrace/")
    assert f"ExecReload={PROGRAM} config --check /etc/headrace/" in UNIT.read_text("utf-8")


def test_the_page_s_file_is_one(tmp_path: Path) -> None:
    [example] = code_blocks("toml", PAGE)
    path = tmp_path / "headrace.toml"
    path.write_text(example)
    names = [key for section in tomllib.loads(example).values() for key in section]
    given = filled(Given(dict.fromkeys(name.replace("-", "_") for name in names)), str(path))
    assert len(given.from_file) == len(names) == 6
