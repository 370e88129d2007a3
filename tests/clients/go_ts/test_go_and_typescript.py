"""The Go session program, built and run against a server, beside Python's stub.

Each test runs over TCP and a Unix socket. `headrace_address` is the real server around a fake
engine; what only a server that breaks the contract can show is asked of `scripted_address`, a
scripted one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as service_pb
from headrace.v1 import generation_service_pb2_grpc as service_grpc

from tests.clients.go_ts.programs import (
    RUN_SECONDS,
    Addresses,
    Run,
    go_command,
    run_program,
    running_server,
)

PROMPTS = ["Once upon a time", "The old mill's wheel", "né 😀 \u2028 <&>"]
MAX_TOKENS = 24
# Builds may start from empty caches.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


# --- the programs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return go_command("session", tmp_path_factory.mktemp("go"))


@pytest.fixture(params=["go"])
def program(request: pytest.FixtureRequest) -> list[str]:
    """The command that runs a session program."""
    command: list[str] = request.getfixturevalue(f"{request.param}_program")
    return command


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted_addresses() -> Iterator[Addresses]:
    with running_server("scripted_server") as addresses:
        yield addresses


@pytest.fixture(scope="module")
def service_addresses() -> Iterator[Addresses]:
    with running_server("service_server") as addresses:
        yield addresses


@pytest.fixture(params=["tcp", "unix"])
def scripted_address(request: pytest.FixtureRequest, scripted_addresses: Addresses) -> str:
    address: str = getattr(scripted_addresses, request.param)
    return address


@pytest.fixture(params=["tcp", "unix"])
def headrace_address(request: pytest.FixtureRequest, service_addresses: Addresses) -> str:
    """The real server, around a fake engine."""
    address: str = getattr(service_addresses, request.param)
    return address


# --- Python's own stub ----------------------------------------------------------------------------


@dataclass
class Output:
    """What a request came to, with the names of the programs' JSON lines."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] | None = None


def python_outputs(address: str, prompts: Sequence[str], max_tokens: int) -> list[Output]:
    """The outputs of greedy requests, one session, by the synchronous Python stub."""
    commands = [
        service_pb.StreamResultRequest(
            command_id=number,
            add=service_pb.AddCommand(
                spec=pb.GenerationSpec(
                    request_id=f"python-{uuid.uuid4().hex}",
                    text=pb.TextInput(text=prompt),
                    sampling=pb.SamplingOptions(temperature=0),
                    stop=pb.StopOptions(max_tokens=max_tokens),
                )
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    outputs = {command.add.spec.request_id: Output() for command in commands}
    names: dict[int, str] = {}
    with grpc.insecure_channel(address) as channel:
        stub = service_grpc.GenerationServiceStub(channel)
        for response in stub.StreamResult(iter(commands), timeout=RUN_SECONDS):
            assert not response.rejections
            for event in response.events:
                if event.HasField("accepted"):
                    names[event.request_number] = event.accepted.request_id
                _take(event, outputs[names[event.request_number]])
    assert all(output.finish_reason for output in outputs.values())
    return list(outputs.values())


def _take(event: pb.ResultEvent, output: Output) -> None:
    assert not event.HasField("failed")
    output.text += event.delta.text
    output.token_ids += event.delta.token_ids
    if event.HasField("finished"):
        name = pb.FinishReason.Name(event.finished.reason)
        output.finish_reason = name.removeprefix("FINISH_REASON_")
        output.usage = _usage(event.finished.usage)


def _usage(usage: pb.Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }


# --- running a program ----------------------------------------------------------------------------


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that runs beside the test, its three streams open; killed if it is still there."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def without_cache(outputs: Sequence[Output]) -> list[Output]:
    """The outputs with cached_tokens as 0: how much is cached depends on what ran before."""
    return [
        Output(o.text, o.token_ids, o.finish_reason, o.usage and {**o.usage, "cached_tokens": 0})
        for o in outputs
    ]


def outputs_of(run: Run) -> list[Output]:
    """The lines of --json without the ids."""
    return [
        Output(line["text"], line["token_ids"], line["finish_reason"], line["usage"])
        for line in run.lines
    ]


GREEDY = ["--temperature", "0", "--max-tokens", str(MAX_TOKENS)]


# --- requests that finish -------------------------------------------------------------------------


def test_outputs_are_those_of_pythons_stub(program: list[str], headrace_address: str) -> None:
    expected = python_outputs(headrace_address, PROMPTS, MAX_TOKENS)

    run = run_program(program, headrace_address, *GREEDY, "--json", *PROMPTS)

    assert run.err == ""
    assert run.code == 0
    assert without_cache(outputs_of(run)) == without_cache(expected)
    for output in outputs_of(run):
        assert output.usage is not None
        assert output.usage["completion_tokens"] == len(output.token_ids)


def test_prompts_come_from_the_lines_of_the_input(
    program: list[str], headrace_address: str
) -> None:
    prompts = [f"Line {number}" for number in range(64)]
    expected = python_outputs(headrace_address, prompts, MAX_TOKENS)

    run = run_program(program, headrace_address, *GREEDY, "--json", lines="\n\n".join(prompts))

    assert (run.code, run.err) == (0, "")
    assert without_cache(outputs_of(run)) == without_cache(expected)
    assert len({line["request_id"] for line in run.lines}) == len(prompts)


def test_deltas_are_printed_with_their_requests_number(
    program: list[str], headrace_address: str
) -> None:
    expected = python_outputs(headrace_address, PROMPTS, MAX_TOKENS)

    run = run_program(program, headrace_address, *GREEDY, *PROMPTS)

    assert (run.code, run.err) == (0, "")
    for number, output in enumerate(expected, start=1):
        prefix = f"[{number}] "
        told = [x.removeprefix(prefix) for x in run.out.split("\n") if x.startswith(prefix)]
        *deltas, end = told
        assert "".join(json.loads(delta) for delta in deltas) == output.text
        assert end.startswith(f"finished: {output.finish_reason} (")


# --- requests that do not -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"caf\xe9", "session: line 2 is not UTF-8\n"),
        (b"x" * (4 * 2**20 + 1), f"session: line 2 has more than {4 * 2**20} bytes\n"),
    ],
    ids=["not UTF-8", "too long"],
)
def test_a_line_that_cannot_be_sent_leaves_the_others_alone(
    program: list[str], scripted_addresses: Addresses, bad: bytes, complaint: str
) -> None:
    done = subprocess.run(
        [*program, "--target", scripted_addresses.tcp],
        input=b"\n".join([b"good", bad, "né".encode(), b"last"]),
        capture_output=True,
        timeout=RUN_SECONDS,
    )

    assert (done.returncode, done.stderr.decode()) == (1, complaint)
    assert done.stdout.decode().count("finished: LENGTH") == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_output_that_cannot_be_written_ends_the_program(
    program: list[str], scripted_addresses: Addresses, flags: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*program, "--target", scripted_addresses.tcp, *flags, "one", "two"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=RUN_SECONDS,
        )

    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("session: standard output: ")


def test_output_that_nobody_reads_ends_the_program(
    program: list[str], scripted_addresses: Addresses
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [*program, "--target", scripted_addresses.tcp, "one"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=RUN_SECONDS,
        )

    assert done.returncode != 0
    assert len(done.stderr.splitlines()) <= 1  # Go ends by the signal, which says nothing


def test_a_refused_request_leaves_the_others_alone(
    program: list[str], headrace_address: str
) -> None:
    good = PROMPTS[:2]
    expected = python_outputs(headrace_address, good, MAX_TOKENS)

    run = run_program(program, headrace_address, *GREEDY, "--json", good[0], "", good[1])

    assert run.code == 1
    first, refused, second = run.lines
    assert without_cache([outputs_of(run)[0], outputs_of(run)[2]]) == without_cache(expected)
    assert "error" not in first
    assert "error" not in second
    assert refused["token_ids"] == []
    assert refused["finish_reason"] is None
    assert refused["usage"] is None
    assert refused["error"]["code"] == "INVALID_ARGUMENT"
    assert any(detail.startswith("reason: ") for detail in refused["error"]["details"])
    assert any(detail.startswith("field: ") for detail in refused["error"]["details"])
    assert run.err.startswith("[2] refused: INVALID_ARGUMENT: ")


@pytest.mark.parametrize("half_closed", [True, False], ids=["half-closed", "open"])
def test_an_interrupt_cancels_the_live_requests(
    program: list[str], headrace_address: str, half_closed: bool
) -> None:
    """By the Cancel RPC when the stream is half-closed, else by `cancel` on the stream."""
    prompts = PROMPTS[:2]
    command = [*program, "--target", headrace_address, "--max-tokens", "100000"]
    with started([*command, *prompts] if half_closed else command) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        if not half_closed:
            running.stdin.write("".join(f"{prompt}\n" for prompt in prompts))
            running.stdin.flush()
        begun = set()
        while begun != {"[1]", "[2]"}:
            begun.add(running.stdout.readline()[:3])

        running.send_signal(signal.SIGINT)

        out = running.stdout.read()  # its end is the program's end: the input is still open
        assert running.stderr.read() == ""
        assert running.wait(RUN_SECONDS) == 0
    ends = [line for line in out.split("\n") if "] finished: " in line]
    assert sorted(end.split(" (")[0] for end in ends) == [
        "[1] finished: CANCELLED",
        "[2] finished: CANCELLED",
    ]


def test_an_address_where_nothing_listens(program: list[str]) -> None:
    run = run_program(program, "localhost:1", "prompt")

    assert run.code == 1
    assert "session: UNAVAILABLE: " in run.err


@pytest.mark.parametrize(
    "flags", [["--max-tokens", "-1"], ["--max-tokens", "4294967296"], ["--temperature", "warm"]]
)
def test_wrong_flags_are_refused(program: list[str], flags: list[str]) -> None:
    run = run_program(program, "localhost:1", *flags, "prompt")

    assert run.code == 2
    assert flags[0].lstrip("-") in run.err


# --- a server that fails, or breaks the contract --------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("!gap", "[1] event 5 follows 3: some are missing\n"),
        ("!repeat", "[1] event 4 came again\n"),
        ("!late", "[1] event 20 after its end\n"),
        ("!choice", "[1] event 5 is of choice 1, one choice was asked for\n"),
    ],
)
def test_events_out_of_place_are_found(
    program: list[str], scripted_address: str, prompt: str, complaint: str
) -> None:
    run = run_program(program, scripted_address, prompt, "good")

    assert run.code == 1
    assert run.err == complaint
    assert "[2] finished: LENGTH" in run.out


def test_a_failed_request_is_told_with_its_details(
    program: list[str], scripted_address: str
) -> None:
    run = run_program(program, scripted_address, "--json", "!fail", "good")

    assert run.code == 1
    details = ["reason: INTERNAL_ERROR (headrace) a=1 b=2"]
    assert run.err == f"[1] failed: INTERNAL: the step failed\n    {details[0]}\n"
    failed, good = run.lines
    assert failed["error"] == {
        "code": "INTERNAL",
        "message": "the step failed",
        "details": details,
    }
    assert failed["text"] == "fai"
    assert failed["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3}
    assert good["finish_reason"] == "LENGTH"


def test_a_stream_that_breaks_is_told_with_its_details(
    program: list[str], scripted_address: str
) -> None:
    run = run_program(program, scripted_address, "!abort", "good")

    assert run.code == 1
    assert run.err == (
        "session: UNAVAILABLE: going away\n"
        "    reason: DRAINING (headrace) a=1 b=2\n"
        "    retry after: 1.25s\n"
        "[1] the stream ended before the request\n"
        "[2] the stream ended before the request\n"
    )


def test_a_stream_that_ends_early_ends_the_program(
    program: list[str], scripted_address: str
) -> None:
    """Even while its input is open and empty."""
    with started([*program, "--target", scripted_address]) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        running.stdin.write("!unended\n")
        running.stdin.flush()
        assert running.stderr.read() == "[1] the stream ended before the request\n"
        assert running.wait(RUN_SECONDS) == 1
