"""The kernels of radix selection without a CUDA device: computed by Triton's interpreter, and
compiled for a device that is not here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from engine.sampling import selection, triton_selection
from engine.sampling import selection_kernels as triton_kernels
from engine.sampling.filters import choose_bound

ROOT = Path(__file__).parents[3]
STRIDE = 1 << 11


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["selection", "drawing"])
def test_by_the_interpreter(name: str) -> None:
    """In a process of its own: triton is imported as an interpreter, or it is not."""
    test = str(ROOT / "tests" / "gpu" / f"test_triton_{name}.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=350", test],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_device_decides() -> None:
    assert choose_bound(torch.device("cpu")) is selection.least_bound
    assert choose_bound(torch.device("cuda")) is triton_selection.least_bound


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(("lowest", "bits"), [(20, 11), (0, 10)])
def test_compiles_for_hopper(
    counts: bool, lowest: int, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"values": "*i32", "masses": "*i64", "known": "*i32", "sums": "*i64", "target": "*i64"}
    is_first = lowest == 20
    common = {"IS_FIRST": is_first, "BITS": bits, "STRIDE": STRIDE}
    added = _compile(
        triton_kernels.add_up,
        {**types, "width": "i32"},
        {**common, "COUNTS": counts, "LOWEST": lowest, "CUT": 4096},
    )
    assert "atom" in added.asm["ptx"] or "red." in added.asm["ptx"]
    chosen = _compile(
        triton_kernels.choose_digit,
        types,
        {**common, "IS_LAST": not is_first, "LARGEST": selection.INFINITY},
    )
    for compiled in (added, chosen):
        assert compiled.metadata.shared <= 16 << 10
        assert "0 bytes spill stores, 0 bytes spill loads" in _said(compiled, tmp_path)


def _said(compiled: Any, folder: Path) -> str:
    """What ptxas says about a kernel's registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"], encoding="utf-8")
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
    command += ["-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
