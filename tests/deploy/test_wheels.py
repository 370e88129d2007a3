"""The server's packages: names, tags, contents, and the same bytes each time. The compiler is the
real one; with -O0, as nothing is computed here, and -O3 takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from engine.native.build import LIBRARY, find_compiler

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_28_x86_64"
DEMO = {"README.md", "chat_template.jinja", "model.safetensors"} | {
    f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")
}


def packages(folder: Path, *parts: str, tools: Path | None = None, umask: int = 0o022) -> str:
    """Run the script. What it said if it failed; else empty."""
    done = subprocess.run(
        ["scripts/packages-python.sh", sys.executable, folder, *parts],
        cwd=ROOT,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "PATH": f"{tools or ''}:{os.environ['PATH']}",
            "SOURCE_DATE_EPOCH": "1750000000",
        },
        umask=umask,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def compiler(folder: Path, before: str, *flags: str) -> Path:
    """A folder with g++, which runs a line of shell first, and is given flags besides."""
    folder.mkdir()
    tool = folder / "g++"
    tool.write_text(f'#!/bin/sh\n{before}\nexec {find_compiler()} "$@" {" ".join(flags)}\n')
    tool.chmod(0o755)
    return folder


def contents(wheel: Path) -> tuple[set[str], str]:
    """A wheel's files, and its tags with what else the file WHEEL says."""
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
        [about] = [name for name in names if name.endswith(".dist-info/WHEEL")]
        return names, inside.read(about).decode()


def in_demo(names: set[str]) -> set[str]:
    return {name.partition("models/demo/")[2] for name in names} - {""}


@pytest.mark.slow
@pytest.mark.timeout(300)  # the build backend is downloaded
def test_the_packages_without_kernels_and_again_the_same_bytes(tmp_path: Path) -> None:
    assert not packages(tmp_path / "a", "server")
    assert not packages(tmp_path / "b", "server", umask=0o077)
    [wheel], [source] = (tmp_path / "a").glob("*.whl"), (tmp_path / "a").glob("*.tar.gz")
    assert wheel.name.endswith("-py3-none-any.whl")
    names, about = contents(wheel)
    assert "Root-Is-Purelib: true" in about
    assert about.split("Tag: ")[1:] == ["py3-none-any\n\n"]
    assert {"service/command/cli.py", "engine/native/src/library.cpp"} < names
    assert not [name for name in names if name.endswith(".so") or "demo/train" in name]
    assert in_demo(names) == DEMO
    with tarfile.open(source) as archive:
        members = archive.getmembers()
    kept = {one.name for one in members if one.isfile()}
    assert in_demo(kept) == DEMO
    assert not [name for name in kept if name.endswith(".so")]
    assert any(name.endswith("/setup.py") for name in kept)
    assert {(one.uid, one.uname, one.mtime) for one in members} == {(0, "", 1750000000)}
    for one in (wheel, source):
        assert one.read_bytes() == (tmp_path / "b" / one.name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not LIBRARY.exists(), reason="the kernels are not built here")
def test_the_wheel_with_kernels(tmp_path: Path) -> None:
    # Less is compiled than usual, which saves minutes; at -O0 calls stay that newer systems have.
    assert not packages(tmp_path, "kernels", tools=compiler(tmp_path / "bin", "", "-O1"))
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    names, about = contents(wheel)
    assert "Root-Is-Purelib: false" in about
    assert about.split("Tag: ")[1:] == [f"py3-none-{PLATFORM}\n\n"]
    assert "engine/native/libheadrace.so" in names
    assert in_demo(names) == DEMO


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_makes_no_wheel(tmp_path: Path) -> None:
    lines = 'case "$*" in *-mavx512f*) exit 1;; esac'
    said = packages(tmp_path, "kernels", tools=compiler(tmp_path / "old", lines, "-O0"))
    assert "a package needs kernels for avx512, avx512_bf16, amx too, which this compiler" in said
    # A static copy of C++'s runtime needs the C library of the system that it was built on. It is
    # linked for the library's entries alone; the kernels are left empty, which saves a minute.
    lines = 'case "$*" in *-mavx2*" -c "*) eval "set -- -c -x c++ /dev/null -o \\${$#}";; esac'
    static = compiler(tmp_path / "static", lines, "-static-libgcc -static-libstdc++ -Wl,-u,_Znwm")
    said = packages(tmp_path, "kernels", tools=static)
    assert f"no {PLATFORM} wheel: its library is for" in said
    assert "GLIBC_2.3" in said
    assert not list(tmp_path.glob("*.whl"))
    assert "noarch is no part" in packages(tmp_path, "noarch")
