"""What the front end and the tests without a model import needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = (
    "engine",
    "engine.contract.engine_client",
    "engine.scheduler.fifo",
    "engine.kv_cache.kv_cache_manager",
    "engine.core.engine_core",
    "engine.api.manager",
    "engine.contract.config",
    "engine.api.generation_options",
    "engine.contract.request",
    "engine.contract.outputs",
    "engine.contract.sampling_params",
    "engine.text",
)


@pytest.mark.parametrize("blocked", [("torch", "transformers")])
def test_without_torch(blocked: tuple[str, ...]) -> None:
    lines = [
        "import importlib, sys",
        f"for name in {blocked!r}: sys.modules[name] = None",
        f"for name in {LIGHT!r}: importlib.import_module(name)",
        "print('imported')",
    ]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "imported"
