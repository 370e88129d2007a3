"""The head of GGUF files: what is read, and what of damaged files is said, at what cost."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.blocks import BLOCK_TYPES
from engine.loading.gguf.container import Tensor, find_files, open_container
from engine.loading.gguf.naming import Weight

GENERAL = "general.architecture"


def write(file: Path) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_array("some.strings", ["one", "zwei", "drei ä"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_tensor("first.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    blocks = np.arange(18, dtype=np.uint8)[None].repeat(2, 0)
    writer.add_tensor("second.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def head(tensors: int = 0, values: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def tensor(
    name: str, sizes: list[int], kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return (
        string(name)
        + struct.pack(f"<I{len(sizes)}Q", count, *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def test_values_and_tensors(tmp_path: Path) -> None:
    found = open_container(write(tmp_path / "model.gguf"))
    assert found.metadata[GENERAL] == "llama"
    assert (found.metadata["llama.block_count"], found.metadata["a.float"]) == (3, 0.5)
    assert found.metadata["a.bool"] is True
    assert found.metadata["some.strings"] == ["one", "zwei", "drei ä"]
    assert np.array_equal(found.metadata["some.numbers"], [1, -2, 3])
    first, second = found.tensors.values()
    assert (first.shape, second.shape) == ((3, 4), (2, 32))
    assert Weight("x", first).elements().flatten().tolist() == list(range(12))
    assert second.data.tolist() == [list(range(18))] * 2


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_numbers_that_are_not_quantised(name: str) -> None:
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    assert kind.dtype is not None
    numbers = torch.randn(3, 5).to(kind.dtype)
    tensor = Tensor(Path("x"), "x", (3, 5), kind, numbers.view(torch.uint8))
    assert torch.equal(Weight("x", tensor).elements(), numbers)


DAMAGED = {
    "no magic": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "empty": (b"", "cannot be read"),
    "three bytes": (b"GGU", "the magic takes 4 bytes"),
    "version 1": (head(version=1), "version 1 is not read here"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
    "2^60 tensors": (head(tensors=1 << 60), "tensors and"),
    "2^60 values": (head(values=1 << 60), "tensors and"),
    "a string of 2^40": (
        head(values=1, rest=struct.pack("<Q", 1 << 40)), "a key has 1,099,511,627,776 bytes"),
    "a string of 2^25": (
        head(values=1, rest=struct.pack("<Q", 1 << 25)), "at most 16,777,216 are read"),
    "2^60 numbers": (
        head(values=1, rest=string("k") + struct.pack("<IIQ", 9, 4, 1 << 60)),
        "more than the file has left",
    ),
    "2^60 strings": (
        head(values=1, rest=string("k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
        "strings, more than the file has room for",
    ),
    "nested arrays": (
        head(values=1, rest=string("k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 1)),
        "values of type 9",
    ),
    "unknown type of a value": (head(values=1, rest=string("k") + struct.pack("<I", 99)), "99"),
    "a tensor beyond the file": (
        head(1, rest=tensor("t", [4, 4], offset=1 << 40)), "ends beyond the file"),
    "2^60 elements": (head(1, rest=tensor("t", [1 << 60])), "ends beyond the file"),
    "sizes that overflow": (
        head(1, rest=tensor("t", [1 << 62, 1 << 62, 1 << 62])), "ends beyond the file"),
    "no elements": (head(1, rest=tensor("t", [0, 4])), "has the sizes"),
    "no dimensions": (head(1, rest=tensor("t", [])), "has 0 dimensions"),
    "many dimensions": (head(1, rest=tensor("t", [], dimensions=1 << 31)), "dimensions"),
    "a part of a block": (head(1, rest=tensor("t", [33, 2], kind=2)), "has the sizes"),
    "another type": (head(1, rest=tensor("t", [32], kind=16)), "of type IQ2_XXS, .* look for"),
    "a type without a name": (head(1, rest=tensor("t", [32], kind=4711)), "of type 4711"),
    "overlap": (
        head(2, rest=tensor("a", [16]) + tensor("b", [16], offset=32) + bytes(200)),
        "two of its tensors overlap",
    ),
    "an alignment of 3": (
        head(0, 1, rest=string("general.alignment") + struct.pack("<II", 4, 3)),
        "no power of two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """One sentence that names the file, soon, and without memory."""
    content, message = DAMAGED[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ModelRefusedError, match=message) as caught:
            open_container(file)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value)
    assert time.monotonic() - started < 2


def test_the_number_of_strings_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    count = (1 << 21) + 1
    file.write_bytes(head(values=1, rest=string("k") + struct.pack("<IIQ", 9, 8, count)))
    with file.open("r+b") as content:
        content.truncate(count * 8 + 100)  # zeros: empty strings
    with pytest.raises(ModelRefusedError, match="more than 2,097,152 strings"):
        open_container(file)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused_or_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    content = bytearray((whole if whole.exists() else write(whole)).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.integers(0, 255))
    file = folder / "damaged.gguf"
    file.write_bytes(content)
    try:
        found = open_container(file)
    except ModelRefusedError:
        return
    for tensor in found.tensors.values():
        assert tensor.data.numel() <= len(content)


def test_parts(tmp_path: Path) -> None:
    names = [f"m-{part:05}-of-00002.gguf" for part in (1, 2)]
    for index, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_tensor(f"t{index}", np.zeros(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for path in (tmp_path, tmp_path / names[1]):
        assert list(open_container(path).tensors) == ["t0", "t1"]
    (tmp_path / names[0]).unlink()
    with pytest.raises(ModelRefusedError, match=f"{names[0]} is missing"):
        find_files(tmp_path)


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_numbers_of_parts_that_cannot_be(name: str, tmp_path: Path) -> None:
    """Such a file is one of its own."""
    assert list(open_container(write(tmp_path / name)).tensors) == ["first.weight", "second.weight"]


def test_two_models_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf")
    with pytest.raises(ModelRefusedError, match=r"several models, a\.gguf and b\.gguf"):
        open_container(tmp_path)
    assert find_files(tmp_path / "b.gguf") == (tmp_path / "b.gguf",)
