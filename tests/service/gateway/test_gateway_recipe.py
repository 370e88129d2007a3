"""The recipe of docs/gateway.md: two servers, smg, and OpenAI's client. Skipped where `smg` and
`openai` are not installed (37 MB and 20 packages, so they are no development dependencies).
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.service.readme import ROOT, code_blocks, shell_commands
from tests.service.real_server import BIN, WAIT_S, clean_environment, real_server

RECIPE = ROOT / "docs" / "gateway.md"

pytest.importorskip("smg_grpc_proto", reason="the extra `gateway` is not installed")
pytest.importorskip("openai", reason="openai is not installed")
if not (BIN / "smg").exists():
    pytest.skip("smg is not installed", allow_module_level=True)


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Ask as the recipe's curl does."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        assert process.poll() is None, "smg ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"smg is not ready after {WAIT_S} s")


def test_the_recipe(tmp_path: Path) -> None:
    [program] = code_blocks("python", RECIPE)
    [command] = shell_commands("smg launch", RECIPE)
    assert len(shell_commands("headrace-server serve --gateway --listen", RECIPE)) == 2
    port = free_port()
    with (
        real_server("--gateway", "--listen", "127.0.0.1:0") as one,
        real_server("--gateway", "--listen", "127.0.0.1:0") as two,
    ):
        for server in (one, two):
            server.wait_until_ready()
        command = command.removesuffix(" &").replace("30000", str(port))
        for told, server in (("127.0.0.1:50051", one), ("127.0.0.1:50052", two)):
            assert told in command
            command = command.replace(told, server.addresses[0])
        arguments = [*shlex.split(command), "--prometheus-port", str(free_port())]
        smg = subprocess.Popen(
            [str(BIN / arguments[0]), *arguments[1:]],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/readiness", smg)
            done = subprocess.run(
                [sys.executable, "-c", program.replace("30000", str(port))],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        finally:
            smg.kill()
            smg.wait()
    assert done.returncode == 0, done.stderr
    said, called = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert len(said.split()) > 3
    assert called.startswith("get_weather{")
    assert json.loads(called.removeprefix("get_weather"))["town"] in ("Ulm", "Bonn")
