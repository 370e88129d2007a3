"""Triton kernels as they would be launched on an H100, or another device, compiled without one.

    row of the table ─▶ its operation, on tensors without contents (see `watch`)
                     ─▶ each kernel that it launches, with its very arguments ─▶ machine code
                     ─▶ Found: shared memory, spills, widths of matrix products and of reads

Who adds a kernel adds rows: `engine` operations that launch it, with the sizes of real layers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine.cuda.watch import HOPPER, Properties, Watch, fake_cuda

_PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^\]]*\], (?:0x)?([0-9a-f]+)")
_LOAD = re.compile(r"\bld\.global(?:\.L1::\w+|\.L2::\w+)*(?:\.v(\d))?\.b(\d+)")
_WAIT = "griddepcontrol.wait"
_MEMORY = re.compile(r"\b(?:ld|st|atom|red|cp\.async[\w.]*)\.global\b|\bcp\.async\.")
_PARAMETER = re.compile(r"_param_(\d+)\]")
_REGISTER = re.compile(r"%\w+")
_LAST = re.compile(
    r"bar\.sync\s+0;(?:(?!\b(?:st|red|atom)\.global)[^$])*?"
    r"atom\.global\.gpu\.acq_rel\.add[^$]*?bar\.sync\s+0;"
)
"""The threads of a program wait for one another, one counts the program, and they wait again."""
_LOCAL = re.compile(r"\b(?:STACK|LOCAL):(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """A compiled kernel.

    Attributes:
        kernel: its name.
        shared: bytes of shared memory.
        spilled: bytes of registers that are kept in memory, for each thread.
        products: N of its warp group matrix products (64 × N), each once; empty: it has none.
        copies: bytes of its asynchronous copies, each once.
        loads: bytes of its other reads of the device's memory, each once.
        ahead: the arguments whose memory it reads or writes before it waits for the kernel in front
            of it; None: it does not wait.
        starts_early: whether it is launched so that it may start before that kernel has ended.
        finds_last: whether it counts its programs in such a way that the last one can read what all
            have stored.
        variant: tells it from the same kernel, compiled for other arguments.
    """

    kernel: str
    shared: int
    spilled: int
    products: tuple[int, ...]
    copies: tuple[int, ...]
    loads: tuple[int, ...] = ()
    ahead: frozenset[str] | None = None
    starts_early: bool = False
    finds_last: bool = False
    variant: str = ""


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def compile_all(run: Callable[[], object], properties: Properties = HOPPER) -> list[Found]:
    """Every kernel that `run` launches. `run` makes its tensors itself, on `watch.CUDA`.
    properties: the device's.

    Raises whatever Triton's compiler raises.
    """
    from triton.runtime.jit import MockTensor

    launches: list[_Launch] = []

    def mocked(value: object) -> object:
        return MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value

    def note(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {name: mocked(value) for name, value in kwargs.items()}
        launches.append(_Launch(kernel, grid, tuple(mocked(one) for one in args), given))

    from engine.attention.triton_launch import device_size

    device_size.cache_clear()  # it may know another stand-in
    with fake_cuda(Watch(), note, properties), torch.inference_mode():
        run()
    device_size.cache_clear()
    with _driver(10 * properties.major + properties.minor):
        return [_compile(launch) for launch in launches]


def _compile(launch: _Launch) -> Found:
    # Triton's own default depends on its version.
    assert "enable_fp_fusion" in launch.kwargs, "a launch says whether it fuses"
    made = launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **launch.kwargs)
    ptx: str = made.asm["ptx"]
    return Found(
        kernel=launch.kernel.fn.__name__,
        shared=made.metadata.shared,
        spilled=_spilled(made.asm["cubin"]),
        products=tuple(sorted({int(found) for found in _PRODUCT.findall(ptx)})),
        copies=tuple(sorted({int(found, 16) for found in _COPY.findall(ptx)})),
        loads=tuple(sorted({int(n or 1) * int(bits) // 8 for n, bits in _LOAD.findall(ptx)})),
        starts_early=bool(launch.kwargs.get("launch_pdl")),
        finds_last=_LAST.search(ptx) is not None and ".nc." not in ptx,
        variant=made.hash,
        ahead=_ahead(
            ptx, [name for name, kind in made.src.signature.items() if kind != "constexpr"]
        ),
    )


def _ahead(ptx: str, arguments: list[str]) -> frozenset[str] | None:
    """See `Found.ahead`: what addresses are computed from is followed from register to register."""
    before, waits, _ = ptx.partition(_WAIT)
    if not waits:
        return None
    origins: dict[str, frozenset[str]] = {}
    found: frozenset[str] = frozenset()
    for line in before.splitlines():
        if match := _PARAMETER.search(line):
            place = int(match.group(1))
            name = arguments[place] if place < len(arguments) else "scratch"
            origins[_REGISTER.findall(line)[0]] = frozenset({name})
            continue
        registers = _REGISTER.findall(line)
        if _MEMORY.search(line):
            address = line[line.index("[") : line.index("]")]
            found |= frozenset().union(
                *(origins.get(one, ()) for one in _REGISTER.findall(address))
            )
        elif registers:
            of = [origins.get(one, frozenset()) for one in registers[1:]]
            origins[registers[0]] = origins.get(registers[0], frozenset()).union(*of)
    return found


def _spilled(cubin: bytes) -> int:
    """Bytes of local memory of each thread, which spilled registers take."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return max(int(found) for found in _LOCAL.findall(told.stdout))


class _Driver:
    """Triton's driver of a device that is not here."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by the device's number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def _driver(capability: int) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(capability))
    try:
        yield
    finally:
        driver._active = before
