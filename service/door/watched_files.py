"""Reads files again when they change while the server runs: the callers' file, TLS files.

Users call `current`, or `fresh` on the event loop. Both first compare a few fields of `stat`;
nothing polls. `fresh` reads changed files in a thread. A file of 512 KiB takes half a second, and
only callers that need its new content wait for it. If a changed file cannot be used, this is logged
once and the last good content stays in use. So a mistake in an edited file neither locks callers
out nor lets anybody in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from engine.contract.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp = tuple[tuple[int, ...] | None, ...]
_TRIES = 3


class WatchedFiles(Generic[T]):
    """A value that is loaded from files. Safe to use from several threads."""

    def __init__(
        self,
        what: str,
        paths: tuple[str, ...],
        load: Callable[[], T],
        *,
        private: tuple[str, ...] = (),
    ) -> None:
        """Load the value for the first time.

        Args:
            what: the name for the log, in the plural.
            paths: the files.
            load: reads the files. Raises ConfigError if they cannot be used.
            private: the files that other users of the machine must not read. If their permissions
                allow it, a warning is logged.

        Raises:
            ConfigError: the files cannot be used.
        """
        self._what = what
        self._paths = paths
        self._load = load
        self._private = private
        self._lock = threading.Lock()
        self._reading: asyncio.Future[T] | None = None
        self._is_wanted = False
        self._stamp = self._stamps()
        self._value = self._settled()
        self._warn()

    @property
    def last(self) -> T:
        """The result of the last good reading, without a look at the files."""
        return self._value

    def current(self) -> T:
        """Return the files' current content, or the last good content. It is the same object as
        long as nothing has changed.
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

    async def fresh(self) -> T:
        """Like `current`, but read the files in a thread. If no thread can be started, this is
        logged, and the last good content stays in use until one can.
        """
        if self._reading is None and self._stamps() != self._stamp:
            self.begin_reload()
        if self._reading is not None:
            await asyncio.shield(self._reading)  # others wait for it too
        return self._value

    def reload(self) -> None:
        """Read the files again, even if they look unchanged. The result is logged."""
        with self._lock:
            self._stamp = ()
        self.current()

    def begin_reload(self) -> None:
        """Like `reload`, but in a thread. Call it on the event loop. Files that are being read are
        then read once more, because they may have changed since that reading began.
        """
        if self._reading is not None:
            self._is_wanted = True
            return
        self._stamp = ()  # no thread reads now
        try:
            self._reading = asyncio.get_running_loop().run_in_executor(None, self.current)
        except RuntimeError as error:
            logger.error("%s stay as they were: %s", self._what, error)
        else:
            self._reading.add_done_callback(self._was_read)

    def become(self, other: WatchedFiles[T]) -> None:
        """Use the files and the content of `other` from now on."""
        with self._lock:
            self._paths, self._load, self._private = other._paths, other._load, other._private
            self._stamp, self._value = other._stamp, other._value

    def _was_read(self, _reading: asyncio.Future[T]) -> None:
        self._reading = None
        if self._is_wanted:
            self._is_wanted = False
            self.begin_reload()

    def _settled(self) -> T:
        """Return a consistent state of the files. They are read again if one of them changed
        meanwhile.
        """
        for _ in range(_TRIES):
            before = self._stamp
            value = self._load()
            self._stamp = self._stamps()
            if self._stamp == before:
                return value
        self._stamp = ()  # read again at the next call, even if they do not change
        raise ConfigError(self._what, "change while they are being read")

    def _stamps(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)

    def _warn(self) -> None:
        for path in self._private:
            with suppress(OSError):  # already removed
                if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                    logger.warning("%s can be read or written by every user of this machine", path)


def _stamp(path: str) -> tuple[int, ...] | None:
    """Return a value that changes when a file is written or replaced; None if it is missing."""
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


def read(option: str, path: str, most_bytes: int | None = None) -> bytes:
    """Return a file's content, reading only slightly beyond `most_bytes` if it is longer.

    Raises:
        ConfigError: the file cannot be read, or is longer. The message names the option.
    """
    try:
        with Path(path).open("rb") as file:
            found = file.read() if most_bytes is None else file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read: {error.strerror}") from error
    if most_bytes is not None and len(found) > most_bytes:
        raise ConfigError(option, f"{path} has more than {most_bytes >> 10} KiB")
    return found
