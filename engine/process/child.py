"""The process of an engine, started by exec, with one end of a private socket pair and a pipe for
its stderr. Its log lines become log records of this process, and what it wrote before a crash is
kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import engine
from engine.contract.environment import engine_environ
from engine.logs import records
from engine.logs.lines import LineReader, open_pipe

_EXIT_GRACE_S = 5.0
_LAST_WORDS_S = 0.5
"""How long to wait for the end of stderr after the process has ended, because child processes may
still hold it open.
"""
_POLL_S = 0.01

PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(engine.__file__).parents[1])!r}); "
    "from engine.process.worker import main; main()"
)
"""Makes the new process run the same code as this one, whatever the import path."""


class EngineProcess:
    """The process of an engine."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: LineReader | None) -> None:
        """process: the engine's process. stderr: reads its stderr, or None if nobody does."""
        self._process = process
        self._stderr = stderr

    @classmethod
    def spawn(cls, program: str) -> tuple[EngineProcess, socket.socket]:
        """Start a process that runs a program. Also return this side's end of the socket pair.

        This needs no event loop. Call it in the main thread, because the process is killed when the
        calling thread ends.

        program: Python code.
        """
        reading, stderr = open_pipe()
        lines = LineReader(reading, _log)  # ends when the other end is closed everywhere
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",  # nothing is imported from the working directory
                        "-c",
                        program,
                        str(theirs.fileno()),
                        str(os.getpid()),
                    ],
                    env=engine_environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # the front end handles a terminal's Ctrl-C
                )
        finally:
            os.close(stderr)
        return cls(process, lines), ours

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def look(self) -> tuple[float, bool]:
        """Return the CPU seconds that the process has used, and whether it is stopped (as by
        SIGSTOP).

        Return 0 and False if they cannot be read.
        """
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError:
            return 0.0, False
        state, *fields = status.rpartition(")")[2].split()
        user, system = fields[10:12]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), state == "T"

    async def exit_code(self) -> int:
        """Wait for the process to end. This polls, because callers know that the process ends soon:
        its socket is closed.
        """
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Kill the process. Harmless if it has already ended."""
        self._process.kill()

    async def end(self) -> None:
        """Wait for the process to end, and for the last lines of its stderr. Kill it if it does not
        end.

        Its socket must be closed.
        """
        try:
            await asyncio.wait_for(self.exit_code(), _EXIT_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.exit_code()
        if self._stderr is not None:
            await asyncio.to_thread(self._stderr.join, _LAST_WORDS_S)


def _log(line: str) -> None:
    """Log a line that the process wrote. The process has already applied the log level."""
    record = records.decode(line, "engine")
    logging.getLogger(record.name).handle(record)
