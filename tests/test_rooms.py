"""`scripts/rooms.py`: the house stays one that can be walked."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import rooms

MOST = {"engine": (23, 11, 85, 2), "service": (15, 10, 65, 4)}
"""Rooms, floors, arrows and files at the top. A new room is a decision: raise these with it."""

MOST_TWICE = 8
"""Names of files, and of public classes, that the server and its client both have for one thing."""


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return rooms.python_imports(rooms.python_files())


@pytest.mark.parametrize("package", MOST)
def test_a_package_has_few_rooms(package: str, imports: dict[str, set[str]]) -> None:
    found = rooms.house(package, rooms.python_files(), imports)
    count = sum(map(len, found.arrows.values()))
    seen = (len(found.arrows), found.floors, count, found.flat)
    assert all(one <= most for one, most in zip(seen, MOST[package], strict=True)), seen
    assert rooms.circles(found.arrows) == []


def test_the_document_has_the_heads_of_the_rooms(imports: dict[str, set[str]]) -> None:
    found = rooms.document(rooms.python_files(), imports)
    assert rooms.DOCUMENT.read_text(encoding="utf-8") == found, "python scripts/rooms.py --document"


def test_few_names_stand_twice() -> None:
    files, classes = rooms.twice(rooms.python_files())
    assert max(len(files), len(classes)) <= MOST_TWICE, (files, classes)
    assert [rooms.docstrings(package)[1] for package in rooms.PACKAGES] == [0, 0]


def test_no_python_module_is_in_a_circle(imports: dict[str, set[str]]) -> None:
    assert rooms.circles(imports) == []
    assert rooms.neighbours(imports) == []


def test_no_module_imports_a_test_module(imports: dict[str, set[str]]) -> None:
    found = {
        (name, other)
        for name, others in imports.items()
        for other in others
        if other.startswith("tests.") and other.rpartition(".")[2].startswith("test_")
    }
    assert not found, "what tests share is in a module of its own"


def test_no_module_of_the_rust_and_typescript_clients_is_in_a_circle() -> None:
    assert rooms.circles(rooms.rust_imports()) == []
    assert rooms.circles(rooms.typescript_imports()) == []


def test_circles_and_floors_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}
    assert rooms.circles(graph) == [["b", "c"]]
    assert rooms.groups(graph) == [["b", "c"], ["a"], ["d"]]
    assert rooms.House(graph, 0).floors == 3


def test_imports_count_wherever_they_stand(tmp_path: Path) -> None:
    texts = {
        "a": "from b import x\n",
        "b": "def f():\n    import c.d\n",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import y\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = rooms.python_imports({name: tmp_path / f"{name}.py" for name in texts})
    assert found == {"a": {"b"}, "b": {"c"}, "c": {"a"}}
    assert rooms.circles(found) == [["a", "b", "c"]]
