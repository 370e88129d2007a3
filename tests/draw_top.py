"""The picture of `headrace top` in README.md, from a real run (`make top-picture`).

    headrace-server serve, the demo model ◀── requests of three callers, more than there is room for
               └── WatchStatistics ──▶ headrace.cli.top.picture ──▶ docs/top.svg

The server has a small KV cache, so that there are preemptions, and a short queue, so that there are
refusals. The look that is drawn is the last of LOOKS, a second apart.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tempfile
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind PYTHONPATH

import headrace
from headrace.cli.top import picture
from headrace.v1 import control_service_pb2 as pb
from rich.console import Console

from tests.service.real_server import ROOT, real_server

LOOKS = 8
COLUMNS = 118
CALLERS = {"search": 2.0, "chat": 1.0, "nightly-batch": 1.0}
_REQUESTS = {"search": 6, "chat": 10, "nightly-batch": 40}
"""Requests at a time."""
_OPTIONS = (
    "--listen", "127.0.0.1:0", "--num-blocks", "120", "--max-queue-size", "24",
    "--max-requests-per-batch", "32", "--cpu-offload-space", "0.01", "--log-level", "error",
)  # fmt: skip


def callers_file(folder: Path) -> Path:
    """A callers' file in which each name is also the token."""
    path = folder / "callers.toml"
    path.write_text(
        "\n".join(
            f'[[callers]]\nidentity = "{name}"\nservices = ["*"]\nweight = {weight}\n'
            f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name, weight in CALLERS.items()
        )
    )
    path.chmod(0o600)
    return path


def load(address: str, name: str, ended: threading.Event) -> None:
    """Ask again and again, as one caller; what is refused is asked again a moment later."""
    common = f"You are the {name} service of a mill by the river, and speak of it. " * 3
    with headrace.Client(address, token=name) as client:

        def ask(number: int) -> None:
            while not ended.is_set():
                try:
                    client.generate(f"{common}{number}: once", max_tokens=200, ignore_eos=True)
                except headrace.HeadraceError:
                    ended.wait(0.2)

        threads = [
            threading.Thread(target=ask, args=(number,)) for number in range(_REQUESTS[name])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def look(address: str) -> pb.Statistics:
    """The last of LOOKS looks at a loaded server."""
    ended = threading.Event()
    loads = [threading.Thread(target=load, args=(address, name, ended)) for name in CALLERS]
    for one in loads:
        one.start()
    try:
        with headrace.Client(address, token="search") as client:
            looks = client.control.watch(1.0)
            return [next(looks) for _ in range(LOOKS)][-1]
    finally:
        ended.set()
        for one in loads:
            one.join()


def drawn(found: pb.Statistics) -> str:
    """The picture as SVG, which needs nothing from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(picture(found, "127.0.0.1:50051"))
    svg = console.export_svg(title="headrace top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S)  # fonts of another host


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "top.svg")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        callers = callers_file(Path(folder))
        with real_server(*_OPTIONS, "--auth-file", str(callers)) as server:
            server.wait_until_ready()
            found = look(server.addresses[0])
    arguments.output.write_text(drawn(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
