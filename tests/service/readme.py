"""The examples of README.md and of other documents, as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def code_blocks(language: str, document: Path = README) -> list[str]:
    """The code blocks of a language."""
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def shell_commands(start: str = "", document: Path = README) -> list[str]:
    """The shell commands that begin with `start`, with their continued lines and here-documents."""
    found: list[str] = []
    for block in code_blocks("sh", document):
        lines = iter(block.splitlines())
        for line in lines:
            command = line
            while command.endswith("\\"):
                command += "\n" + next(lines)
            if (here := re.search(r"<<'(\w+)'(?: \|.*)?$", command)) is not None:
                for line in lines:
                    command += "\n" + line
                    if line == here[1]:
                        break
            if command.startswith(start) and command and not command.startswith("#"):
                found.append(command)
    return found


def lay_out(folder: Path) -> None:
    """Make a folder look like the repository's root to the README's commands: the virtual
    environment that the tests run in, the models, and the clients.
    """
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("models", "clients"):
        (folder / name).symlink_to(ROOT / name)
