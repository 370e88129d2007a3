"""README.md says what is true: its links lead somewhere, and docs/operations.md names every option.
(Its lines run as they stand: test_pasted.py.)
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service.command import flags
from tests.service.readme import README, ROOT, code_blocks
from tests.service.real_server import WAIT_S, RealServer, demo_server

DOCUMENTS = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "protos" / "README.md",
    ROOT / "models" / "demo" / "README.md",
    *sorted((ROOT / "clients").glob("*/README.md")),
]
OPERATIONS = ROOT / "docs" / "operations.md"


@pytest.fixture(scope="module")
def demo() -> RealServer:
    return demo_server()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_what_curl_says_of_the_port(demo: RealServer) -> None:
    asked = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "20", f"http://{demo.addresses[0]}/"],
        capture_output=True,
        text=True,
        check=False,
    )
    told = code_blocks("text", ROOT / "docs" / "runbook.md")
    assert asked.stderr in told
    assert (asked.returncode, asked.stdout) == (1, "")


def test_the_make_targets() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True
    ).stdout
    text = README.read_text(encoding="utf-8")
    for target in ("run", "test", "check", "protos", "bench", "format", "help"):
        assert re.search(rf"`{target}`|make {target}\b", text)
        assert re.search(rf"^\s*make {target}\s", listed, re.M)


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{target} is not there"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target} has no such heading"


# ---- docs/operations.md --------------------------------------------------------------------------


def table_of_options() -> dict[str, tuple[str, str]]:
    """Flag → variable and default, as docs/operations.md has them."""
    rows = re.findall(
        r"^\| `(--[a-z-]+)` \| `(HEADRACE_[A-Z_]+)` \| (.*?) \| ",
        OPERATIONS.read_text(encoding="utf-8"),
        re.M,
    )
    assert len(rows) == len({flag for flag, _, _ in rows})
    return {flag: (variable, default) for flag, variable, default in rows}


def test_the_tables_of_options_are_those_of_the_fields() -> None:
    for document, name, text in flags.TABLES:
        page = (ROOT / "docs" / document).read_text(encoding="utf-8")
        assert flags.with_table(page, name, text()) == page, "run `python -m service.command.flags`"
    assert set(table_of_options()) == {f"--{flag.name}" for flag in flags.flags().values()}


def _said() -> list[str]:
    """All texts in the sources of service and engine; what is filled in shows as a NUL."""
    found: list[str] = []
    for path in (*(ROOT / "service").rglob("*.py"), *(ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                )
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\.?\d*[sdgf]", "\0", node.value))
    return found


def test_the_messages_are_those_of_the_program() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    sections = [
        text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for title in ("Limits, and what refuses what", "Logs", "Troubleshooting")
    ]
    said = "\n".join(_said())
    cells = re.findall(r"^\|(.*?)\|(.*?)\|", "\n".join(sections), re.M)
    quoted = [
        quote for cell in cells for column in cell for quote in re.findall("`([^`]+)`", column)
    ]
    # Of a limit, the second column quotes reasons; of the rest, the first quotes messages.
    pieces = [
        piece.strip(" :;()[],")
        for quote in quoted
        if not quote.startswith(("--", "HF_", "generation_config"))
        for piece in re.split(r"…|\b(?:N|M|S)\b", quote)
    ]
    pieces = [piece for piece in pieces if len(piece) > 3]
    assert len(pieces) > 40
    assert not [piece for piece in pieces if piece not in said]


def test_no_variable_is_invented() -> None:
    known = {variable for variable, _ in table_of_options().values()}
    clients = {"HEADRACE_TARGET", "HEADRACE_CA", "HEADRACE_TOKEN"}
    clients |= {"HEADRACE_CLIENT_CERT", "HEADRACE_CLIENT_KEY", "HEADRACE_TOKEN_FILE"}
    for document in DOCUMENTS:
        named = set(re.findall(r"\bHEADRACE_[A-Z_]+\b", document.read_text(encoding="utf-8")))
        assert named <= known | clients, document
    assert not {name for name in os.environ if name in known}
