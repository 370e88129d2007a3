"""Mistakes at the start, through the real command: each message says what to do."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
_COMMAND = [sys.executable, "-c", "from service.command.cli import main; main()"]


def _start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of a command that does not start."""
    found = subprocess.run(
        [*_COMMAND, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    return found


def test_a_directory_that_cannot_be_served(tmp_path: Path) -> None:
    """One of the reasons; the others are those of the engine's loader."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DEMO / name, model)
    whole = (DEMO / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1000])
    found = _start("serve", "--model", str(model), "--listen", f"unix:{tmp_path}/s")
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace-server: the model cannot be served: ")
    assert "it was not copied to its end; download it again" in last
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "x"), "--model is an option of serve: headrace-server serve --model"),
        (("--model=x",), "--model is an option of serve: headrace-server serve --model"),
        (("serve", "--listen", "unix:/" + "x" * 120), "is not a path of 1 to 107 bytes, as in"),
        (("serve", "--listen", "0.0.0.0:1"), "give --tls-cert and --tls-key, or allow plain text"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], words: str) -> None:
    found = _start(*arguments)
    assert found.returncode == 2
    assert words in found.stderr


def test_addresses_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = _start("serve", "--listen", f"unix:{tmp_path}/file")
    assert found.returncode == 1
    assert "a file of that name is there, and it is not a socket" in found.stderr
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = _start("serve", "--listen", f"127.0.0.1:{port}")
    assert found.returncode == 1
    assert "the port is taken; stop the other program, or choose another" in found.stderr


def test_no_compiler() -> None:
    build = [sys.executable, "-m", "engine.native.build", "--compiler", "no-such-compiler"]
    found = subprocess.run(build, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert found.returncode == 1
    assert "no C++ compiler found (no-such-compiler); install g++" in found.stderr
    found = subprocess.run(
        [*build, "--optional"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert found.returncode == 0
    assert "Headrace runs without them, more slowly." in found.stderr
