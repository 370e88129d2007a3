"""The client's command as a process, and files of JSON lines for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.python.scripted import ScriptedServer

COMMAND = [sys.executable, "-c", "from headrace_command import main; main()"]


def start(server: ScriptedServer, *words: str | Path, **streams: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--target", server.target, *map(str, words)], text=True, **streams
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *items: object) -> Path:
    path.write_text("".join((i if isinstance(i, str) else json.dumps(i)) + "\n" for i in items))
    return path
