"""`headrace-server serve` as a process, with the demo model, for tests of the whole path."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WAIT_S = 60.0
"""No single wait takes longer: what does is stuck."""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what would configure a server or a client."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADRACE_", "OTEL_"))
    }
    return {**kept, **more}


class ServerProcess:
    """A server's process.

    Attributes:
        said: what it wrote to stderr, as far as it was read.
        addresses: where it listens, once it is ready.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.said = ""
        self.addresses: tuple[str, ...] = ()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment(**(environment or {})),
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put("")

    def read_until(self, mark: str) -> str:
        """What it says, up to a line with this mark."""
        while mark not in self.said:
            try:
                line = self._lines.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError(f"no {mark!r} within {WAIT_S} s: {self.said}") from None
            assert line, f"the server ended: {self.said}"
            self.said += line
        return self.said

    def wait_until_ready(self) -> None:
        """Wait for its last line of start-up."""
        self.read_until("Stop it with")
        [line] = [line for line in self.said.splitlines() if line.startswith("Listening on ")]
        self.addresses = tuple(line.removeprefix("Listening on ").rstrip(".").split(", "))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def ended(self, within_s: float = WAIT_S) -> int:
        """Its exit code, once it has ended; `said` is then complete. Raises TimeoutExpired."""
        code = self.process.wait(within_s)
        self._reader.join(WAIT_S)
        while line := self._lines.get(timeout=WAIT_S):
            self.said += line
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        if self.process.stderr is not None:
            self.process.stderr.close()


class RealServer(ServerProcess):
    """A process of `headrace-server serve` on one thread of the CPU."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        command: Sequence[str] = (str(BIN / "headrace-server"),),
    ) -> None:
        """`before`: what stands before the command."""
        device = ("--device", "cpu", "--threads", "1")
        super().__init__([*before, *command, "serve", *device, *arguments], environment)


@contextmanager
def real_server(
    *arguments: str,
    before: Sequence[str] = (),
    command: Sequence[str] = (str(BIN / "headrace-server"),),
    **environment: str,
) -> Iterator[RealServer]:
    """A server's process, killed at the end if it still runs."""
    server = RealServer(*arguments, environment=environment, before=before, command=command)
    try:
        yield server
    finally:
        server.close()


@cache
def demo_server() -> RealServer:
    """A ready server with the demo model, on a free TCP port and a Unix socket; started once and
    ended with this process.
    """
    folder = TemporaryDirectory(prefix="headrace-")
    atexit.register(folder.cleanup)
    server = RealServer("--listen", "127.0.0.1:0", "--listen", f"unix:{folder.name}/s")
    atexit.register(server.close)
    server.wait_until_ready()
    return server
