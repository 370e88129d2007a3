"""Files that are read again when they change, while the server runs: the callers' file, TLS files.

Whoever needs the content asks for `current`, which compares a few numbers of `stat` first; nothing
polls. What cannot be used is logged once and leaves the last good content in force, so a mistake
in an edited file never shuts anybody out, nor lets anybody in.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp = tuple[tuple[int, ...] | None, ...]
_TRIES = 3


class Watched(Generic[T]):
    """Something that is made of files. Safe to use from several threads."""

    def __init__(
        self,
        what: str,
        paths: tuple[str, ...],
        load: Callable[[], T],
        *,
        private: tuple[str, ...] = (),
    ) -> None:
        """Read it for the first time.

        Args:
            what: the name for the log, in the plural.
            paths: the files.
            load: reads them; raises ConfigError where they cannot be used.
            private: those of the files that other users of the machine have no business with; a
                warning says so where their permissions do not.

        Raises:
            ConfigError: they cannot be used.
        """
        self._what = what
        self._paths = paths
        self._load = load
        self._private = private
        self._lock = threading.Lock()
        self._stamp = self._stamps()
        self._value = self._settled()
        self._warn()

    def current(self) -> T:
        """The files' content now, or the last that could be used: the same object as long as
        nothing changed.
        """
        with self._lock:
            stamp = self._stamps()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._settled()
                except ConfigError as error:
                    logger.error("%s stay as they were: %s", self._what, error)
                else:
                    logger.info("%s were read again from %s", self._what, ", ".join(self._paths))
                    self._warn()
            return self._value

    def reload(self) -> None:
        """Read the files again, whether they look changed or not; the log says what came of it."""
        with self._lock:
            self._stamp = ()
        self.current()

    def _settled(self) -> T:
        """What the files hold at one time: read again if one of them changed meanwhile."""
        for _ in range(_TRIES):
            before = self._stamp
            value = self._load()
            self._stamp = self._stamps()
            if self._stamp == before:
                return value
        self._stamp = ()  # to be read again when somebody asks, whether they change then or not
        raise ConfigError(self._what, "change while they are being read")

    def _stamps(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)

    def _warn(self) -> None:
        for path in self._private:
            with suppress(OSError):  # gone again
                if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                    logger.warning("%s can be read or written by every user of this machine", path)


def _stamp(path: str) -> tuple[int, ...] | None:
    """What differs when a file was written or replaced; None: it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def read(option: str, path: str) -> bytes:
    """A file's content.

    Raises:
        ConfigError: it cannot be read; names the option.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read: {error.strerror}") from error
