"""A token that is kept in a file, which may be replaced while the client lives."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import invalid_argument


class TokenFile:
    """The token in a file: looked at with each call, read again when it has changed.

    Args:
        path: the file; blanks and line ends around the token do not count.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._last: tuple[tuple[int, int, int], str] | None = None

    def read(self) -> str:
        """The token that is there now.

        Raises:
            InvalidArgumentError: the file cannot be read, or has no token.
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
