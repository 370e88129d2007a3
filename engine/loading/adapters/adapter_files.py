"""Reads an adapter's files: once, bounded, and without following anything out of its directory."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.contract.errors import AdapterRefusedError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TEXT = ("chat_template.jinja", "added_tokens.json")
"""What would change a prompt's tokens, if it differs from the base's."""
_MAX_CONFIG = 1 << 20
_MAX_HEAD = 4 << 20
"""The maximum size of the head of a safetensors file, which lists its tensors."""


def read_config(root: Path) -> bytes:
    """Return the bytes of an adapter's config.

    Raises:
        AdapterRefusedError: there is none, or it cannot be read here.
    """
    return _read(root, CONFIG, _MAX_CONFIG, "which is more than any config needs")


def read_tensors(root: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by name.

    Raises:
        AdapterRefusedError: the file is missing, too large or damaged.
    """
    why = "which is more than is free of max_adapter_bytes"
    try:
        data = _read(root, WEIGHTS, max_bytes + _MAX_HEAD, why)
    except AdapterRefusedError as error:
        raise error.naming("max_adapter_bytes") from None
    try:
        [length] = struct.unpack_from("<Q", data)
        if length > min(_MAX_HEAD, len(data) - 8):
            raise ValueError(f"its head says that it has {length} bytes")
        return load(data)
    except (struct.error, ValueError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise AdapterRefusedError(
            f"{WEIGHTS} is damaged, or was not copied to its end ({str(error)[:120]})"
        ) from error


def check_text(root: Path, base: Path) -> None:
    """Check that an adapter's prompts are written as its base's are.

    Raises:
        AdapterRefusedError: it has a chat template or tokens of its own.
    """
    for name in _TEXT:
        if (root / name).exists():
            most, file = _MAX_CONFIG, base / name
            own = _read(root, name, most, "which is more than any has")
            if not file.is_file() or file.stat().st_size > most or file.read_bytes() != own:
                raise AdapterRefusedError(
                    f"{name} is not the base's, which would be used: remove it if the adapter was "
                    "made with the base's"
                )


def _read(root: Path, name: str, most: int, why: str) -> bytes:
    path = root / name
    try:
        if not path.resolve(strict=True).is_relative_to(_home(root)):
            raise AdapterRefusedError(
                f"{name} is a link that leaves the adapter's directory: put the file itself there"
            )
        # A pipe would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise AdapterRefusedError(f"{name} is not a file")
            if found.st_size > most:
                raise AdapterRefusedError(f"{name} has {found.st_size:,} bytes, {why}")
            data = file.read(most + 1)
    except (OSError, RuntimeError, ValueError) as error:
        only = "; only safetensors are read, because loading others can run code"
        raise AdapterRefusedError(
            f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
            f"{only if name == WEIGHTS else ''}"
        ) from error
    if len(data) != found.st_size:
        raise AdapterRefusedError(f"{name} has changed while it was read; load it again")
    return data


def _home(root: Path) -> Path:
    """Return what files may not leave: the directory, or the repository in a hub's cache, whose
    files are links within it.
    """
    whole = root.resolve(strict=True)
    return whole.parents[1] if whole.parent.name == "snapshots" else whole
