"""Builds the server's image by buildah, starts it, tries it, and writes down what came out.

    image.py --torch cuda                 on the base that the Dockerfile names
    image.py --torch cpu --base debian    on a base that debootstrap makes of Debian's packages

Needs root, buildah and setpriv, and for `--base debian` debootstrap. No container runtime: the
image runs in namespaces (`image_box`). Where `--torch cpu` finds no CPU build of torch
(TORCH_INDEX_URL, or a wheel in deploy/wheels), the image is built around an empty stand-in, and
tried with the torch of the CUDA image, which must be there, mounted beside it.

The record (benchmarks/results/image.json) has a part for each kind of torch; the bill of materials
goes to dist/image.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from image_sbom import bill, inside
from image_trials import try_out

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "image.json"
BASE = "localhost/headrace-base"
SUITE = "bookworm"
OF_CUDA = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")


def buildah(*arguments: str) -> str:
    """Run a buildah command and return its stdout; its stderr goes to this process's stderr."""
    run = ["buildah", *arguments]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def make_base() -> None:
    """Make the base image from Debian's packages."""
    root = ROOT / "build" / "base"
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(exist_ok=True)
    subprocess.run(
        [
            "debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates",
            SUITE, str(root),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    for rest in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "var/log"):
        shutil.rmtree(root / rest)
        (root / rest).mkdir()
    (root / "var/lib/apt/lists/partial").mkdir()
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(root)


@contextmanager
def stand_in() -> Iterator[None]:
    """Provide an empty torch in deploy/wheels, of the version in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    version = re.search(r"^torch==(\S+)", text, re.M)
    assert version is not None
    name = f"torch-{version[1]}"
    wheel = ROOT / "deploy" / "wheels" / f"{name}-py3-none-any.whl"
    files = {
        "torch/__init__.py": "from torch import version\n",
        "torch/version.py": "cuda = None\n",
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version[1]}\n"
        "Requires-Dist: setuptools\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: headrace\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        lines = io.StringIO()
        csv.writer(lines).writerows([path, "", ""] for path in [*files, f"{name}.dist-info/RECORD"])
        archive.writestr(f"{name}.dist-info/RECORD", lines.getvalue())
    try:
        yield
    finally:
        wheel.unlink()


def build(torch: str, base: str | None, tag: str) -> float:
    """Build the image and return how many seconds it took."""
    arguments = ["build", "--isolation", "chroot", "--format", "docker", "--layers"]
    given = {"TORCH": torch, "PYTHON_IMAGE": base}
    for name in ("TORCH_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        given[name] = os.environ.get(name)
    if certificate := os.environ.get("PIP_CERT"):
        arguments += ["--volume", f"{certificate}:/etc/ssl/pip.crt:ro"]
        given["PIP_CERT"] = "/etc/ssl/pip.crt"
    for name, value in given.items():
        if value:
            arguments += ["--build-arg", f"{name}={value}"]
    began = time.monotonic()
    buildah(*arguments, "--tag", tag, str(ROOT))
    return time.monotonic() - began


@contextmanager
def mounted(tag: str) -> Iterator[Path]:
    """Mount the image's file system and yield its path."""
    container = buildah("from", "--pull-never", tag)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def layers(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the image's layers from the bottom up: what made each, and its uncompressed bytes."""
    store = json.loads(buildah("info"))["store"]
    known = json.loads((Path(store["GraphRoot"]) / "overlay-layers" / "layers.json").read_text())
    sizes = {layer["diff-digest"]: layer["diff-size"] for layer in known if "diff-digest" in layer}
    made = [
        " ".join(entry.get("created_by", "").split())[:100]
        for entry in described["history"]
        if not entry.get("empty_layer")
    ]
    digests = described["rootfs"]["diff_ids"]
    return [
        {"by": by, "digest": digest, "bytes": sizes[digest]}
        for by, digest in zip(made, digests, strict=True)
    ]


def packages(root: Path) -> dict[str, int]:
    """Return the sizes of the Python packages in bytes: torch with the packages that only CUDA
    needs, and the others.
    """
    measure = (
        "import importlib.metadata as m, json, os\n"
        "sizes = {}\n"
        "for d in m.distributions():\n"
        "    size = 0\n"
        "    for f in d.files or []:\n"
        "        try: size += os.lstat(f.locate()).st_size\n"
        "        except OSError: pass\n"
        "    sizes[d.metadata['Name'].lower().replace('_', '-')] = size\n"
        "print(json.dumps(sizes))"
    )
    sizes: dict[str, int] = json.loads(inside(root, "python3", "-c", measure))
    of_torch = {name: size for name, size in sizes.items() if OF_CUDA.match(name)}
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:12]
    return {
        "torch_and_cuda": sum(of_torch.values()),
        "others": sum(sizes.values()) - sum(of_torch.values()),
        **{f"largest: {name}": size for name, size in largest},
    }


def have_cpu_torch() -> bool:
    """Whether a CPU build of torch is available."""
    wheels = (ROOT / "deploy" / "wheels").glob("torch-*.whl")
    return bool(os.environ.get("TORCH_INDEX_URL")) or any(wheels)


@contextmanager
def borrowed(root: Path) -> Iterator[Path]:
    """Copy an image's torch, with the CUDA packages that it requires, into a folder, and yield
    the folder.
    """
    site = next(root.glob("opt/headrace/lib/python*/site-packages"))
    folder = ROOT / "build" / "torch"
    folder.mkdir(parents=True)
    try:
        for pattern in ("torch", "torch-*", "torchgen", "functorch", "triton*", "nvidia*", "cuda*"):
            for found in site.glob(pattern):
                shutil.copytree(found, folder / found.name, symlinks=True)
        yield folder
    finally:
        shutil.rmtree(folder)


def examine(tag: str, torch: str, *, stood_in: bool) -> dict[str, Any]:
    """Run the trials and write the bill of materials."""
    described = json.loads(buildah("inspect", "--type", "image", tag))
    record: dict[str, Any] = {"id": described["FromImageID"]}
    record["layers"] = layers(described["Docker"])
    record["bytes"] = sum(layer["bytes"] for layer in record["layers"])
    config = described["Docker"]["config"]
    with mounted(tag) as root:
        record["packages"] = packages(root)
        record["bytes_without_torch"] = record["bytes"] - record["packages"]["torch_and_cuda"]
        if stood_in:
            with mounted("localhost/headrace:cuda") as other, borrowed(other) as folder:
                record["trials"] = try_out(root, config, torch, torch_at=folder)
        else:
            record["trials"] = try_out(root, config, torch, torch_at=None)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        document = bill(
            root, name=f"headrace-{torch}", version="0.1.0", image=record["id"], when=when
        )
    folder = ROOT / "dist" / "image"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{torch}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
    record["components_in_the_bill"] = len(document["components"])
    return record


def main() -> None:
    """Build, try, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--base", help="an image, or `debian`: made here by debootstrap")
    parser.add_argument(
        "--try-only",
        action="store_true",
        help="build nothing: try the recorded image again, and keep the figures of its build",
    )
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    record = json.loads(given.record.read_text()) if given.record.exists() else {}
    tag = f"localhost/headrace:{given.torch}"
    stood_in = given.torch == "cpu" and not have_cpu_torch()
    built = record.get(given.torch, {}) if given.try_only else build_one(given, tag, stood_in)
    found = built | examine(tag, given.torch, stood_in=stood_in)
    if given.try_only and found["id"] != record.get(given.torch, {}).get("id"):
        sys.exit("the image is not the one that the record is of: build it")
    record[given.torch] = found
    given.record.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if failed := [name for name, trial in found["trials"].items() if not trial["holds"]]:
        sys.exit(f"does not hold: {', '.join(failed)}")


def build_one(given: argparse.Namespace, tag: str, stood_in: bool) -> dict[str, Any]:
    """Build the image and return its entry for the record."""
    base = given.base
    if base == "debian":
        base = BASE
        if not buildah("images", "--quiet", "--filter", f"reference={BASE}"):
            make_base()
    if stood_in:
        with stand_in():
            seconds = build(given.torch, base, tag)
    else:
        seconds = build(given.torch, base, tag)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "base": f"Debian {SUITE} by debootstrap" if given.base == "debian" else base or "default",
        "torch": "an empty stand-in" if stood_in else given.torch,
        "build_seconds": round(seconds),
    }


if __name__ == "__main__":
    main()
