"""llama.cpp's adapter: which file it reads, without llama.cpp."""

from __future__ import annotations

import sys
from ctypes import Structure, c_int
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.adapters.llama_cpu import _prepare


class Parameters(Structure):
    _fields_ = (("ftype", c_int), ("output_tensor_type", c_int))


def library(status: int, seen: list[tuple[int, int]]) -> SimpleNamespace:
    """What the adapter uses of llama_cpp."""

    def quantize(source: bytes, target: bytes, parameters: Any) -> int:
        found = parameters._obj
        seen.append((found.ftype, found.output_tensor_type))
        Path(target.decode()).write_bytes(Path(source.decode()).read_bytes()[:1])
        return status

    return SimpleNamespace(
        llama_model_quantize_default_params=Parameters,
        llama_model_quantize=quantize,
        LLAMA_FTYPE_MOSTLY_Q4_0=2,
        GGML_TYPE_Q6_K=14,
    )


@pytest.fixture
def order(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "it-bfloat16.gguf").write_bytes(b"weights")
    return {"model": "/models/it", "dtype": "bfloat16", "cache": str(tmp_path)}


def test_the_weights_are_quantised_once(
    order: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setitem(sys.modules, "llama_cpp", library(0, seen))
    for _ in range(2):
        path = _prepare(order, None, "Q4_0")
        assert path == tmp_path / "gguf" / "it-Q4_0.gguf"
        assert path.read_bytes() == b"w"
    assert seen == [(2, 14)]
    assert _prepare(order, None, None) == tmp_path / "gguf" / "it-bfloat16.gguf"
    assert _prepare(order, "/some/file.gguf", None) == Path("/some/file.gguf")


def test_a_failure_leaves_no_file(
    order: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", library(1, []))
    with pytest.raises(RuntimeError, match="llama_model_quantize gave 1"):
        _prepare(order, None, "Q4_0")
    assert not list(tmp_path.glob("gguf/*Q4_0.gguf"))
