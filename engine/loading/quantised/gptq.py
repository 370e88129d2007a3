"""GPTQ, by whichever program: AutoGPTQ, GPTQModel, AutoRound, llm-compressor's predecessors.

    qweight [K / per word, N]   codes of successive inputs of an output, the first one lowest
    qzeros  [G, N / per word]   zeros of successive outputs; format "gptq" has them less one
    scales  [G, N]
    g_idx   [K]                 the group of each input; input // group, unless desc_act

    w[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

The name of the format is often wrong. If the file is symmetric, the zero is known, and stored zeros
only show whether the file is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from engine.loading.quantised.stored_format import (
    Rows,
    StoredError,
    StoredFormat,
    Tensors,
    read_bits,
    read_group,
    unpacked,
)
from engine.models.formats.codes import Layout

_ZEROS_LESS_ONE = {"gptq": True, "gptq_v2": False, "gptq_p": False}
"""Whether stored zeros are less by one, by the name of a format whose layout is served."""
_OTHERWISE = "get it in the format gptq or gptq_v2, or its 16-bit weights"


class Gptq(StoredFormat):
    """See the module."""

    name = "GPTQ"
    parts = StoredFormat.parts | {"g_idx"}
    optional = frozenset({"g_idx"})

    @override
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = read_bits(config, ("bits",), (4, 8))
        self.group = read_group(config, ("group_size",))
        self.is_symmetric = config.get("sym", True) is True
        name = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("is_marlin_format") is True:
            name = "marlin"
        if not isinstance(name, str) or name not in _ZEROS_LESS_ONE:
            raise StoredError(f"has weights in the order of {name!r}; {_OTHERWISE}")
        self.zeros_less_one = _ZEROS_LESS_ONE[name]
        if config.get("pack_dtype", "int32") != "int32":
            raise StoredError(f"is packed into {config['pack_dtype']!r}, not int32; {_OTHERWISE}")
        rules = config.get("dynamic") or {}
        if not isinstance(rules, dict) or not all(str(one).startswith("-:") for one in rules):
            raise StoredError(
                "has other bits or groups for some layers (dynamic); get it with the same for all"
            )

    @override
    def words(self, outputs: int, inputs: int) -> tuple[int, int]:
        return inputs // self.per_word, outputs

    @override
    def size(self, words: tuple[int, ...]) -> tuple[int, int]:
        return words[1], words[0] * self.per_word

    @override
    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return super().shapes(outputs, inputs) | {"g_idx": (inputs,)}

    @override
    def groups_of_inputs(self, tensors: Tensors) -> torch.Tensor:
        indices = tensors.get("g_idx")
        return super().groups_of_inputs(tensors) if indices is None else indices.long()

    @override
    def layout(self, tensors: Tensors) -> Layout:
        middle = 1 << (self.bits - 1)
        if self.is_symmetric:
            stored = unpacked(tensors["qzeros"], self.bits)
            first = int(stored[0, 0])
            if first not in (middle, middle - 1) or not bool((stored == first).all()):
                raise StoredError(
                    "is symmetric (sym), but its zeros are not all the same: it is damaged, or sym "
                    "is wrong; download it again"
                )
        return replace(super().layout(tensors), order=self._order(tensors))

    def _order(self, tensors: Tensors) -> torch.Tensor | None:
        """Return the inputs sorted by group. None if they are so already."""
        indices, regular = self.groups_of_inputs(tensors), super().groups_of_inputs(tensors)
        if torch.equal(indices, regular):
            return None
        order = indices.argsort(stable=True)
        if not torch.equal(indices[order], regular):
            group, count = self.groups(len(regular))
            raise StoredError(
                f"has a g_idx that does not divide its inputs into {count} groups of {group}: it "
                "is damaged, or group_size is wrong; download it again"
            )
        return order

    @override
    def rows(self, tensors: Tensors, outputs: slice) -> Rows:
        words = slice(outputs.start // self.per_word, -(-outputs.stop // self.per_word))
        zeros = unpacked(tensors["qzeros"][:, words], self.bits)
        if self.is_symmetric:
            zeros = torch.full_like(zeros, 1 << (self.bits - 1))
        elif self.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        codes = unpacked(tensors["qweight"][:, outputs].T, self.bits)
        scales = tensors["scales"][:, outputs].float()
        return Rows(codes, scales.T.contiguous(), zeros.T.contiguous())
