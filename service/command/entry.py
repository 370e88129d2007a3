"""The entry of the command `headrace-server`: what must be settled before the imports of
`service.command.cli`, which take up to seconds on a cold machine.

1. A signal in the first seconds of `serve` ends it as one that comes while the model loads does,
   with code 0; SIGHUP has nothing to read again yet. `service.command.process` sets its own
   handlers later.
2. Process 1 of a container has two duties, which the server is not made for: the kernel drops
   signals that process 1 has no handler for, and gives it every orphan to reap. So as process 1
   this passes signals on to the server, its only child, reaps all others, and ends as the server
   ends. Under another init (`docker run --init`) this is not process 1, and does nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SI_KERNEL = 0x80
"""The `si_code` of a terminal's signals, which all processes of the terminal's group get."""


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        signal.signal(signal.SIGHUP, _ignore)
    if os.getpid() == 1:
        _be_init()

    from service.command.cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler and not SIG_IGN, which the engine's process would inherit."""


def _be_init() -> None:
    """Fork. The child returns from here; process 1 stays as its init and ends with its exit code,
    128 + the signal's number if a signal has ended it.
    """
    waited_for = {*_PASSED_ON, signal.SIGCHLD}
    # Blocked signals wait for `sigwaitinfo`: none is lost, as of here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        told = signal.sigwaitinfo(waited_for)
        if told.si_signo == signal.SIGCHLD:
            _reap(server)
        elif told.si_code != _SI_KERNEL:
            os.kill(server, told.si_signo)


def _reap(server: int) -> None:
    """Reap all children that have ended, and end with the server."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # the server is there, until it is returned
        if pid == 0:
            return
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
