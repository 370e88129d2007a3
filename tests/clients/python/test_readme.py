from __future__ import annotations

import re
from pathlib import Path

import headrace
import pytest

from tests.clients.python.scripted import ScriptedServer

README = Path(headrace.__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.setenv("HEADRACE_TARGET", server.target)
    exec(compile(example, str(README), "exec"), {"__name__": "example"})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 11
