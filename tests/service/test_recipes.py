"""docs/recipes.md: each line of it runs as it stands, where its tool is here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.readme import ROOT, code_blocks
from tests.service.real_server import WAIT_S, RealServer, demo_server

RECIPES = [
    block.strip()
    for block in code_blocks("sh", ROOT / "docs" / "recipes.md")
    if not block.startswith("go install")
]
DEFAULT = "127.0.0.1:50051"
# The test's own environment has buf; CI installs the others in .tools/bin.
PATH = f"{Path(sys.executable).parent}:{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}"
METHOD = re.compile(r"headrace\.v1\.GenerationService/(\w+)")


def name(recipe: str) -> str:
    found = METHOD.search(recipe)
    assert found is not None
    return f"{recipe.split()[0]} {found[1]}"


def run(command: str) -> str:
    """What a line prints."""
    tool = command.split()[0]
    if shutil.which(tool, path=PATH) is None:
        pytest.skip(f"needs {tool} on the PATH")
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def messages(printed: str) -> list[dict[str, Any]]:
    """JSON messages one after another, with the contract's names: grpcurl has these, buf others."""
    decoder, found = json.JSONDecoder(), []
    printed = printed.strip()
    while printed:
        message, end = decoder.raw_decode(printed)
        found.append(_renamed(message))
        printed = printed[end:].strip()
    return found


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), key): _renamed(one)
            for key, one in value.items()
        }
    return [_renamed(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def demo() -> RealServer:
    return demo_server()


@pytest.fixture(scope="module")
def on_a_socket(demo: RealServer) -> Path:
    return Path(demo.addresses[1].removeprefix("unix:"))


def test_there_are_recipes() -> None:
    assert [name(recipe) for recipe in RECIPES] == [
        "grpcurl Generate",
        "buf Generate",
        "grpcurl GenerateStream",
        "buf GenerateStream",
        "grpcurl StreamResult",
        "buf StreamResult",
        "ghz Generate",
        "ghz GenerateStream",
        "ghz StreamResult",
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_the_recipes(demo: RealServer, recipe: str) -> None:
    assert DEFAULT in recipe
    check(recipe, run(recipe.replace(DEFAULT, demo.addresses[0])))


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_the_recipes_on_a_unix_socket(on_a_socket: Path, recipe: str) -> None:
    if recipe.startswith("buf"):
        recipe = recipe.replace("buf curl", f"buf curl --unix-socket {on_a_socket}")
        recipe = recipe.replace(DEFAULT, "localhost")
    check(recipe, run(recipe.replace(DEFAULT, f"unix:{on_a_socket}")))


def check(recipe: str, said: str) -> None:
    """That it did what it is there for."""
    if recipe.startswith("ghz"):
        calls = re.search(r" -n (\d+) ", recipe)
        assert calls is not None
        assert f"[OK]   {calls[1]} responses" in said, said
        assert len(re.findall(r"\[\w+\]   \d+ responses", said)) == 1, said
        return
    found = messages(said)
    if name(recipe).endswith(" Generate"):
        [answer] = found
        assert 1 <= len(answer["choices"][0]["token_ids"]) <= 16
        assert re.search(r"\w", answer["choices"][0]["text"])
        return
    events = [event for message in found for event in message.get("events", ())]
    requests = 2 if "StreamResult" in recipe else 1
    assert sum("accepted" in event for event in events) == requests
    assert sum("finished" in event for event in events) == requests
    for number in {event.get("request_number") for event in events}:
        own = [event for event in events if event.get("request_number") == number]
        text = "".join(event.get("delta", {}).get("text", "") for event in own)
        assert re.search(r"\w", text), own
