"""The entry point of the command `headrace-server`: setup that must happen before the imports of
`service.command.cli`, which can take seconds on a cold machine.

1. A signal in the first seconds of `serve` ends it with code 0, like a signal while the model
   loads. SIGHUP has no effect yet. `service.command.process` installs its signal handlers later.
2. Process 1 of a container has two duties that the server does not perform. The kernel drops
   signals that process 1 has no handler for, and makes it the parent of every orphan. So as process
   1, this process forwards signals to the server, its only child, reaps all other children, and
   exits when the server exits. Under another init (`docker run --init`) it is not process 1, and
   does none of this.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SI_KERNEL = 0x80
"""The `si_code` of signals from a terminal, which all processes of the terminal's group receive."""


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
    """Ignore the signal. A handler is used because the engine's process would inherit SIG_IGN."""


def _be_init() -> None:
    """Fork. The child returns from here. Process 1 stays as the init and exits with the child's
    exit code, or 128 + the signal's number if a signal ended the child.
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
    """Reap all children that have ended, and exit if the server has."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # the server is there, until it is returned
        if pid == 0:
            return
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
