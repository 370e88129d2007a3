"""Mistakes at the start, through the real command: each message says what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
_COMMAND = [sys.executable, "-c", "from service.cli import main; main()"]


def _start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of a command that does not start."""
    found = subprocess.run(
        [*_COMMAND, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    return found


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, folder)
    return folder


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _cut_off(folder: Path) -> Path:
    file = _copy(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def _quantized(folder: Path) -> Path:
    config = json.loads((_copy(folder) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_empty, "is not a model's directory: it has no config.json; give the directory with"),
        (_cut_off, "it was not copied to its end; download it again"),
        (_quantized, "the weights are quantized already (gptq"),
    ],
)
def test_a_directory_that_cannot_be_served(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    model = make(tmp_path / "model")
    found = _start("serve", "--model", str(model), "--listen", f"unix:{tmp_path}/s")
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace-server: the model cannot be served: ")
    assert words in last


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
