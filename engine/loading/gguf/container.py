"""Reads GGUF files: their metadata, and where their tensors are. The files are mapped, not read.

    magic, version, counts ─▶ metadata: key, type, value ─▶ tensors: name, sizes, type, place

Every length is checked against what is left of the file before anything is allocated for it, and
the number of strings is bounded, so a damaged file costs little time and memory. The layout is that
of the ggml project's specification of the format, versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.errors import ModelRefusedError
from engine.hub.gguf_names import parts_of
from engine.loading.gguf.blocks import BLOCK_TYPES, BlockType, described

Value = bool | int | float | str | Sequence[str] | npt.NDArray[np.generic]
"""A value of the metadata. Arrays of numbers are numpy arrays."""

_MAX_STRING = 1 << 24
"""The maximum size in bytes of a string, such as a chat template."""
_MAX_STRINGS = 1 << 21
_MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 4
_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        file: the file that it is in.
        name: its name there.
        shape: its sizes, the number of outputs first, as in torch.
        kind: how its elements are stored.
        data: uint8 [outputs, bytes of an output], or [bytes] for one dimension, in the mapping.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: BlockType
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Container:
    """A model's GGUF file, or all of its parts.

    Attributes:
        files: the parts, in order.
        metadata: of the first part.
        tensors: by name.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]


class _Damaged(Exception):
    """The file is not as its format demands."""


class _Reader:
    """Takes numbers and strings from the head of a file, one after the other."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content
        self.at = 0
        self._strings = 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self._content) - self.at:
            raise _Damaged(f"{what} takes {size:,} bytes, more than the file has left")
        self.at += size
        return self._content.data[self.at - size : self.at]

    def number(self, form: str, what: str) -> int:
        [value] = struct.unpack(form, self.take(struct.calcsize(form), what))
        return int(value)

    def string(self, what: str) -> str:
        self._strings += 1
        if self._strings > _MAX_STRINGS:
            raise _Damaged(f"it has more than {_MAX_STRINGS:,} strings")
        size = self.number("<Q", what)
        if size > _MAX_STRING:
            raise _Damaged(f"{what} has {size:,} bytes, and at most {_MAX_STRING:,} are read")
        return str(bytes(self.take(size, what)), "utf-8", "replace")

    def value(self, what: str) -> Value:
        kind = self.number("<I", what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            found: bool | int | float = self._numbers(kind, 1, what)[0].item()
            return found
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind == _STRING:
            if count > (len(self._content) - self.at) // 8:
                raise _Damaged(f"{what} has {count:,} strings, more than the file has room for")
            return [self.string(what) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> npt.NDArray[np.generic]:
        if kind >= len(_NUMBERS) or not _NUMBERS[kind]:
            raise _Damaged(f"{what} has values of type {kind}, which are not read here")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


def find_files(path: Path) -> tuple[Path, ...]:
    """Return the GGUF file at a path, or the one in a directory, with all of its parts.

    Raises:
        ModelRefusedError: there are several, or a part is missing.
    """
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    parts = [found[0].with_name(name) for name in parts_of(found[0].name)]
    if path.is_dir() and (others := sorted(set(found) - set(parts))):
        raise ModelRefusedError(
            f"{path} has several models, {found[0].name} and {others[0].name}: give one of the "
            "files"
        )
    if missing := [one for one in parts if not one.is_file()]:
        raise ModelRefusedError(f"{missing[0]} is missing: a model's parts lie in one directory")
    return tuple(parts)


def open_container(path: Path) -> Container:
    """Map the GGUF file at a path, or the one in a directory, with all of its parts.

    Raises:
        ModelRefusedError: it is damaged, incomplete, or of a kind that is not read here.
    """
    files = find_files(path)
    metadata: Mapping[str, Value] = {}
    tensors: dict[str, Tensor] = {}
    for file in files:
        own, found = _read(file)
        metadata = metadata or own
        for tensor in found:
            if tensor.name in tensors:
                raise ModelRefusedError(
                    f"{file}: {tensor.name[:80]!r} is in the model twice: download its parts again"
                )
            tensors[tensor.name] = tensor
    return Container(files, metadata, tensors)


def _read(file: Path) -> tuple[dict[str, Value], list[Tensor]]:
    try:
        # Private, so that torch gets writable memory; nobody writes to it.
        content = np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:
        raise ModelRefusedError(f"{file} cannot be read: {error}") from error
    try:
        reader = _Reader(content)
        if bytes(reader.take(4, "the magic")) != b"GGUF":
            raise _Damaged("it does not begin with GGUF")
        version = reader.number("<I", "the version")
        if version not in (2, 3):
            is_big = version > 0 and version & 0xFFFF == 0
            raise _Damaged(
                "its numbers are big-endian" if is_big else f"version {version} is not read here"
            )
        num_tensors, num_values = (reader.number("<Q", "a count") for _ in range(2))
        if max(num_tensors, num_values) > _MAX_TENSORS:
            raise _Damaged(f"it has {num_tensors:,} tensors and {num_values:,} values")
        metadata = {
            (key := reader.string("a key")): reader.value(f"{key[:80]!r}")
            for _ in range(num_values)
        }
        return metadata, list(_tensors(file, content, reader, num_tensors, metadata))
    except _Damaged as error:
        raise ModelRefusedError(
            f"{file}: {error}: it is damaged, was not copied to its end, or is of another version; "
            "download it again"
        ) from error


def _tensors(
    file: Path,
    content: npt.NDArray[np.uint8],
    reader: _Reader,
    count: int,
    metadata: Mapping[str, Value],
) -> Iterator[Tensor]:
    heads = []
    for _ in range(count):
        name = reader.string("a tensor's name")
        told = f"{name[:80]!r}"
        num_dimensions = reader.number("<I", told)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Damaged(f"{told} has {num_dimensions} dimensions")
        sizes = [reader.number("<Q", told) for _ in range(num_dimensions)]
        number, offset = reader.number("<I", told), reader.number("<Q", told)
        if number not in BLOCK_TYPES:
            raise ModelRefusedError(
                f"{file}: {told} is of type {described(number)}, which is not read here: look "
                f"for a file of {', '.join(kind.name for kind in BLOCK_TYPES.values())}"
            )
        heads.append((name, tuple(reversed(sizes)), BLOCK_TYPES[number], offset))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged("general.alignment is no power of two")
    start = -(-reader.at // alignment) * alignment
    places = []
    for name, shape, kind, offset in heads:
        blocks, rest = divmod(shape[-1], kind.elements)
        size = prod(shape[:-1]) * blocks * kind.bytes
        if rest or not size:
            raise _Damaged(f"{name[:80]!r} of {kind.name} has the sizes {list(shape)}")
        if start + offset + size > len(content) or offset % alignment:
            raise _Damaged(f"{name[:80]!r} ends beyond the file or is not aligned")
        places.append((offset, offset + size))
        data = torch.from_numpy(content[start + offset : start + offset + size])
        rows = data.view(-1, blocks * kind.bytes) if len(shape) > 1 else data
        yield Tensor(file, name, shape, kind, rows)
    if any(end > begin for (_, end), (begin, _) in pairwise(sorted(places))):
        raise _Damaged("two of its tensors overlap")
