"""What SECURITY.md promises that no other test checks, and that the tests it names exist."""

from __future__ import annotations

import ast
import hmac
import importlib.metadata
import re
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.audit import CONSTRAINTS, audit, pins
from service.door import callers_file as callers

ROOT = Path(__file__).resolve().parents[1]
SECURITY = (ROOT / "SECURITY.md").read_text()
OURS = [
    path
    for folder in ("engine", "service", "clients/python/src/headrace")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "/v1/" not in str(path)
]
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EVALUATING = {"eval", "exec"}
PICKLING_CALLS = {
    "send_object_list",
    "recv_object_list",
    "broadcast_object_list",
    "all_gather_object",
}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def test_each_class_of_advisory_names_a_test_that_exists() -> None:
    table = SECURITY[SECURITY.index("<!-- advisories -->") : SECURITY.index("<!-- /advisories -->")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for row in rows:
        named = re.findall(r"`(tests/\S+?\.py)::(\w+)`", row)
        assert named, row
        for path, test in named:
            assert re.search(rf"def {test}\(", (ROOT / path).read_text()), f"{path}::{test}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = []
    for path, node in nodes():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        found += [(path, name) for name in names if name in UNPICKLING]
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            is_plain = isinstance(called, ast.Name) and name in EVALUATING
            if is_plain or name in PICKLING_CALLS:
                found.append((path, name))
            if name == "load" and getattr(getattr(called, "value", None), "id", "") == "torch":
                found.append((path, "torch.load"))
    assert not found


def test_no_check_is_an_assert() -> None:
    assert not [(path, node.lineno) for path, node in nodes() if isinstance(node, ast.Assert)]


def test_no_code_of_a_model_is_trusted() -> None:
    given = [
        node.value
        for _, node in nodes()
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
    ]
    assert given
    assert all(isinstance(value, ast.Constant) and value.value is False for value in given)


def test_every_token_is_compared_with_all_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(
        f'[[callers]]\nidentity = "c{n}"\ntoken_sha256 = "{n:064x}"\nservices = ["*"]\n'
        for n in range(1, 6)
    )
    table = callers.parse_callers(text)
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(callers.hmac, "compare_digest", counting)
    counts = []
    for number in (1, 3, 5, 9):
        compared.clear()
        table.by_digest(number.to_bytes(32, "big"))
        counts.append(len(compared))
    assert counts == [5, 5, 5, 5]


def test_protobuf_is_not_older_than_its_advisory() -> None:
    version = importlib.metadata.version("protobuf")
    assert tuple(map(int, version.split(".")[:3])) >= (6, 33, 5)
    assert '"protobuf>=6.33.5' in (ROOT / "pyproject.toml").read_text()


# ---- the audit -----------------------------------------------------------------------------------


def test_pins_are_read() -> None:
    found = pins("# a comment\na-b==1.0\nC.d==2.0.1 ; python_version > '3'\nnot pinned\n")
    assert found == {"a-b": "1.0", "C.d": "2.0.1"}
    assert "grpcio" in pins(CONSTRAINTS.read_text())


def test_an_audit_tells_what_is_known_and_what_was_not_asked() -> None:
    def ask(name: str, version: str) -> Sequence[Mapping[str, Any]]:
        if name == "gone":
            raise urllib.error.HTTPError("", 404, "no", None, None)  # type: ignore[arg-type]
        return [{"id": "CVE-1", "summary": "bad", "fixed_in": ["2"]}] if name == "bad" else []

    said: list[str] = []
    assert audit({"good": "1", "bad": "1", "gone": "1"}, ask, said.append) == 1
    assert said == [
        "bad 1: CVE-1: bad (mended in 2)",
        "2 of 3 packages were asked about; 1 known vulnerabilities",
        "could not be asked: gone (404)",
    ]


def test_without_a_network_an_audit_soon_gives_up_and_says_so() -> None:
    asked: list[str] = []

    def ask(name: str, version: str) -> Sequence[Mapping[str, Any]]:
        asked.append(name)
        raise urllib.error.URLError("no network")

    said: list[str] = []
    assert audit(dict.fromkeys("abcdefgh", "1"), ask, said.append) == 0
    assert asked == ["a", "b", "c"]
    assert said[-1] == "could not be asked: a, b, c, d, e, f, g, h"
