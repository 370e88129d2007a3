"""A well-behaved caller in a separate process that reports what it sees while something is tried.

    test or campaign ──"begin", "report"──▶ python -m tests.campaign.witness ──▶ server
                     ◀─────reports────────   streams greedy tokens, tokenizes, asks health

`Witness` starts it and asks for its reports. To run it by hand, see
`python -m tests.campaign.witness --help`. It needs only the `headrace` package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from benchmarks.processes import System, SystemFailure
from tests.campaign.witness.report import Report, WitnessError

PATIENCE_S = 120.0
"""The time limit for an answer of the witness; after that it counts as stuck. The witness answers
even while the server is stalled.
"""
END_S = 10.0


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
        self._words = [target, "--driven", "--tokens", str(tokens)]
        self._words += [f"--pid={name}={pid}" for name, pid in pids.items()]
        if health_target is not None:
            self._words += ["--health-target", health_target]
        if token_file is not None:
            self._words += ["--token-file", str(token_file)]
        if prompt is not None:
            self._words += ["--prompt", prompt]
        self._stack = contextlib.ExitStack()
        self._system: System | None = None

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
        folder = self._stack.enter_context(TemporaryDirectory(prefix="headrace-witness-"))
        self._system = System(
            "the witness", "tests.campaign.witness", sys.executable, Path(folder) / "log", {},
            words=self._words,
        )  # fmt: skip
        self._stack.callback(self._system.end, END_S)
        try:
            self._ask("load", "ready")
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Begin a new window and discard what was seen so far."""
        self._ask("begin", "began")

    def report(self) -> Report:
        """Return the report of the current window. Raises WitnessError if the witness has ended."""
        return Report.from_json(self._ask("report", "report"))

    def close(self) -> None:
        """Stop the process."""
        self._system = None
        self._stack.close()

    def _ask(self, order: str, wanted: str) -> Any:
        if self._system is None:
            raise WitnessError("the witness was not started, or was ended")
        try:
            return self._system.ask({order: {}}, wanted, PATIENCE_S)
        except SystemFailure as failure:
            raise WitnessError(str(failure)) from None
