"""Packs the tokenizer's files in one zip archive, from which a gateway builds the same tokenizer.

The archive depends only on the files' contents, not on their times. Servers of the same model
therefore produce the same archive, whose digest gateways compare.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.delivery.joining import join

CHUNK_BYTES = 64 << 10
"""How many bytes of the archive one message carries."""
_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_SUFFIXES = frozenset({".jinja", ".model", ".tiktoken"})
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive, and the SHA-256 of its bytes in hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Yield the archive's chunks in order. The last one comes with the digest, the others with
        an empty string.
        """
        for start in range(0, len(self.data), CHUNK_BYTES):
            part = self.data[start : start + CHUNK_BYTES]
            yield part, self.sha256 if start + CHUNK_BYTES >= len(self.data) else ""


def make_archive(folder: Path) -> Archive:
    """Pack the tokenizer's files and the model's configuration files from a model's folder. This
    takes about a second per 30 MB.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and (path.name in _NAMES or path.suffix in _SUFFIXES):
                entry = zipfile.ZipInfo(path.name, _NO_TIME)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    data = packed.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


class TokenizerArchive:
    """Packs a folder's files in a thread when the archive is first needed, and caches the
    result.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._packing: asyncio.Task[Archive] | None = None

    async def of(self, folder: Path) -> Archive:
        """Return the archive of a model's folder.

        Raises:
            OSError: a file cannot be read; the next call tries again.
        """
        failed = (
            self._packing is not None
            and self._packing.done()
            and self._packing.exception() is not None
        )
        if self._packing is None or failed or folder != self._folder:
            self._folder = folder
            self._packing = asyncio.create_task(asyncio.to_thread(make_archive, folder))
        return await join(self._packing)  # others wait for it too
