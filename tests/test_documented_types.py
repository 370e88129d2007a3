"""The Python of README and docs is well typed as its readers' checkers see it: mypy and pyright,
both strict. Where a block goes on from another, the document is one program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from headrace.options import GenerationOptions

from tests.service.readme import ROOT, code_blocks

APART = ("README.md", "clients/python/README.md", "docs/chat.md", "docs/extending.md")
"""Documents whose blocks are a program each."""
GIVEN = {
    "docs/extending.md": """\
from engine.contract.option_fields import option
from service.config import PROCESS
""",
    "docs/fleet.md": "import headrace\n",
}
"""What a document's text gives a block that does not say it itself."""
LEFT_OUT = {"docs/gateway.md"}  # of openai's library, which is not installed here
UNTYPED = {"docs/offline.md"}  # it calls transformers, whose functions have no types
DOCUMENTS = [
    document
    for path in (ROOT / "README.md", ROOT / "clients/python/README.md", *ROOT.glob("docs/*.md"))
    if code_blocks("python", path) and (document := str(path.relative_to(ROOT))) not in LEFT_OUT
]


def programs(document: str) -> list[str]:
    """What the checkers see of a document."""
    given = GIVEN.get(document, "")
    blocks = code_blocks("python", ROOT / document)
    if document in APART:
        return [block if "import " in block else given + block for block in blocks]
    return [given + "\n".join(blocks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All programs, as files."""
    folder = tmp_path_factory.mktemp("documented")
    for document in DOCUMENTS:
        for number, program in enumerate(programs(document)):
            if document in UNTYPED:
                program = f"# pyright: standard\n# mypy: allow-untyped-calls\n{program}"
            (folder / f"{document[:-3].replace('/', '_').lower()}_{number}.py").write_text(program)
    (folder / "none_for_any_option.py").write_text(
        "import headrace\n\nwith headrace.Client() as client:\n    client.generate('x', "
        + ", ".join(f"{option}=None" for option in get_type_hints(GenerationOptions))
        + ")\n"
    )
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": SOURCES})
    )
    return folder


SOURCES = [str(ROOT), str(ROOT / "clients/python/src")]


@pytest.mark.timeout(600)  # mypy reads all of torch's types where it has no cache
@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--strict", "--follow-imports=silent"],
        ["basedpyright", "--pythonpath", sys.executable],
    ],
    ids=["mypy", "pyright"],
)
def test_the_documented_python_is_well_typed(checker: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *checker, "."],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MYPYPATH": os.pathsep.join(SOURCES)},
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_no_block_is_left_out() -> None:
    assert len(DOCUMENTS) >= 8
