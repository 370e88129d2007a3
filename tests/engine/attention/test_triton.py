"""The Triton kernels without a CUDA device: computed by Triton's interpreter, compiled for devices
that are not here, and chosen or refused.

What they compute is compared in `tests/gpu`, which runs on a device just as well.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import registry
from engine.attention.step_arrays import SHORTEST_CUT, most_cuts
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.errors import ConfigError

triton = pytest.importorskip("triton")

from engine.attention import triton_launch
from engine.attention.triton_backend import TritonAttentionBackend
from engine.attention.triton_kernels.attend import STEP_ARRAYS
from engine.attention.triton_kernels.decode import decode_kernel, merge_kernel
from engine.attention.triton_kernels.prefill import prefill_kernel
from engine.attention.triton_kernels.write import write_kernel
from engine.attention.triton_launch import (
    HOPPER,
    DeviceSize,
    choose_tiles,
    decode_places,
)

ROOT = Path(__file__).parents[3]
AMPERE = DeviceSize(processors=108, shared_memory=163 << 10)
CONSUMER = DeviceSize(processors=84, shared_memory=99 << 10)


FEW = (  # each kernel, in layers of several kinds and in an engine
    "tests/gpu/test_triton_attention.py::test_many_steps_of_usual_layers",
    "tests/gpu/test_triton_attention.py::test_many_heads_to_a_key_head",
    "tests/gpu/test_triton_attention.py::test_keys_that_are_read_in_parts",
    "tests/gpu/test_triton_attention.py::test_long_contexts_are_cut[700-3]",
    "tests/gpu/test_triton_attention.py::test_cuts_are_shared_out_evenly",
    "tests/gpu/test_triton_attention.py::test_the_host_counts_the_cuts_that_the_device_makes",
    "tests/gpu/test_triton_attention.py::test_strides_are_taken_as_they_are",
    "tests/gpu/test_triton_attention.py::test_over_a_cache_that_is_written_already",
    "tests/gpu/test_triton_attention.py::test_no_padding_is_left_as_it_was",
    "tests/gpu/test_triton_engine.py::test_greedy_tokens_equal_generate[True-True-llama]",
)
REST = (
    "tests/gpu/test_triton_attention.py",
    "tests/gpu/test_triton_engine.py",
    *(f"--deselect={test}" for test in FEW),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "tests", [pytest.param(FEW, id="few"), pytest.param(REST, marks=pytest.mark.slow, id="rest")]
)
def test_by_the_interpreter(tests: tuple[str, ...]) -> None:
    """In a process of its own: triton is imported as an interpreter, or it is not."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", *tests],
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


def compile_for(
    kernel: Any, capability: int, dtype: str, constants: dict[str, Any], **options: int
) -> Any:
    """A kernel as it would be launched, with tensors and strides at multiples of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**constants, "OVERLAPS": capability >= 90}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in STEP_ARRAYS:
            signature[name] = "*i64"
        elif name in ("partials", "highests", "totals"):
            signature[name] = "*fp32"
        elif name.endswith("_scale"):
            signature[name] = "fp32"
        elif name.endswith("_stride") or name in kernel_numbers:
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] == f"*{dtype}" or name.endswith("_stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options["enable_fp_fusion"] = True
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


kernel_numbers = ("num_tokens",)


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "groups", "dims", "block_size", "window", "has_more"),
    [
        (90, HOPPER, "bf16", 4, (128, 128), 256, 0, False),
        pytest.param(90, HOPPER, "bf16", 2, (256, 256), 32, 1024, True, marks=pytest.mark.slow),
        pytest.param(80, AMPERE, "fp16", 7, (96, 96), 32, 0, False, marks=pytest.mark.slow),
        (86, CONSUMER, "fp32", 1, (192, 128), 16, 100, True),
    ],
)
def test_compiles_and_fits_in_shared_memory(
    capability: int,
    size: DeviceSize,
    dtype: str,
    groups: int,
    dims: tuple[int, int],
    block_size: int,
    window: int,
    has_more: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To machine code, all kernels of a layer. has_more: with a softcap and sinks."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_d, block_v = (triton.next_power_of_2(dim) for dim in dims)
    sizes = {
        "KV_HEADS": 8,
        "DIM": dims[0],
        "VALUE_DIM": dims[1],
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
    }
    layer = {
        **sizes,
        "BLOCK_SIZE": block_size,
        "GROUPS": groups,
        "WINDOW": window,
        "SOFTCAP": has_more,
        "SINKS": has_more,
    }
    if not has_more:
        layer["sinks"] = None  # type: ignore[assignment]
    limit = most_cuts(8, window)
    compile_for(
        write_kernel,
        capability,
        dtype,
        {**sizes, "BLOCK_H": 8},
    )
    merged = ("sinks", "WINDOW", "SINKS", "GROUPS", "VALUE_DIM", "BLOCK_V")
    compile_for(
        merge_kernel,
        capability,
        dtype,
        {key: layer[key] for key in merged if key in layer}
        | {"HEADS": groups * 8, "MAX_CUTS": limit},
    )
    for is_decode in (True, False):
        tiles = choose_tiles(
            groups=groups,
            dim=block_d,
            value_dim=block_v,
            itemsize=4 if dtype == "fp32" else 2,
            is_decode=is_decode,
            size=size,
        )
        own = {"MAX_CUTS": limit}
        if not is_decode:
            own = {"BLOCK_Q": tiles.rows // groups, "IN_PARTS": False}
        kernel = decode_kernel if is_decode else prefill_kernel
        compiled = compile_for(
            kernel,
            capability,
            dtype,
            {**layer, **own, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys},
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )
        assert compiled.metadata.shared <= size.shared_memory
        assert len(compiled.asm["cubin"]) > 0


# ---- sizes -----------------------------------------------------------------------------------


def test_tiles() -> None:
    """They hold all heads of a key/value head, and fit; where nothing else helps, they are small.

    The kernels count on tiles of keys that divide a cut.
    """
    for size in (HOPPER, AMPERE, CONSUMER):
        for groups in (1, 3, 8, 70):
            for dim in (16, 64, 128, 256, 512):
                for itemsize in (2, 4):
                    for is_decode in (True, False):
                        tiles = choose_tiles(
                            groups=groups,
                            dim=dim,
                            value_dim=dim,
                            itemsize=itemsize,
                            is_decode=is_decode,
                            size=size,
                        )
                        assert tiles.rows >= max(groups, 16)
                        assert SHORTEST_CUT % tiles.keys == 0
                        if dim <= 256 and groups <= 8:
                            assert tiles.depth >= 1
    usual = {"groups": 4, "dim": 128, "value_dim": 128, "itemsize": 2, "size": HOPPER}
    decode = choose_tiles(is_decode=True, **usual)  # type: ignore[arg-type]
    prefill = choose_tiles(is_decode=False, **usual)  # type: ignore[arg-type]
    assert (decode.programs, decode.registers, prefill.registers) == (3, None, None)
    assert (decode.rows, decode.keys, decode.stages) == (16, 64, 5)
    assert (prefill.rows, prefill.keys, prefill.stages) == (128, 64, 5)
    wide = {**usual, "dim": 512, "value_dim": 512}
    columns = [
        choose_tiles(is_decode=False, **{**wide, **other}).columns  # type: ignore[arg-type]
        for other in ({}, {"value_dim": 128}, {"itemsize": 4}, {"size": AMPERE}, {"groups": 129})
    ]
    assert columns == [256, 128, 0, 0, 0], "keys are read in parts where there is room for queries"


def test_cuts() -> None:
    found = [most_cuts(heads, 0) for heads in (1, 2, 7, 8, 32, 128)]
    assert found == [128, 128, 32, 32, 16, 16]
    assert most_cuts(8, 256) == 2, "a window may begin within a cut"
    assert most_cuts(8, 257) == 3
    assert most_cuts(8, 100_000) == 32


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_decode_places_are_those_of_the_device(dim: int) -> None:
    """All programs run at the same time, since each has an equal share of the work: a
    multiprocessor has registers for all of them.
    """
    for size in (HOPPER, AMPERE, CONSUMER):
        shape: dict[str, Any] = {"dim": dim, "value_dim": dim, "itemsize": 2, "size": size}
        tiles = choose_tiles(groups=4, is_decode=True, **shape)
        held = decode_places(tiles, **shape) / size.processors
        assert held in (1, 2, 3)
        assert held <= tiles.programs
        if tiles.registers is not None:
            assert held * tiles.warps * 32 * tiles.registers <= 64 << 10


# ---- the choice ------------------------------------------------------------------------------


def test_refused_on_a_cpu() -> None:
    with pytest.raises(
        ConfigError, match=r"attention: is triton, but the Triton kernels are for CUDA devices, and"
    ):
        registry.choose_backend(torch.device("cpu"), torch.float32, "triton")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """torch says that there is a device; nothing is launched there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_launch, "try_out", lambda device: None)
    return torch.device("cuda")


def test_chosen_on_cuda(hopper: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        chosen = registry.choose_backend(hopper, dtype)
        assert isinstance(chosen, TritonAttentionBackend)
        assert chosen.name == "triton"
    assert isinstance(
        registry.choose_backend(hopper, torch.float32, "torch"), TorchAttentionBackend
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("old", "need a device of compute capability 8.0 or more, and this one has 7.5"),
        ("dtype", "the Triton kernels do not compute in torch.float64"),
        ("missing", "Triton cannot be imported"),
        ("compiler", r"Triton does not work here \(RuntimeError: no compiler\); it needs a C comp"),
        ("nothing", "torch finds no CUDA device of NVIDIA's here"),
    ],
)
def test_torch_where_triton_cannot_be_had(
    case: str,
    reason: str,
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dtype = torch.float64 if case == "dtype" else torch.float32
    if case == "old":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    elif case == "missing":
        monkeypatch.delattr("engine.attention.triton_backend")
        monkeypatch.setitem(sys.modules, "engine.attention.triton_backend", None)
    elif case == "nothing":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif case == "compiler":

        def try_out(device: torch.device) -> None:
            raise RuntimeError("no compiler\nand more")

        monkeypatch.setattr(triton_launch, "try_out", try_out)
    with caplog.at_level(logging.WARNING):
        assert isinstance(registry.choose_backend(hopper, dtype), TorchAttentionBackend)
    assert "attention runs in torch, more slowly than it could: " in caplog.text
    with pytest.raises(ConfigError, match=f"attention: is triton, but .*{reason}"):
        registry.choose_backend(hopper, dtype, "triton")
