"""Adapters of benchmarks are what the engine loads, and requests take them by turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.adapters.headrace_engine import HeadraceEngine
from benchmarks.adapters.loop import Turn
from benchmarks.low_rank import adapter_folders
from benchmarks.models import DEMO
from engine.models.formats.native import why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="there are no kernels here")
PROMPT = [5, 6, 7, 8] * 8


def test_requests_take_adapters_by_turns(tmp_path: Path) -> None:
    system = HeadraceEngine()
    limits = {"kv_tokens": 2048, "max_requests": 8, "max_request_tokens": 64}
    system.load({
        "model": str(DEMO), "dtype": "float32", "threads": 1, "limits": limits,
        "cache": str(tmp_path), "options": {"loras": 2},
    })  # fmt: skip
    turn = Turn([{"prompt": PROMPT, "max_tokens": 16, "at": 0.0} for _ in range(3)])
    try:
        system.run(turn)
        found = system._manager.stats().by_adapter
    finally:
        system._manager.stop(hard_stop=True)
    assert {one.name: one.generated_tokens for one in found} == {"a0": 32, "a1": 16}


def test_adapters_are_made_once(tmp_path: Path) -> None:
    folders = adapter_folders(DEMO, tmp_path, 2)
    before = {name: (one / "adapter_model.safetensors").stat() for name, one in folders.items()}
    folders = adapter_folders(DEMO, tmp_path, 2)
    assert {
        name: (one / "adapter_model.safetensors").stat() for name, one in folders.items()
    } == before
    assert not adapter_folders(DEMO, tmp_path, 0)
