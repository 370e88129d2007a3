"""Blocks of GGUF files, beside those of the `gguf` package and beside bytes worked out by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.loading.gguf.blocks import BLOCK_TYPES, described
from tests.gguf_files import random_blocks

QUANTISED = [number for number, kind in BLOCK_TYPES.items() if kind.dtype is None]


@pytest.mark.parametrize("number", QUANTISED, ids=lambda number: BLOCK_TYPES[number].name)
def test_every_element_is_the_package_s(number: int) -> None:
    """Bit for bit in float32, for any bytes."""
    kind, theirs = BLOCK_TYPES[number], gguf.GGMLQuantizationType(number)
    assert kind.name == theirs.name
    assert (kind.elements, kind.bytes) == gguf.GGML_QUANT_SIZES[theirs]
    blocks = random_blocks((37, 3 * kind.elements), theirs, seed=number)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, theirs))
    assert torch.equal(kind.values(torch.from_numpy(blocks)), expected)
    assert kind.layout is not None
    codes = kind.codes(torch.from_numpy(blocks))
    assert int(codes.codes.max()) < 1 << kind.layout.bits
    assert (codes.minima is not None) == kind.layout.has_minima


def test_q4_0_by_hand() -> None:
    """The low halves of 16 bytes are elements 0 to 15, the high ones 16 to 31, each plus 8."""
    scale = np.float16(0.5).tobytes()
    block = torch.tensor([*scale, *(16 * (15 - i) + i for i in range(16))], dtype=torch.uint8)
    expected = [(i - 8) / 2 for i in range(16)] + [(15 - i - 8) / 2 for i in range(16)]
    assert BLOCK_TYPES[2].values(block[None]).tolist() == [expected]


def test_every_type_of_the_package_has_a_name() -> None:
    for theirs in gguf.GGMLQuantizationType:
        name = BLOCK_TYPES[theirs].name if theirs in BLOCK_TYPES else described(theirs)
        assert name == theirs.name or name == str(int(theirs))
