"""The block types of GGUF files. The layouts are those of the ggml project; a row of a tensor is a
sequence of blocks, each with its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.formats.codes import Codes, Layout

_Parts = (
    tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors.

    Attributes:
        name: its name in the files' documentation.
        elements, bytes: of a block.
        dtype: the type of its elements if they are floating-point numbers, or else None.
        layout: of quantised elements, or else None.
        read: turns blocks, uint8 [..., bytes], into codes [..., elements], scales and minima
            [..., groups], and factors (see Codes); for quantised elements.
    """

    name: str
    elements: int
    bytes: int
    dtype: torch.dtype | None = None
    layout: Layout | None = None
    read: Callable[[torch.Tensor], _Parts] | None = None

    def codes(self, rows: torch.Tensor) -> Codes:
        """Return the codes of some rows of a quantised tensor: uint8 [n, bytes of a row]."""
        if self.read is None:
            raise TypeError(f"{self.name} has no codes")
        codes, scales, *others = self.read(rows.reshape(len(rows), -1, self.bytes))
        return Codes(
            *(codes.flatten(1), scales.flatten(1)),
            *(None if one is None else one.flatten(1) for one in others),
        )

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the elements of such rows: float32 [n, elements of a row]."""
        if self.layout is None:
            raise TypeError(f"{self.name} has no codes")
        return self.codes(rows).values(self.layout)


def described(number: int) -> str:
    """Return the name of a type that is not read here, or its number."""
    return _OTHERS.get(number, str(number))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of bytes, and then the high ones."""
    *shape, count = packed.shape
    halves = packed.new_empty((*shape, 2, count))
    torch.bitwise_and(packed, 15, out=halves[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=halves[..., 1, :])
    return halves.flatten(-2)


def _parts(packed: torch.Tensor, size: int) -> torch.Tensor:
    return packed.reshape(*packed.shape[:-1], -1, size)


def _fifth(high: torch.Tensor) -> torch.Tensor:
    """The fifth bits of 32 elements, from 4 bytes."""
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6])
    return codes + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[..., 2:] ^ 128, _half(blocks, 0), None  # signed, plus 128


def _of_groups(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 groups, 6 bits each in 12 bytes, and their factors. Minima are
    subtracted.
    """
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    factors = torch.cat([_half(blocks, 0), -_half(blocks, 2)], -1)
    return scales.float(), minima.float(), factors


def _q4_k(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(_parts(blocks[..., 16:], 32)).flatten(-2)
    return codes, *_of_groups(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(_parts(blocks[..., 48:], 32)).flatten(-2)
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return codes | high.flatten(-2) << 4, *_of_groups(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low = _parts(_nibbles(_parts(blocks[..., :128], 64)), 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = _parts(blocks[..., 128:192], 32)[..., None, :] >> shifts & 3
    codes = (low | high << 4).flatten(-3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes + (128 - 32), scales, None, _half(blocks, 208)


def _layout(bits: int, group: int, has_minima: bool, per_factor: int = 0) -> Layout:
    dtype = torch.int8 if per_factor else torch.float16
    return Layout(
        bits, group, has_minima, scale_dtype=dtype, minimum_dtype=dtype, per_factor=per_factor
    )


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    2: BlockType("Q4_0", 32, 18, None, _layout(4, 32, False), _q4_0),
    3: BlockType("Q4_1", 32, 20, None, _layout(4, 32, True), _q4_1),
    6: BlockType("Q5_0", 32, 22, None, _layout(8, 32, False), _q5_0),
    7: BlockType("Q5_1", 32, 24, None, _layout(8, 32, True), _q5_1),
    8: BlockType("Q8_0", 32, 34, None, _layout(8, 32, False), _q8_0),
    12: BlockType("Q4_K", 256, 144, None, _layout(4, 32, True, 8), _q4_k),
    13: BlockType("Q5_K", 256, 176, None, _layout(8, 32, True, 8), _q5_k),
    14: BlockType("Q6_K", 256, 210, None, _layout(8, 16, False, 16), _q6_k),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
}
"""The types that are read, by their numbers in files."""

_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
