"""Where these tests run: on a CUDA device; or on a CPU, by Triton's interpreter, where the process
was started with TRITON_INTERPRET=1. Else they are skipped.

Whether kernels are compiled or interpreted is settled when triton is imported, so one process
cannot do both: `tests/engine/attention/test_triton.py` starts a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def interpreted() -> bool:
    """Whether the interpreter runs: it takes milliseconds for each program."""
    return INTERPRETED


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here, and the process has no TRITON_INTERPRET=1")
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """A device that is a GPU."""
    if device.type != "cuda":
        pytest.skip("there is no CUDA device here")
    return device


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other: no more of them than show the law."""
    if INTERPRETED:
        from engine.attention import triton_launch

        monkeypatch.setattr(triton_launch, "decode_places", lambda *_, **__: 6)


@pytest.fixture(autouse=True, scope="session")
def _arithmetic() -> Iterator[None]:
    """The interpreter keeps bfloat16 as 16-bit integers: it multiplies these in products, and cuts
    float32 off, where a device rounds to the nearest. Products are computed in float64, because a
    row's sums in float32 depend on its place in the matrix (BLAS), and on a device they do not.
    """
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(handle: TensorHandle) -> Any:
        if handle.dtype.scalar is tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    convert = interpreter._convert_float

    def create_dot(
        self: object, a: TensorHandle, b: TensorHandle, added: TensorHandle, *options: object
    ) -> TensorHandle:
        product = np.matmul(widen(a), widen(b)).astype(added.data.dtype)
        return TensorHandle(product + added.data, added.dtype.scalar)

    def convert_float(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (given, wanted) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, given, wanted, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter, "_convert_float", convert_float)
        yield
