"""`headrace tour`: its parts, what it says of them, and its end: against a model whose replies are
written down, the demo model, a server under load, and none.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from headrace.cli import tour as module
from headrace.cli.app import app
from typer.testing import CliRunner, Result

from engine.contract.errors import QueueFullError
from tests.clients.python.talking import ENDLESS, call, talking
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.door.callers_file import entry, replace
from tests.service.fake_engine import FakeEngine, byte_tokenizer
from tests.service.helpers import Harness, serving, until
from tests.service.real_server import (
    WAIT_S,
    RealServer,
    clean_environment,
    demo_server,
    real_server,
)

COMMAND = [sys.executable, "-c", "from headrace_command import main; main()"]
FORM = '{"name": "Anna", "age": 36, "city": "Ulm"}'
ANSWERS = [f"It is thing {number}." for number in range(8)]
REPLIES = (
    " there was a mill.",
    call("read_gauge", '{"place": "Ulm"}'),
    "The Danube in Ulm is 3 m high.",
    FORM,
    *ANSWERS,
    f"{'a mill ' * 60}{ENDLESS}",
)
TITLES = (
    "1. A stream: ",
    "2. A tool: ",
    "3. A form: ",
    "4. 8 requests at once, ",
    "5. A cancel: ",
)


@asynccontextmanager
async def talking_slowly(
    *replies: str, step_s: float = 0.003, **options: Any
) -> AsyncIterator[Harness]:
    """As `talking`, with steps of some milliseconds, as a model's are: a client is in time for
    what it does meanwhile.
    """

    async def step(engine: FakeEngine) -> None:
        while True:
            engine.step()
            await asyncio.sleep(step_s)

    async with talking(*replies, auto=False, **options) as h:
        stepping = asyncio.create_task(step(h.engine))
        yield h
        stepping.cancel()


async def toured(harness: Harness, *options: str) -> Result:
    """The command in this process."""
    words = ["--target", harness.server.addresses[0], *options, "tour"]
    return await asyncio.to_thread(CliRunner().invoke, app, words)


def sections(said: str) -> list[str]:
    """What is said of each part."""
    assert [title in said for title in TITLES] == [True] * 5, said
    parts = re.split(r"^(?=\d\. )", said, flags=re.M)[1:]
    # A story may have paragraphs; what happened inside ends a part.
    parts = [re.sub(r"(?ms)^(inside: [^\n]*)\n\n.*", r"\1", part) for part in parts]
    assert len(parts) == 5
    return parts


def inside(part: str) -> str:
    """What happened inside."""
    [line] = [line for line in part.splitlines() if line.startswith("inside: ")]
    return line


async def test_each_part_shows_what_the_model_says_and_the_server_s_numbers() -> None:
    async with talking_slowly(*REPLIES) as h:
        h.engine.blocks = (3, 4096)
        done = await toured(h)
        assert h.engine.num_live == 0
        asked = h.engine.submitted
    assert (done.exit_code, done.stderr) == (0, "")
    stream, tool, form, many, cancel = sections(done.stdout)
    assert "> Once upon a time\n there was a mill.\n" in stream
    assert re.search(r"waited [\d.]+ m?s in the queue; its 16 tokens of prompt", inside(stream))
    assert "the batch had " in inside(stream)
    assert "held 3 of the KV cache's 4096 blocks" in inside(stream)
    assert 'read_gauge {"place": "Ulm"}: 3 m\nThe Danube in Ulm is 3 m high.\n' in tool
    length = len(asked[1].prompt), len(asked[2].prompt)
    assert f" of its {length[1]} tokens came from the prefix cache" in inside(tool)
    assert "by the format hermes" in inside(tool)
    assert asked[1].grammar is not None
    assert asked[2].grammar is not None, "it may call again, and then fits the schema"
    assert f"\n{FORM}\n" in form
    assert "read here by json.loads: name='Anna', age=36, city='Ulm'" in inside(form)
    assert f"in each of {len(FORM) + 1} steps" in inside(form)
    for answer in ANSWERS:
        assert f"?  {answer}\n" in many
    tokens = sum(len(answer) + 1 for answer in ANSWERS)
    assert f"inside: {tokens} tokens in " in many
    assert "one stream of one connection carried them all" in inside(many)
    assert re.search(rf"took \d+ steps, which made {tokens} tokens", inside(many))
    assert "> Once upon a time\na mill a" in cancel
    assert re.search(r"sent when \d+ tokens of 512 had been read; ", inside(cancel))
    assert re.search(r"between two steps, with \d+; its blocks", inside(cancel))
    assert "requests held 3 before, and 3 now" in inside(cancel)
    assert "\n5 of 5 parts in " in done.stdout
    limits = {request.time_limit_s for request in asked}
    assert all(limit and limit <= 9 for limit in limits)


async def test_the_batch_of_eight_is_told_where_it_lasts() -> None:
    async with talking_slowly(*REPLIES, step_s=0.03) as h:  # 17 steps: the load is told in between
        done = await toured(h)
    assert "batch had up to 8 requests at once" in inside(sections(done.stdout)[3])


# ---- what a server lacks -------------------------------------------------------------------------


async def test_parts_that_the_server_lacks_are_passed_over_with_its_reason() -> None:
    async with serving(reply_parser="none") as h:
        done = await toured(h)
    assert done.exit_code == 0
    _, tool, *others = sections(done.stdout)
    assert "passed over: " in tool
    assert "--reply-parser auto" in tool, "the remedy"
    assert not [part for part in others if "passed over" in part]
    assert "\n4 of 5 parts in " in done.stdout


async def test_a_model_without_a_chat_template_is_asked_in_plain_text() -> None:
    async with serving(tokenizer=byte_tokenizer(chat_template=None)) as h:
        done = await toured(h)
        prompts = [bytes(request.prompt) for request in h.engine.submitted]
    assert done.exit_code == 0
    assert b"What is a river?" in prompts
    assert "chat_template.jinja" in sections(done.stdout)[1]
    assert "\n4 of 5 parts in " in done.stdout


async def test_a_model_without_a_tokenizer_has_no_part_and_that_is_said() -> None:
    async with serving(has_tokenizer=False) as h:
        done = await toured(h)
    assert done.exit_code == 0
    assert done.stdout.count("passed over: ") == 5
    assert "\n0 of 5 parts in " in done.stdout


async def test_without_statistics_nothing_is_said_of_the_whole_server() -> None:
    async with talking_slowly(*REPLIES, control=False) as h:
        done = await toured(h)
    assert done.exit_code == 0
    stream, _, _, many, cancel = map(inside, sections(done.stdout))
    assert "blocks" not in stream + cancel
    assert "its engine took" not in many
    assert "\n5 of 5 parts in " in done.stdout


# ---- a busy server -------------------------------------------------------------------------------


async def test_a_queue_that_is_full_is_passed_over() -> None:
    async with talking_slowly(*REPLIES[1:]) as h:
        h.engine.refuse_next += [QueueFullError(1024, 1.0)]
        done = await toured(h)
    assert done.exit_code == 0
    stream, *others = sections(done.stdout)
    assert "passed over, the server is busy: " in stream
    assert not [part for part in others if "passed over" in part]
    assert "(the stream above" not in done.stdout


async def test_a_server_that_answers_nothing_in_time_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CALL_S", 0.3)
    async with serving(FakeEngine(auto=False), reply_parser="hermes") as h:
        done = await toured(h)
        sent = {request.request_id for request in h.engine.submitted}
        await until(lambda: set(h.engine.cancelled) == sent)
    assert done.exit_code == 0
    assert done.stdout.count("passed over, the server is busy: ") == 5
    assert "\n0 of 5 parts in " in done.stdout


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            0,
            (
                "no token came: its time limit was reached",
                "it is not whole: its time limit was",
                "?  its time limit was",
                "it ended before it was cancelled: its time limit was",
            ),
        ),
        (3, ("the time limit was reached, the server", "the time limit of 8 requests was reached")),
    ],
)
async def test_a_request_that_reaches_its_time_limit_says_so(
    steps: int, words: tuple[str, ...]
) -> None:
    engine = FakeEngine(auto=False)
    taken = Counter[str]()
    async with serving(engine, reply_parser="none") as h:
        touring = asyncio.create_task(toured(h))
        while not touring.done():
            for request in engine.submitted:
                if taken[request.request_id] >= steps:
                    engine.time_out(request.request_id)
                taken[request.request_id] += 1
            engine.step()
            await asyncio.sleep(0.01)
        done = await touring
    assert done.exit_code == 0
    assert [one in done.stdout for one in words] == [True] * len(words), done.stdout


async def test_the_tour_s_time_bounds_it_whatever_the_parts_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TOUR_S", 1.2)
    monkeypatch.setattr(module, "_CALL_S", 0.4)
    async with serving(FakeEngine(auto=False), reply_parser="hermes") as h:
        done = await toured(h)
    assert done.exit_code == 0
    assert "the tour's minute is over" in done.stdout


@pytest.fixture
def loaded() -> Iterator[RealServer]:
    """A server with the demo model that three times as many requests keep busy as it runs."""
    words = ("--listen", "127.0.0.1:0", "--max-requests-per-batch", "8")
    with real_server(*words) as server:
        server.wait_until_ready()
        bench = ["bench", "--concurrency", "24", "--duration", "120", "--no-progress"]
        load = subprocess.Popen(
            [*COMMAND, "--target", server.addresses[0], *bench],
            stdout=subprocess.DEVNULL,
            env=clean_environment(),
        )
        yield server
        load.kill()
        load.wait(WAIT_S)


@pytest.mark.timeout(180)
def test_under_load_it_ends_within_its_minute(loaded: RealServer) -> None:
    began = time.monotonic()
    done = on(loaded.addresses[0], timeout=90)
    assert time.monotonic() - began < 65
    assert (done.returncode, done.stderr) == (0, "")
    sections(done.stdout)
    assert re.search(r"^\d of 5 parts in \d+ s\. ", done.stdout, re.M)


# ---- the demo model ------------------------------------------------------------------------------


def on(target: str, *words: str, timeout: float = WAIT_S, **more: str) -> Any:
    """The command as a process."""
    return subprocess.run(
        [*COMMAND, "tour", "--target", target, *words],
        capture_output=True,
        text=True,
        env=clean_environment(**more),
        timeout=timeout,
    )


def test_the_demo_model_shows_all_parts() -> None:
    done = on(demo_server().addresses[0])
    assert (done.returncode, done.stderr) == (0, "")
    stream, tool, form, many, cancel = sections(done.stdout)
    assert re.search(r"held [1-9]\d* of the KV cache's \d+ blocks", inside(stream))
    assert re.search(r"then each step made one: [1-9]\d* at [1-9]\d* a second", inside(stream))
    assert 'read_gauge {"place": "Ulm"}: 3 m\n' in tool
    assert re.search(r"\n.*3 m.*\ninside: ", tool), "the model tells what the tool said"
    assert re.search(r"so that (32|64|96|128) of its \d+ tokens came from the prefix", inside(tool))
    assert "name='Anna', age=36, city='Ulm'" in inside(form)
    assert "A river is a long stream of water" in many
    # A server tells its load every 0.1 s, in which a fast one has answered all: so by the steps.
    steps, tokens = re.findall(r"took (\d+) steps, which made (\d+) tokens", inside(many))[0]
    assert int(tokens) > 2 * int(steps)
    assert re.search(r"sent when \d+ tokens of 512", inside(cancel))
    assert "\n5 of 5 parts in " in done.stdout
    assert "\x1b" not in done.stdout


# ---- the ends ------------------------------------------------------------------------------------


def test_without_a_server_the_remedy_is_named() -> None:
    done = on("127.0.0.1:1")
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot reach a Headrace server at 127.0.0.1:1" in done.stderr
    assert "start one with `make run`" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_server_that_ends_ends_the_tour() -> None:
    async with talking(*REPLIES[:2], auto=False) as h:
        touring = asyncio.create_task(toured(h))
        await until(lambda: h.engine.submitted)
        await h.server.drain(0)
        done = await touring
    assert done.exit_code == 3
    assert "headrace: " in done.stderr


async def test_ctrl_c_cancels_what_runs_and_ends_with_a_line() -> None:
    async with talking_slowly(f"Well{ENDLESS}") as h:
        words = [*COMMAND, "--target", h.server.addresses[0], "tour"]
        process = await asyncio.create_subprocess_exec(
            *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        said = b""
        while b"Well" not in said:
            said += await asyncio.wait_for(process.stdout.read(4096), WAIT_S)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
        await until(lambda: h.engine.num_live == 0)
        assert len(h.engine.cancelled) == 1
    assert process.returncode == 130
    assert errors.decode().strip() == "headrace: interrupted"


@needs_openssl
async def test_it_takes_a_token_and_a_certificate(tmp_path: Path) -> None:
    cert, key = await asyncio.to_thread(make_certificate, tmp_path)
    callers = tmp_path / "callers.toml"
    replace(callers, entry("a", '["GenerationService", "ModelService"]', "a secret"))
    secure: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "auth_file": str(callers)}
    async with talking_slowly(*REPLIES, **secure) as h:
        denied = await toured(h, "--ca", str(cert))
        done = await toured(h, "--ca", str(cert), "--token", "a secret")
    assert denied.exit_code == 1
    assert "pass --token" in denied.stderr
    assert done.exit_code == 0, done.stderr
    assert "\n5 of 5 parts in " in done.stdout
    assert "blocks" not in done.stdout, "these are for operators alone"


@pytest.mark.parametrize(("colour", "has_codes"), [({}, True), ({"NO_COLOR": "1"}, False)])
async def test_a_terminal_has_styles_unless_they_are_not_wanted(
    colour: dict[str, str], has_codes: bool
) -> None:
    async with talking(*REPLIES) as h:
        said = await asyncio.to_thread(shown_on_a_terminal, h.server.addresses[0], colour)
    assert ("\x1b[" in said) == has_codes
    assert "5. A cancel" in said
    assert "5 of 5 parts in " in said


def shown_on_a_terminal(target: str, more: dict[str, str]) -> str:
    """What it shows on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    given = {name: value for name, value in clean_environment().items() if name != "NO_COLOR"}
    environment = {**given, "TERM": "xterm", "COLUMNS": "80", **more}
    words = [*COMMAND, "tour", "--target", target]
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b"".join(iter(read_from(ours), b""))
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    return said.decode()


def read_from(terminal: int) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            return os.read(terminal, 1 << 16)
        except OSError:  # the other side has ended
            return b""

    return read
