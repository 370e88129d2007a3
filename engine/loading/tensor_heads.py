"""Reads the headers of safetensors files: what tensors there are, without their elements.

A safetensors file consists of the length of its header (8 bytes), the header (JSON with the type,
shape and offset of each tensor), and the tensors. An incompletely copied file is therefore detected
by its length.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from engine.contract.errors import ModelRefusedError

_MAX_HEAD = 100 << 20
"""The maximum header size. safetensors itself refuses longer ones."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A tensor in a safetensors file.

    Attributes:
        file: the file.
        dtype: its type, as safetensors names it, such as "BF16".
        shape: its shape.
        nbytes: its size in bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_heads(file: Path) -> dict[str, TensorHead]:
    """Return the tensors of a file by name, in the order of the header.

    Raises:
        ModelRefusedError: this is not a complete safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as content:
            [length] = struct.unpack("<Q", content.read(8))
            if length > min(_MAX_HEAD, size - 8):
                raise ValueError(f"its head says that it has {length} bytes")
            head = json.loads(content.read(length))
        entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
        end = 8 + length + max((one["data_offsets"][1] for one in entries.values()), default=0)
        heads = {
            name: TensorHead(
                file,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
        is_short = size < end
    except (
        *(OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError),
        *(RecursionError, OverflowError),
    ) as error:
        raise ModelRefusedError(
            f"{file}: this is not a whole safetensors file ({error}): it is damaged, or was not "
            "copied to its end; download it again"
        ) from error
    if is_short:
        raise ModelRefusedError(
            f"{file}: the file ends after {size:,} of {end:,} bytes: it was not copied to its end; "
            "download it again"
        )
    return heads
