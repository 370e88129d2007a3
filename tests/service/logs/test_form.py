"""How what is said looks, and how often it is."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import copy_context
from typing import Any

import grpc
import pytest

from engine.logs.records import MAX_MESSAGE, MAX_TRACEBACK
from service.logs.context import current_adapter, current_request, current_trace
from service.logs.form import Console, Json
from service.logs.limits import BURST, LogLimits

SECRET = "s3cret-0123456789"


def record(
    message: str, *arguments: Any, name: str = "service.x", error: BaseException | None = None
) -> logging.LogRecord:
    caught = None
    if error is not None:
        try:
            raise error
        except BaseException:
            caught = sys.exc_info()
    made = logging.LogRecord(name, logging.WARNING, "x.py", 1, message, arguments, caught)
    made.created = 86400.5
    return made


def both(made: logging.LogRecord) -> str:
    return Console().record(made, 0) + "\n" + Json().record(made, 0)


def test_json_is_one_object_a_line() -> None:
    made = record("one\ntwo %s", "é\x1b[2J\u2028", error=ValueError("why"))
    line = Json().record(made, 3)
    assert line.isascii()
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("traceback").endswith("ValueError: why\n")
    assert found == {
        "time": "1970-01-02T00:00:00.500Z",
        "level": "warning",
        "process": "server",
        "logger": "service.x",
        "message": "one\ntwo é\x1b[2J\u2028 (and 3 like it before, left out)",
    }
    made.processName = "engine"
    assert json.loads(Json().record(made, 0))["process"] == "engine"
    assert json.loads(Json().said("Ready.\nListening."))["message"] == "Ready.\nListening."


def test_a_line_of_the_console_is_one_line() -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR a: forged\r\x1b[2J\x85\u2028"
    line = Console().record(record("%s", forged), 0)
    assert len(line.splitlines()) == 1
    assert line.endswith(
        "WARNING service.x: x\\n2026-01-01 00:00:00,000 ERROR a: forged\\r\\x1b[2J\\x85\\u2028"
    )
    first, *rest = Console().record(record("failed", error=ValueError(forged)), 0).splitlines()
    assert first.endswith("WARNING service.x: failed")
    assert all(line.startswith("    ") for line in rest)
    assert Console().said("Ready.\n\nTry\x1b it") == "Ready.\n\nTry\\x1b it"


def test_records_tell_what_they_belong_to() -> None:
    def tell() -> tuple[dict[str, str], str]:
        current_request.set("r\n1")
        current_trace.set(("t" * 32, "s" * 16))
        return json.loads(Json().record(record("x"), 0)), Console().record(record("x"), 0)

    found, line = copy_context().run(tell)
    assert (found["request_id"], found["trace_id"], found["span_id"]) == (
        "r\n1",
        "t" * 32,
        "s" * 16,
    )
    assert line.endswith(f"WARNING service.x: x [request=r\\n1 trace={'t' * 32}]")
    assert "adapter" not in found

    def tell_with_adapter() -> None:
        current_adapter.set("a/1")
        nonlocal found, line
        found, line = tell()

    copy_context().run(tell_with_adapter)
    assert found["adapter"] == "a/1"
    assert line.endswith(f"x [request=r\\n1 adapter=a/1 trace={'t' * 32}]")
    made = record("x")
    made.request_id = "own"

    def tell_own() -> dict[str, str]:
        current_adapter.set("of another")
        return json.loads(Json().record(made, 0))

    assert copy_context().run(tell_own)["request_id"] == "own"
    assert "adapter" not in copy_context().run(tell_own)
    made.adapter = "mine"
    assert copy_context().run(tell_own)["adapter"] == "mine"
    assert "trace_id" not in json.loads(Json().record(record("x"), 0))


def test_lines_are_bounded() -> None:
    made = record("%s", "a" * 1_000_000, error=ValueError("b" * 1_000_000))
    assert len(Console().record(made, 0)) < MAX_MESSAGE + MAX_TRACEBACK + 1000


@pytest.mark.parametrize(
    "made",
    [
        record("authorization: Bearer %s", SECRET),
        record("%r", b"bearer " + SECRET.encode() + b"\xe9"),
        record("Invalid encoding on %s", SECRET.encode(), name="grpc._cython.cygrpc"),
        record(
            "Invalid encoding on %s",
            SECRET,
            name="grpc._cython.cygrpc",
            error=UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
        ),
        record(
            f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{SECRET}')>",
            name="asyncio",
            error=ValueError(SECRET),
        ),
        record(f"Exception in callback f('{SECRET}')", name="asyncio", error=KeyError(SECRET)),
    ],
)
def test_secrets_do_not_reach_the_log(made: logging.LogRecord) -> None:
    assert SECRET not in both(made)
    assert "WARNING" in both(made)


def test_the_fact_and_its_place_do() -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "wrong")
    line = Console().record(
        record("Invalid encoding on %s", b"\xff", name="grpc._cython.cygrpc", error=error), 0
    )
    assert "Invalid encoding on …" in line
    assert "test_form.py" in line
    assert line.endswith("UnicodeDecodeError")


def test_that_a_caller_has_gone_is_no_line() -> None:
    gone = grpc._cython.cygrpc.ExecuteBatchError("Failed")  # type: ignore[attr-defined]
    name = "grpc._cython.cygrpc"
    assert LogLimits().admit(record("raised by a method", name=name, error=gone)) is None
    assert LogLimits().admit(record("raised by a method", name=name, error=ValueError())) == 0
    assert LogLimits().admit(record("raised by a method", error=gone)) == 0


def test_a_place_in_the_code_is_heard_once_a_second() -> None:
    now = 0.0
    limits = LogLimits(lambda: now)
    made, other = record("x"), record("x")
    other.lineno = 2
    assert [limits.admit(made) for _ in range(BURST + 7)] == [0] * BURST + [None] * 7
    assert limits.admit(other) == 0
    now = 1.0
    assert limits.admit(made) == 7
    assert limits.admit(made) is None
    now = 1e6
    assert [limits.admit(made) for _ in range(BURST + 1)] == [1] + [0] * (BURST - 1) + [None]
    made.levelno = logging.DEBUG
    assert limits.admit(made) == 0
