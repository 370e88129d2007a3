"""AWQ, version gemm: 4 bits with zeros.

    qweight [K, N / 8]  codes of eight outputs of an input
    qzeros  [G, N / 8]  zeros of eight outputs, as they are
    scales  [G, N]

The codes of a word, from the lowest, are those of outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight.

    w[n, k] = scales[k // group, n] * (code[k, n] - zero[k // group, n])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the code of each of eight outputs stands in its word."""
_OTHERWISE = "get it in version gemm, or as GPTQ, or its 16-bit weights"


class Awq(StoredFormat):
    """See the module."""

    name = "AWQ"
    is_symmetric = False

    @override
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = read_bits(config, ("bits", "w_bit"), (4,))
        self.group = read_group(config, ("group_size", "q_group_size"))
        version = config.get("version") or config.get("format") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise StoredError(f"is of version {version!r}, which packs otherwise; {_OTHERWISE}")
        if config.get("zero_point", True) is not True:
            raise StoredError(f"has no zeros (zero_point); {_OTHERWISE}")

    @override
    def words(self, outputs: int, inputs: int) -> tuple[int, int]:
        return inputs, outputs // self.per_word

    @override
    def size(self, words: tuple[int, ...]) -> tuple[int, int]:
        return words[1] * self.per_word, words[0]

    @override
    def rows(self, tensors: Tensors, outputs: slice) -> Rows:
        words = slice(outputs.start // self.per_word, -(-outputs.stop // self.per_word))
        codes, zeros = (
            unpacked(tensors[name][:, words], self.bits)
            .view(len(tensors[name]), -1, self.per_word)[..., _PLACES]
            .flatten(1)
            .T.contiguous()
            for name in ("qweight", "qzeros")
        )
        return Rows(codes, tensors["scales"][:, outputs].float().T.contiguous(), zeros)

    @override
    def why_stray(self, name: str) -> str:
        if name.endswith(".act.scales"):
            return f"scales activations, which is not done here; {_OTHERWISE}"
        return super().why_stray(name)
