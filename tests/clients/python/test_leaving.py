"""Clients leave nothing behind: not when they are dropped, not in a child of their process, not at
the interpreter's end. Each program of `leaving.py` runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clients.python.scripted import WAIT, ScriptedServer

PROGRAM = Path(__file__).with_name("leaving.py")
KINDS = ("unused", "call", "stream", "session", "lease", "batch", "several")
STATES = ("unused", "idle", "several", "several idle")
BUSY = ("call", "stream", "session", "lease")


def run(
    program: str, server: ScriptedServer, argument: str, seconds: float = 90, forks: bool = False
) -> Any:
    """What a program tells. `forks`: gRPC is told to support them."""
    done = subprocess.run(
        [sys.executable, PROGRAM, program, server.target, argument],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | ({"GRPC_ENABLE_FORK_SUPPORT": "1"} if forks else {}),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "was destroyed" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def check_dropped(told: dict[str, Any], server: ScriptedServer, most_bytes: int) -> None:
    threads, descriptors = told["after"]
    assert threads <= told["before"][0] + 2, told  # gRPC's own pool breathes
    assert descriptors <= told["before"][1] + 2, told
    assert told["grown"] < most_bytes, told
    assert told.get("tasks", 1) == 1
    server.wait_for(lambda: not server.live)


@pytest.mark.parametrize("program", ["dropped", "dropped_async"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dropped_is_collected_and_its_request_cancelled(
    program: str, kind: str, server: ScriptedServer
) -> None:
    check_dropped(run(program, server, f"{kind}*200"), server, 12 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dropped", "dropped_async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_clients_are_collected(program: str, kind: str, server: ScriptedServer) -> None:
    check_dropped(run(program, server, f"{kind}*1000", 600), server, 24 << 20)


def check_ends(children: list[list[Any]], said: str) -> None:
    for child in children:
        assert said in child[0], children
        assert child[1] < 1.0, children


@pytest.mark.parametrize("state", STATES)
def test_a_client_without_open_calls_works_in_children(state: str, server: ScriptedServer) -> None:
    told = run("forked", server, state)
    check_ends(told["old"], "a b")
    check_ends(told["new"], "a b")
    assert told["parent"] == "a b"


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("state", BUSY)
def test_a_client_with_open_calls_says_so_in_children(
    state: str, forks: bool, server: ScriptedServer
) -> None:
    told = run("forked", server, state, forks=forks)
    check_ends(told["old"], "FailedPreconditionError: this client had calls open")
    # Not "a b" without support: one child in a few hundred would die.
    refused = "FailedPreconditionError: this process was forked while calls to a server were open"
    check_ends(told["new"], "a b" if forks else refused)
    assert told["parent"] == "a b"
    server.wait_for(lambda: not server.live)


@pytest.mark.parametrize("state", ["session", "lease"])
def test_sessions_and_streams_stay_with_the_process_that_opened_them(
    state: str, server: ScriptedServer
) -> None:
    told = run("forked_session", server, state)
    for child, what in zip(told["said"], ["session", "session", "stream"], strict=False):
        check_ends([child], f"FailedPreconditionError: this {what} belongs to the process")
    check_ends(told["said"][3:], "closed")
    assert told["parent"] == ["hold", "hold"]


def test_a_child_recovers_from_an_outage(server: ScriptedServer) -> None:
    with subprocess.Popen(
        [sys.executable, PROGRAM, "asked_in_child", server.target, ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def ask() -> str:
            program.stdin.write("\n")  # type: ignore[union-attr]
            return program.stdout.readline().strip()  # type: ignore[union-attr]

        assert ask() == "a b"
        server.stop()
        assert ask() == "UNAVAILABLE"
        again = ScriptedServer(server.target)
        try:
            assert ask() == "a b"
        finally:
            again.stop()
        program.stdin.close()
        assert json.loads(program.stdout.read()) == "over"


@pytest.mark.parametrize("state", ["unused", "closed"])
def test_a_client_for_asyncio_works_in_children(state: str, server: ScriptedServer) -> None:
    told = run("forked_async", server, state)
    check_ends(told["old"], "a b")
    check_ends(told["new"], "a b")
    assert told["parent"] == "a b"


def test_a_client_for_asyncio_that_was_connected_says_so_in_children(
    server: ScriptedServer,
) -> None:
    told = run("forked_async", server, "used")
    check_ends(told["old"], "FailedPreconditionError: this process was forked while a client for")
    check_ends(told["new"], "FailedPreconditionError: this process was forked while a client for")
    assert told["parent"] == "a b"


@pytest.mark.parametrize("state", [*STATES, *BUSY])
def test_the_interpreter_ends_at_once_whatever_is_open(state: str, server: ScriptedServer) -> None:
    ended_at = run("left_open", server, state)
    assert time.time() - ended_at < 1.0


def test_a_client_has_no_thread_before_it_needs_one(server: ScriptedServer) -> None:
    told = run("dropped", server, "unused*1", WAIT)
    assert told["before"] == told["after"]
