"""Reads a token from a file, which may be replaced during the client's lifetime."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import invalid_argument


class TokenFile:
    """A token in a file. The file is checked at each call and read again if it has changed.

    Args:
        path: the file; whitespace around the token is ignored.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._last: tuple[tuple[int, int, int], str] | None = None

    def read(self) -> str:
        """Returns the current token.

        Raises:
            InvalidArgumentError: the file cannot be read, or contains no token.
        """
        try:
            found = self._path.stat()
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
            if self._last is not None and self._last[0] == version:
                return self._last[1]
            token = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise invalid_argument("token_file", f"{self._path} cannot be read: {error}") from None
        if not token or not (token.isascii() and token.isprintable()):
            raise invalid_argument(
                "token_file", f"{self._path} has no token of printable ASCII characters"
            )
        self._last = (version, token)
        return token
