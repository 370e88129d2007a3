"""Builds the kernels: `python -m engine.native.build`. Needs only the standard library and g++ 11
or newer. clang++ is not supported: its OpenMP calls are not those of GNU's runtime, which torch
loads.

Each source is compiled once for every instruction set in VARIANTS, into a namespace of that name.
The library chooses one when it is loaded, so it may be built on one machine and run on another.
Instruction sets that the compiler does not know are left out, and the build reports them. At
start-up the server logs this if it matters for the machine. Objects of the lowest set are linked
first: if several objects contain the same template of the standard library, the linker keeps the
first one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libheadrace.so"
COMPILERS = ("g++", "c++")

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",  # the compiler's own headers cause this warning
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_X86 = {
    "avx2": _AVX2,
    "avx512": (*_AVX2, *_AVX512),
    "avx512_bf16": (*_AVX2, *_AVX512, "-mavx512bf16"),
    "amx": (*_AVX2, *_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_ONCE = ("library.cpp",)
"""Sources that are compiled once, for any machine."""


class BuildError(Exception):
    """The kernels cannot be built. The message says why."""


def variants(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets to build for on a type of machine, the lowest first."""
    return _X86 if machine in ("x86_64", "AMD64") else {"portable": ()}


def fingerprint() -> str:
    """Return a hash of the sources. A library that was built from other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler(wanted: str | None = None) -> str:
    """Return the path of a C++ compiler: the requested one, or the first usable one of COMPILERS.

    Raises:
        BuildError: there is none.
    """
    names = (wanted,) if wanted else COMPILERS
    found = {name: path for name in names if (path := shutil.which(name)) is not None}
    for path in found.values():
        if not _is_clang(path):
            return path
    what = f"no C++ compiler found ({', '.join(names)})"
    if found:
        what = (
            f"{' and '.join(found)} will not do: clang's OpenMP calls (__kmpc_*) are not in the "
            "runtime that torch has loaded, GNU's"
        )
    raise BuildError(f"{what}; install g++, or name one by --compiler")


def _is_clang(compiler: str) -> bool:
    """Return whether a compiler is clang, under any name. One that does not identify itself is
    accepted.
    """
    macros = [compiler, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(macros, capture_output=True, text=True, check=False)
    return "#define __clang__ " in done.stdout


def _knows(compiler: str, flags: Sequence[str]) -> bool:
    empty = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(empty, capture_output=True, check=False).returncode == 0


def build(compiler: str, output: Path = LIBRARY) -> tuple[str, ...]:
    """Compile and link, in parallel. `output` is replaced atomically.

    Returns:
        The instruction sets that were left out because the compiler does not know them.

    Raises:
        BuildError: compiling failed. The message has the compiler's output.
    """
    wanted = variants(platform.machine())
    lowest = next(iter(wanted))
    built = {
        isa: flags for isa, flags in wanted.items() if isa == lowest or _knows(compiler, flags)
    }
    stamp = [f'-DHEADRACE_FINGERPRINT="{fingerprint()}"']
    stamp += [f"-DHEADRACE_WITH_{isa}" for isa in built]
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        folder = Path(name)
        jobs: list[tuple[Path, list[str]]] = []
        for isa, flags in built.items():
            for source in sorted(SOURCES.glob("*.cpp")):
                if source.name not in _ONCE:
                    arguments = [f"-DHEADRACE_ISA={isa}", *flags, "-c", str(source)]
                    jobs.append((folder / f"{isa}-{source.stem}.o", arguments))
        jobs += [(folder / f"{name}.o", [*stamp, "-c", str(SOURCES / name)]) for name in _ONCE]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: _run([compiler, *_FLAGS, *job[1], "-o", str(job[0])]), jobs))
        linked = folder / output.name
        # Without -fopenmp: the library uses the OpenMP runtime that torch has loaded. A second copy
        # would start a second set of threads. C++'s runtime is the one that torch has loaded, too:
        # the few symbols that the kernels need of it are older than any torch, whereas a static
        # copy needs the C library that it was built for.
        objects = [str(path) for path, _ in jobs]
        _run([compiler, "-shared", "-fPIC", *objects, "-o", str(linked)])
        linked.replace(output)
    return tuple(isa for isa in wanted if isa not in built)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m engine.native.build", description=__doc__)
    parser.add_argument("--compiler", help=f"default: the first of {', '.join(COMPILERS)}")
    parser.add_argument(
        "--optional", action="store_true", help="do not fail: the engine runs without, more slowly"
    )
    options = parser.parse_args(arguments)
    try:
        compiler = find_compiler(options.compiler)
        print(f"building {LIBRARY.name} with {compiler}", file=sys.stderr)
        lacking = build(compiler)
        if lacking:
            print(
                f"without {', '.join(lacking)}, which this compiler does not know: on processors "
                "that have it the kernels are slower than they could be; g++ 11 or newer knows all",
                file=sys.stderr,
            )
    except (BuildError, OSError) as error:  # OSError: a folder that this user may not write
        print(f"the kernels for CPUs were not built: {error}", file=sys.stderr)
        if options.optional:
            print("Headrace runs without them, more slowly.", file=sys.stderr)
        return 0 if options.optional else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
