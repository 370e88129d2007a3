"""Controls a witness process from tests and campaigns."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.processes import ROOT
from benchmarks.witness.report import Report, WitnessError

PATIENCE_S = 120.0
"""The time limit for an answer of the witness; after that it counts as stuck. The witness answers
even while the server is stalled.
"""


class Witness:
    """A witness that runs beside whatever is tried.

        with Witness(target, {"front_end": 123, "engine": 124}) as witness:
            ...
            witness.begin()
            ...
            report = witness.report()

    The methods block. If they are called from the thread that runs the server, the server stalls,
    and the report shows that stall.
    """

    def __init__(
        self,
        target: str,
        pids: Mapping[str, int],
        *,
        health_target: str | None = None,
        token_file: Path | None = None,
        tokens: int = 500,
        prompt: str | None = None,
    ) -> None:
        """Store the settings without starting anything.

        Args:
            target: the server's gRPC target, without TLS.
            pids: the processes whose memory is watched, by name.
            health_target: the address for health checks; None for `target`.
            token_file: a file with a bearer token.
            tokens: the number of tokens of each request.
            prompt: the prompt of its requests; None for a few words.
        """
        self._command = [sys.executable, "-m", "benchmarks.witness", target, "--driven"]
        self._command += ["--tokens", str(tokens)]
        self._command += [f"--pid={name}={pid}" for name, pid in pids.items()]
        if health_target is not None:
            self._command += ["--health-target", health_target]
        if token_file is not None:
            self._command += ["--token-file", str(token_file)]
        if prompt is not None:
            self._command += ["--prompt", prompt]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Witness:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process. Returns once the undisturbed runs are over and the witness is
        watching.

        Raises WitnessError.
        """
        process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever uses it to handle
        )
        self._process = process
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Begin a new window and discard what was seen so far."""
        self._ask("begin")

    def report(self) -> Report:
        """Return the report of the current window. Raises WitnessError if the witness has ended."""
        return Report.from_json(self._ask("report"))

    def close(self) -> None:
        """Stop the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)

    def _ask(self, order: str) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise WitnessError("the witness was not started, or was ended")
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; the answer says how
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise WitnessError(f"the witness gave no answer for {PATIENCE_S:g} s") from None
        if not line:
            self._readers[1].join(PATIENCE_S)  # all that it said
            raise WitnessError("the witness ended: " + "".join(self._errors).strip())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _read_errors(self, lines: IO[str]) -> None:
        with lines:
            self._errors += lines
