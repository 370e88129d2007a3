"""`headrace openai` as a process, before servers that run."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.service.real_server import BIN, ROOT, WAIT_S, clean_environment


@contextmanager
def door_process(*targets: str) -> Iterator[str]:
    """The URL, with /v1, of a door that is ready; ended by SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
    command = [str(BIN / "headrace"), "openai", "--listen", f"127.0.0.1:{port}", "--drain", "1"]
    for target in targets:
        command += ["--target", target]
    with subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert f"ready: http://127.0.0.1:{port}/v1" in line, line
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            said = process.stderr.read()
            assert process.wait(WAIT_S) == 0, said
            assert not said, said
