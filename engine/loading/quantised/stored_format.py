"""What a format of quantised checkpoints can do. One module and one class for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from engine.loading.tensor_heads import TensorHead
from engine.models.formats.codes import Codes, Layout

Tensors = Mapping[str, torch.Tensor]
"""The tensors of a layer by the last part of their names, as the file has them."""
WORD = 32
"""The bits of a word, into which codes are packed."""
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}
"""The types of scales. A product of one of them and a code is exact in float32."""


class StoredError(Exception):
    """A file cannot be served. The message completes a sentence that begins with the name of the
    file, and says what else to get.
    """


@dataclass(frozen=True, slots=True)
class Rows:
    """Some outputs of a weight, unpacked. G is the number of groups.

    Attributes:
        codes: uint8 [n, K], in the order of the inputs.
        scales: float32 [n, G].
        zeros: uint8 [n, G].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


class StoredForm(ABC):
    """How a weight lies in a file.

    Attributes:
        reads_rows: whether embeddings have this form, too.
    """

    reads_rows: ClassVar[bool] = False

    @property
    @abstractmethod
    def described(self) -> str:
        """What the log calls it, such as "GPTQ 4 bits, groups of 128"."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What the model card calls it, such as "gptq-4bit-g128"."""

    @abstractmethod
    def part_type(self, part: str, head: TensorHead) -> torch.dtype:
        """Return the type of a tensor of a layer."""

    @abstractmethod
    def codes(self, tensors: Tensors, layout: Layout, outputs: slice) -> Codes:
        """Read some outputs for packing."""

    @abstractmethod
    def values(self, tensors: Tensors, outputs: slice) -> torch.Tensor:
        """Compute some outputs, float32 [n, K], by the formula of the format and without a layout:
        packed weights are compared with these.
        """

    def look_up(self, tensors: Tensors, indices: torch.Tensor) -> torch.Tensor:
        """Compute any outputs, int64 [n] -> float32 [n, K], if `reads_rows`."""
        raise NotImplementedError


class StoredFormat(StoredForm):
    """How the weights of linear layers lie in a file, in words of 32 bits.

    Attributes:
        name: what people call it.
        bits: of a code.
        group: the number of inputs that share a scale. -1: all of them.
        is_symmetric: whether all zeros are 2**(bits - 1).
        parts: the last parts of the names of a layer's tensors.
        optional: those of `parts` that a layer need not have.
    """

    name: ClassVar[str]
    parts: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})
    optional: ClassVar[frozenset[str]] = frozenset()
    bits: int
    group: int
    is_symmetric: bool

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read a `quantization_config`.

        Raises:
            StoredError: it asks for something that is not served.
        """

    @property
    @override
    def described(self) -> str:
        groups = "a scale for each output" if self.group == -1 else f"groups of {self.group}"
        return f"{self.name} {self.bits} bits, {groups}"

    @override
    def part_type(self, part: str, head: TensorHead) -> torch.dtype:
        return scale_type(head) if part == "scales" else torch.int32

    @property
    @override
    def label(self) -> str:
        group = "" if self.group == -1 else f"-g{self.group}"
        return f"{self.name.lower()}-{self.bits}bit{group}"

    @property
    def per_word(self) -> int:
        """The number of codes in a word."""
        return WORD // self.bits

    @abstractmethod
    def words(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of `qweight` for a layer of this size, which is whole words."""

    @abstractmethod
    def size(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return the outputs and inputs of a layer with a `qweight` of this shape."""

    @abstractmethod
    def rows(self, tensors: Tensors, outputs: slice) -> Rows:
        """Unpack some outputs. `outputs` begins and ends with a word's."""

    def groups_of_inputs(self, tensors: Tensors) -> torch.Tensor:
        """Return the group of each input, [K]."""
        inputs = self.size(tensors["qweight"].shape)[1]
        return torch.arange(inputs) // self.groups(inputs)[0]

    def layout(self, tensors: Tensors) -> Layout:
        """Return a layer's layout, from the elements of its tensors other than `qweight`.

        Raises:
            StoredError: they are not what quantisation gives.
        """
        if not bool(tensors["scales"].isfinite().all()):
            raise StoredError(
                "has scales that are NaN or infinite: it is damaged; download it again"
            )
        group, _ = self.groups(self.size(tensors["qweight"].shape)[1])
        held = torch.float16 if tensors["scales"].dtype is torch.float16 else torch.float32
        return Layout(self.bits, group, not self.is_symmetric, scale_dtype=held)

    @override
    def codes(self, tensors: Tensors, layout: Layout, outputs: slice) -> Codes:
        """Read some outputs for packing. `outputs` begins and ends with a word's."""
        one = self.rows(tensors, outputs)
        codes = one.codes if layout.order is None else one.codes[:, layout.order]
        minima = -one.scales * one.zeros if layout.has_minima else None
        return Codes(codes, one.scales, minima)

    @override
    def values(self, tensors: Tensors, outputs: slice) -> torch.Tensor:
        """Compute some outputs. `outputs` begins and ends with a word's."""
        one, groups = self.rows(tensors, outputs), self.groups_of_inputs(tensors)
        values = one.codes.float()
        values -= one.zeros.float().index_select(1, groups)
        values *= one.scales.index_select(1, groups)
        return values

    def check_zero_scales(self, tensors: Tensors) -> None:
        """Check scales of 0. Raises StoredError: one hides a weight that is not 0."""
        outputs: list[int] = (tensors["scales"] == 0).any(0).nonzero()[:, 0].tolist()
        groups = self.groups_of_inputs(tensors)
        for first in sorted({one // self.per_word * self.per_word for one in outputs}):
            one = self.rows(tensors, slice(first, first + self.per_word))
            hidden = (one.scales == 0)[:, groups] & (one.codes != one.zeros[:, groups])
            if bool(hidden.any()):
                raise StoredError(
                    "has a scale of 0 for codes that are not: it is damaged; download it again"
                )

    def groups(self, inputs: int) -> tuple[int, int]:
        """Return how many inputs share a scale, and how many scales an output has."""
        group = inputs if self.group == -1 else self.group
        return group, -(-inputs // group)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a layer."""
        _, count = self.groups(inputs)
        return {
            "qweight": self.words(outputs, inputs),
            "qzeros": (count, outputs // self.per_word),
            "scales": (count, outputs),
        }

    def why_stray(self, name: str) -> str:
        """Return what a tensor says, of a name like a layer's, that has no `qweight` beside it."""
        return "has no qweight beside it: the file is incomplete; download it again"


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The quantised weight [N, K] of a linear layer.

    Attributes:
        path: its name in the file.
        form: its format.
        heads: its tensors, by the last parts of their names. There may be a bias among them.
        outputs, inputs: N and K.
        layout: what a packed weight has in common.
    """

    path: str
    form: StoredForm
    heads: dict[str, TensorHead]
    outputs: int
    inputs: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs


def read_bits(config: Mapping[str, Any], names: tuple[str, ...], allowed: tuple[int, ...]) -> int:
    """Return the number of bits that a config names.

    Raises:
        StoredError: there is none, or another one than the allowed ones.
    """
    found = next((config[name] for name in names if name in config), None)
    if type(found) is not int or found not in allowed:
        served = " or ".join(map(str, allowed))
        raise StoredError(
            f"has {names[0]} {found!r}, and {served} are served; get it with {served}"
        )
    return found


def read_group(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the size of groups that a config names; -1: a whole row.

    Raises:
        StoredError: there is none, or it is no such number.
    """
    found = next((config[name] for name in names if name in config), None)
    if type(found) is not int or not (found == -1 or 0 < found < 1 << 31):
        raise StoredError(
            f"has {names[0]} {found!r}, which must be -1 or the number of inputs that share a "
            "scale; get a whole config.json"
        )
    return found


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words, the lowest bits first: int32 [R, C] → uint8 [R, C * 32 / bits]."""
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return packed
    codes = torch.empty((*packed.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.flatten(1)


def scale_type(head: TensorHead) -> torch.dtype:
    """Return the type of scales. Raises StoredError: it is none of those that are served."""
    if head.dtype not in _SCALES:
        raise StoredError(
            f"has scales of type {head.dtype}, which must be F16 or BF16; get it with one of them"
        )
    return _SCALES[head.dtype]
