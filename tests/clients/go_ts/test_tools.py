"""The Go and the TypeScript programs that call a tool, built and run against the real server around
a fake engine, and with the demo model.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.go_ts.programs import (
    Addresses,
    go_command,
    run_program,
    running_server,
    typescript_command,
)
from tests.service.real_server import demo_server

# Builds may start from empty caches.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION = "How high is the Danube in Ulm?"
DEMO_CALL = 'read_gauge {"place": "Ulm"}: Ulm: 3 m\n'
CALLS = f'{DEMO_CALL}read_gauge {{"place": "Köln"}}: Köln: 5 m\n'


@pytest.fixture(scope="module", params=["go", "typescript"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if request.param == "go":
        return go_command("tools", tmp_path_factory.mktemp("go"))
    return typescript_command("tools")


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    with running_server("tool_server") as running:
        yield running


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_a_question_is_answered_with_a_tool(
    program: list[str], addresses: Addresses, where: str
) -> None:
    run = run_program(program, getattr(addresses, where), QUESTION)

    assert run.out == "I look.\nI heard Ulm: 3 m; Köln: 5 m; \n"
    assert (run.code, run.err) == (0, CALLS)


@pytest.mark.answers
def test_the_demo_model_answers_with_the_tool(program: list[str]) -> None:
    run = run_program(program, demo_server().addresses[0], QUESTION)

    assert (run.code, run.err) == (0, DEMO_CALL)
    assert "3 m" in run.out


def test_a_reply_that_was_cut_calls_nothing(program: list[str], addresses: Addresses) -> None:
    run = run_program(program, addresses.tcp, "cut short")

    assert (run.code, run.out) == (1, "I look.\n")
    assert "its calls may not be whole" in run.err
    assert "read_gauge {" not in run.err


def test_a_call_that_the_model_broke_off_is_told_to_it(
    program: list[str], addresses: Addresses
) -> None:
    run = run_program(program, addresses.tcp, "broken")

    assert run.code == 0
    assert "I heard that the arguments are no JSON object" in run.out
    assert 'read_gauge {"place": "Ulm"}' in run.err, "the whole one was run"


def test_a_choice_that_there_is_not(program: list[str], addresses: Addresses) -> None:
    run = run_program(program, addresses.tcp, "--tool-choice", "often", QUESTION)

    assert (run.code, run.out) == (1, "")
    assert "often" in run.err


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_choice_is_sent(program: list[str], addresses: Addresses, choice: str) -> None:
    run = run_program(program, addresses.tcp, "--tool-choice", choice, QUESTION)

    assert run.out == "I look.\nI heard Ulm: 3 m; Köln: 5 m; \n"
    assert (run.code, run.err) == (0, CALLS)
