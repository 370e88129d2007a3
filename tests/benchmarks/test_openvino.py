"""OpenVINO's adapter: what it is told of the processor, without OpenVINO."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapters.openvino_cpu import _has_bfloat16


class Core:
    """What the adapter asks an openvino.Core, answered in its form."""

    def __init__(self, capabilities: list[str]) -> None:
        self._properties = {("CPU", "OPTIMIZATION_CAPABILITIES"): capabilities}

    def get_property(self, device: str, name: str) -> Any:
        """A device's property; another one is an error, as it is there."""
        return self._properties[device, name]


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        (["FP32", "INT8", "BIN", "EXPORT_IMPORT"], False),
        (["BF16", "FP32", "FP16", "INT8", "BIN", "EXPORT_IMPORT"], True),
        ([], False),
    ],
)
def test_bfloat16_is_used_where_the_processor_has_it(capabilities: list[str], has: bool) -> None:
    assert _has_bfloat16(Core(capabilities)) is has
