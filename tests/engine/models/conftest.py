"""Fixtures of the tests of packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from engine.models.formats.native import native_library
from engine.native import library


@pytest.fixture(scope="module", params=["amx", "avx512_bf16", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels' variant for an instruction set."""
    best = native_library().isa
    handle = ctypes.CDLL(str(library.LIBRARY))
    handle.headrace_use.restype = ctypes.c_bool
    if not handle.headrace_use(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert handle.headrace_use(best.encode())
