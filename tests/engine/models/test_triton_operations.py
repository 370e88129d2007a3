"""The decoder's kernels without a CUDA device: computed by Triton's interpreter, and compiled for
one that is not here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from engine.models import decoder_kernels as triton_kernels
from engine.models.description import NormForm
from engine.models.operations import BoundNorm, Heads
from engine.models.triton_operations import Launch, add_norm_launch, gate_launch, turn_launch

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names",
    [
        ("operations", "comparison"),
        ("experts",),
        # A whole engine, with our decoder.
        pytest.param(("decoder",), marks=pytest.mark.slow),
    ],
)
def test_by_the_interpreter(names: tuple[str, ...]) -> None:
    """In a process of its own: triton is imported as an interpreter, or it is not."""
    tests = [str(ROOT / "tests" / "gpu" / f"test_triton_{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "there is no CUDA device here, and" not in done.stdout


# ---- compiled for a device that is not here --------------------------------------------------

Case = tuple[str, Any, Launch, frozenset[str], bool]
"""A name, a kernel, how it is launched, the tensors that are not there, and whether cosines and
sines are float32.
"""


def norm(width: int, form: NormForm = "rounded_first") -> BoundNorm:
    return BoundNorm(torch.empty(width, device="meta"), None, 1e-6, form)


def sums(name: str, width: int, made: int, after: NormForm | None, before: NormForm) -> Case:
    """A sum and its norm."""
    norms = (None if after is None else norm(width, after), norm(width, before))
    launch = add_norm_launch(width, made, norms[0], 1.0, norms[1])
    assert launch is not None
    missing = {"after_bias", "before_bias", *([{"made", "also", "total"}, {"also"}, set()][made])}
    if after is None:
        missing.add("after_weight")
    return name, triton_kernels.add_norm_kernel, launch, frozenset(missing), False


def turns(name: str, heads: Heads, *, tables_rounded: bool = True) -> Case:
    """Queries, keys and values of a step over a cache."""
    launch = turn_launch(heads, turns=True, has_slots=True)
    assert launch is not None
    missing = {"query_bias", "key_bias"}
    if heads.query_norm is None:
        missing |= {"query_weight", "key_weight"}
    return name, triton_kernels.rotate_kernel, launch, frozenset(missing), not tables_rounded


def gates(name: str, width: int, activation: Any, *, gated: bool) -> Case:
    """An activation."""
    launch = gate_launch(width, activation, gated=gated)
    return name, triton_kernels.gate_kernel, launch, frozenset(), False


def cases() -> Iterator[Case]:
    """True shapes of families of the table: what `benchmarks` and the sweep may compile too."""
    turn: dict[str, Any] = {"rounds_products": True}
    yield sums("the first norm", 4096, 0, None, "rounded_first")
    yield sums("llama 8B", 4096, 1, None, "rounded_first")
    yield sums("gemma2 9B", 3584, 1, "from_one", "from_one")
    yield sums("cohere, both at once", 8192, 2, None, "centered")
    yield sums("as wide as can be", 1 << 14, 1, None, "rounded_first")
    yield turns("llama 8B", Heads(32, 8, 128, rotary_dim=128, **turn))
    yield turns("qwen3 8B", Heads(32, 8, 128, norm(128), norm(128), rotary_dim=128, **turn))
    two = (norm(256, "from_one"), norm(256, "from_one"))
    yield turns("gemma3 12B", Heads(16, 8, 256, *two, rotary_dim=256, **turn))
    two = (norm(5120, "plain"), norm(5120, "plain"))
    yield turns("olmo2 13B", Heads(40, 40, 128, *two, rotary_dim=128), tables_rounded=False)
    yield turns("phi3 mini", Heads(32, 32, 96, rotary_dim=96, **turn))
    yield turns("glm4 9B", Heads(32, 2, 128, rotary_dim=64, paired=True, **turn))
    yield gates("llama 8B", 14336, "silu", gated=True)
    yield gates("gemma2 9B", 14336, "gelu_tanh", gated=True)
    yield gates("starcoder2 15B", 24576, "gelu_tanh", gated=False)


def compile_for(case: Case, capability: int, dtype: str) -> Any:
    """A kernel as it would be launched, with tensors at multiples of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, kernel, launch, missing, has_wide_tables = case
    constants = {**launch.constants, **dict.fromkeys(missing), "OVERLAPS": capability >= 90}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "slots":
            signature[name] = "*i64"
        elif name.endswith("_eps") or name == "factor":
            signature[name] = "fp32"
        elif name in ("cos", "sin") and has_wide_tables:
            signature[name] = "*fp32"
        else:
            signature[name] = f"*{dtype}"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spills(compiled: Any, capability: int, folder: Path) -> str:
    """What ptxas says about a kernel's registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"], encoding="utf-8")
    done = subprocess.run(
        [
            get_ptxas(capability).path,
            *("-v", "--fmad=false", f"--gpu-name=sm_{capability}a"),
            *(str(source), "-o", str(folder / "kernel.cubin")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", list(cases()), ids=lambda case: f"{case[1].fn.__name__}, {case[0]}"
)
def test_compiles_for_hopper(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All elements stay in registers, no product is fused with a sum, and what is long is read and
    written by 16 bytes.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for(case, 90, "bf16")
    assert compiled.metadata.shared <= 4096
    said = spills(compiled, 90, tmp_path)
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said
    code = compiled.asm["ptx"]
    assert "fma.rn.f32" not in code
    assert "ld.global.v4.b32" in code
    assert "st.global.v4.b32" in code


def test_constants_do_not_depend_on_the_step() -> None:
    """So a kernel is compiled once for a layer, and a token's result is its own."""
    one = turn_launch(Heads(32, 8, 128, rotary_dim=128), turns=True, has_slots=True)
    assert one is not None
    assert (one.parts, one.warps, one.constants["BLOCK_H"]) == (4, 4, 16)
    whole = norm(4096)
    together = turn_launch(Heads(32, 8, 128, whole, norm(1024)), turns=True, has_slots=True)
    assert together is not None
    assert (together.parts, together.constants["BLOCK_H"]) == (3, 32)
