"""Reads an adapter's files: once, bounded, and without following anything out of its directory."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.contract.errors import AdapterRefusedError, AdapterRoomError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TEXT = ("chat_template.jinja", "added_tokens.json")
"""What would change a prompt's tokens, if it differs from the base's."""
_MAX_CONFIG = 1 << 20
_MAX_HEAD = 4 << 20
"""The maximum size of the head of a safetensors file, which lists its tensors."""
_MAX_SOURCE = 1024
"""The maximum length of a source, in characters."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter's directory. `home`: what its files may not leave by links."""

    path: Path
    home: Path

    @classmethod
    def at(cls, directory: Path) -> AdapterFolder:
        """Return a directory that the operator gave at start. In a hub's cache, files are links
        within the repository.

        Raises:
            AdapterRefusedError: there is none.
        """
        whole = resolved(directory)
        home = whole.parents[1] if whole.parent.name == "snapshots" else whole
        return cls(directory, home)

    @classmethod
    def below(cls, root: Path, source: str) -> AdapterFolder:
        """Return the directory with a name below a root, which is resolved already.

        Raises:
            AdapterRefusedError: the name leaves the root, or there is no such directory.
        """
        parts = source.split("/")
        if len(source) > _MAX_SOURCE or not source.isprintable() or {"", ".", ".."} & set(parts):
            raise AdapterRefusedError(
                f"source is {source[:80]!r}; it must be the name of a directory below "
                f"adapter_root, of at most {_MAX_SOURCE} characters, without . and .."
            ).naming("adapter_root")
        path = root.joinpath(*parts)
        if not resolved(path).is_relative_to(root):
            raise AdapterRefusedError("source is a link that leaves adapter_root").naming(
                "adapter_root"
            )
        return cls(path, root)

    def read(self, name: str, most: int, too_large: Callable[[int], AdapterRefusedError]) -> bytes:
        """Return a file's bytes. `too_large` makes the error for a file of more than `most` bytes.

        Raises:
            AdapterRefusedError: it cannot be read here.
        """
        path = self.path / name
        try:
            self._check(path.resolve(strict=True), name)
            # A pipe would be waited for.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(handle, "rb") as file:
                # A link may be another by now: what counts is what was opened.
                self._check(Path(os.readlink(f"/proc/self/fd/{handle}")), name)
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise AdapterRefusedError(f"{name} is not a file")
                if found.st_size > most:
                    raise too_large(found.st_size)
                data = file.read(most + 1)
                after = os.fstat(handle)
        except (OSError, RuntimeError, ValueError) as error:
            only = "; only safetensors are read, because loading others can run code"
            raise AdapterRefusedError(
                f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
                f"{only if name == WEIGHTS else ''}"
            ) from error
        if len(data) != found.st_size or after.st_mtime_ns != found.st_mtime_ns:
            raise AdapterRefusedError(f"{name} has changed while it was read; load it again")
        return data

    def _check(self, place: Path, name: str) -> None:
        if not place.is_relative_to(self.home):
            raise AdapterRefusedError(
                f"{name} is a link that leaves the adapter's directory: put the file itself there"
            )


def read_config(folder: AdapterFolder) -> bytes:
    """Return the bytes of an adapter's config.

    Raises:
        AdapterRefusedError: there is none, or it cannot be read here.
    """
    return folder.read(CONFIG, _MAX_CONFIG, _larger(CONFIG, "any config needs"))


def read_tensors(folder: AdapterFolder, max_bytes: int) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by name.

    Raises:
        AdapterRoomError: the file is larger than `max_bytes`, and its head.
        AdapterRefusedError: the file is missing or damaged.
    """
    data = folder.read(WEIGHTS, max_bytes + _MAX_HEAD, lambda size: no_room(size, max_bytes))
    try:
        [length] = struct.unpack_from("<Q", data)
        if length > min(_MAX_HEAD, len(data) - 8):
            raise ValueError(f"its head says that it has {length} bytes")
        return load(data)
    except (struct.error, ValueError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise AdapterRefusedError(
            f"{WEIGHTS} is damaged, or was not copied to its end ({str(error)[:120]})"
        ) from error


def no_room(size: int, max_bytes: int) -> AdapterRefusedError:
    """Return the error for an adapter of more bytes than are free."""
    free = max(0, max_bytes)
    return AdapterRoomError(
        f"it takes {size:,} bytes, and {free:,} are free of max_adapter_bytes: raise it, or load "
        "fewer adapters",
        size - free,
    ).naming("max_adapter_bytes")


def check_text(folder: AdapterFolder, base: Path) -> None:
    """Check that an adapter's prompts are written as its base's are.

    Raises:
        AdapterRefusedError: it has a chat template or tokens of its own.
    """
    for name in _TEXT:
        if (folder.path / name).exists():
            most, file = _MAX_CONFIG, base / name
            own = folder.read(name, most, _larger(name, "any has"))
            if not file.is_file() or file.stat().st_size > most or file.read_bytes() != own:
                raise AdapterRefusedError(
                    f"{name} is not the base's, which would be used: remove it if the adapter was "
                    "made with the base's"
                )


def _larger(name: str, than: str) -> Callable[[int], AdapterRefusedError]:
    return lambda size: AdapterRefusedError(f"{name} has {size:,} bytes, which is more than {than}")


def resolved(directory: Path) -> Path:
    """Return a directory's path without links.

    Raises:
        AdapterRefusedError: there is no such directory.
    """
    try:
        if directory.is_dir():
            return directory.resolve(strict=True)
    except (OSError, RuntimeError):  # such as a name that is too long, or links in a circle
        pass
    raise AdapterRefusedError("there is no such directory")
