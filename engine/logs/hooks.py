"""Sends to the log what Python would write to stderr.

This includes warnings, exceptions in threads and finalizers, and the output of libraries.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import ExitStack

from engine.logs.lines import LineWriter, Take

logger = logging.getLogger(__name__)


def install(take: Take) -> ExitStack:
    """Redirect all stderr output, until the result is closed.

    Args:
        take: called with each line that is written to sys.stderr. It must neither wait nor raise.
    """
    undo = ExitStack()
    former = sys.stderr, sys.excepthook, sys.unraisablehook, threading.excepthook

    def restore() -> None:
        sys.stderr, sys.excepthook, sys.unraisablehook, threading.excepthook = former

    undo.callback(restore)
    sys.stderr = LineWriter(take)
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    threading.excepthook = _of_thread
    logging.captureWarnings(True)
    undo.callback(logging.captureWarnings, False)
    return undo


def _uncaught(kind: type[BaseException], error: BaseException, _traceback: object) -> None:
    logger.critical("the process ends with an exception", exc_info=error)


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    logger.error("an exception could not be raised in %r", what.object, exc_info=what.exc_value)


def _of_thread(what: threading.ExceptHookArgs) -> None:
    if what.exc_type is not SystemExit:
        name = what.thread.name if what.thread is not None else "?"
        logger.error("the thread %s ends with an exception", name, exc_info=what.exc_value)
