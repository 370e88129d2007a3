"""A measured system as the harness sees it: a process that speaks the protocol of `adapters.loop`.

Between its turns it is stopped (SIGSTOP, with its children), so that no activity of a waiting
system, such as OpenMP's spinning or a polling loop, takes time from the running one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.usage import resident

ROOT = Path(__file__).resolve().parent.parent
END_S = 60.0
ORPHAN_S = 3.0
"""How long children may outlive the process that started them."""


class SystemFailure(Exception):
    """A system failed; the message says how, with the end of its log."""


class Program:
    """A process that answers each line of JSON with a line of JSON. Ends with its block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        root: Path = ROOT,
    ) -> None:
        """Start the process in the folder `root`. log: the file for its standard error.
        environment: variables besides those of this process.
        """
        self.name = name
        self._log_path = log
        self._peak_bytes = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C is the harness's to handle
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def park(self) -> None:
        """Suspend its processes until `wake`."""
        self._note_memory()
        for process in reversed(tree(self._process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Resume its processes."""
        for process in tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    @property
    def peak_bytes(self) -> int:
        """Return the peak resident memory of its processes, summed; shared pages count for each
        process.
        """
        self._note_memory()
        return self._peak_bytes

    def end(self, patience_s: float = END_S) -> None:
        """End the process and its children. What has not ended after the given seconds is
        killed.
        """
        self._note_memory()
        self.wake()
        children = tree(self._process.pid)[1:]
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(children, ORPHAN_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # children of one that crashed
        psutil.wait_procs(alive, ORPHAN_S)
        self._reader.join(ORPHAN_S)

    def ask(self, order: Mapping[str, Any], wanted: str, timeout: float) -> Any:
        """Send an order, and return what it answers under this key. Raises SystemFailure."""
        try:
            self._stdin.write(json.dumps(order) + "\n")
            self._stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SystemFailure(f"{self.name} gave no answer for {timeout:.0f} s") from None
        except OSError:
            line = ""
        if not line:
            raise SystemFailure(f"{self.name} ended:\n{self._log_end()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = {"failed": f"its answer is no JSON: {line[:200]!r}"}
        if wanted not in answer:
            raise SystemFailure(
                f"{self.name}: {answer.get('failed')} (log: {self._log_path})\n{self._log_end()}"
            )
        return answer[wanted]

    def _read(self) -> None:
        with self._stdout:
            for line in self._stdout:
                self._lines.put(line)
        self._lines.put("")

    def _log_end(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-8:])

    def _note_memory(self) -> None:
        found = sum(resident(process.pid)[1] for process in tree(self._measured()))
        self._peak_bytes = max(self._peak_bytes, found)

    def _measured(self) -> int:
        """Return the root of the processes whose memory counts."""
        return self.pid


class System(Program):
    """One adapter's process.

    Attributes:
        start_s: the seconds from its start until it accepted requests.
        ready: what it reported about itself: settings, versions.
    """

    def __init__(
        self,
        name: str,
        module: str,
        python: str,
        log: Path,
        environment: Mapping[str, str],
        root: Path = ROOT,
    ) -> None:
        """Start the process; call `load` next. root: the checkout whose adapter is used."""
        self.start_s = 0.0
        self.ready: dict[str, Any] = {}
        self._began = time.perf_counter()
        super().__init__(name, [python, "-m", module], log, environment, root)

    def load(self, order: Mapping[str, Any], timeout: float) -> None:
        """Let it load the model. Raises SystemFailure."""
        self.ready = self.ask({"load": order}, "ready", timeout)
        taken = time.perf_counter() - self._began - self.ready.pop("prepared_s", 0.0)
        self.start_s = self.ready.pop("start_s", taken)

    def run(self, turn: Mapping[str, Any], timeout: float) -> Any:
        """Wake the process, let it run a turn, and park it. Returns its answer. Raises
        SystemFailure.
        """
        self.wake()
        answer = self.ask({"run": turn}, "done", timeout)
        self.park()
        return answer

    def _measured(self) -> int:
        root: int = self.ready.get("pid", self.pid)
        return root


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its children; none once it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
