"""Tools at the command line, against a real server: `headrace chat` from a pipe and at a terminal,
and `headrace generate`.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.cli.app import app
from typer.testing import CliRunner, Result

from tests.clients.python.talking import ENDLESS, call, prompts, talking
from tests.service.helpers import Harness, until

WAIT_S = 20.0
COMMAND = [sys.executable, "-c", "from headrace_command import main; main()"]
FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from os.path import join  # is not of this file
import headrace
import neighbour

@dataclass
class Place:
    name: str

def gauge(at: Place) -> str:
    """How high the river is."""
    return f"{len(at.name)} m {neighbour.NAME}"

@headrace.tool(name="stop")
def halt() -> None:
    raise KeyboardInterrupt

def _private(x): ...
'''
ULM = call("gauge", '{"at": {"name": "Ulm"}}')
TWICE = f"<think>\nHm.\n</think>\n\nI look.\n{ULM}\n{ULM}"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text('NAME = "today"')
    path = tmp_path / "gauges.py"
    path.write_text(FILE)
    return path


async def command(
    harness: Harness, *words: str | Path, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: it imports files."""
    target = ["--target", harness.server.addresses[0]]
    return await asyncio.to_thread(
        subprocess.run,
        [*COMMAND, *target, *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


async def test_a_piped_chat_has_the_answers_alone_on_stdout(tools: Path) -> None:
    async with talking(TWICE, "Three.", "Bye.") as h:
        done = await command(
            h, "chat", "--tools", tools, "--yes", stdin="how high\n/history\nbye\n"
        )
    assert (done.returncode, done.stdout) == (0, "I look.\nThree.\nBye.\n")
    assert "Hm." not in done.stderr
    one = 'gauge {"at": {"name": "Ulm"}}'
    answers = "gauge: 3 m today\ngauge: 3 m today\n"
    history = (
        f"user: how high\nassistant: I look. {one} {one}\ntool: 3 m today\ntool: 3 m today\n"
        "assistant: Three.\n"
    )
    assert done.stderr == f"{one}\n{one}\n{answers}{history}"
    assert "<|im_start|>tool\n3 m today<|im_end|>" in prompts(h)[1]
    assert f"{TWICE}<|im_end|>" in prompts(h)[2]


async def test_a_question_may_be_undone_with_all_that_came_of_it(tools: Path) -> None:
    async with talking(ULM, "Three.", "Bye.") as h:
        done = await command(h, "chat", "--tools", tools, "--yes", stdin="how high\n/undo\nbye\n")
    assert done.stdout == "Three.\nBye.\n"
    assert prompts(h)[2] == "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("reply", "words", "said"),
    [
        (f"I look.{ULM}", ["-m", "60"], "(the reply was cut by length: its calls were not run)"),
        (f"I look.{ULM}", ["-s", "Ulm"],
         "(the reply was cut by stop string 'Ulm': its calls were not run)"),
        (f"I look.{ULM}", ["--max-turns", "1"],
         "(the last of 1 replies calls tools again, which were not run; --max-turns)"),
    ],
)  # fmt: skip
async def test_calls_that_are_not_run_are_said(
    tools: Path, reply: str, words: list[str], said: str
) -> None:
    async with talking(reply, "Bye.") as h:
        asked = ("chat", "--tools", tools, "--yes", *words)
        done = await command(h, *asked, stdin="how high\nbye\n")
    assert done.stdout == "I look.\nBye.\n"
    assert said in done.stderr
    assert "3 m" not in done.stderr
    assert "assistant\nI look.<|im_end|>\n<|im_start|>user\nbye" in prompts(h)[1]


async def test_calls_without_tools_are_said() -> None:
    async with talking(ULM, "Bye.") as h:
        done = await command(h, "chat", stdin="how high\nbye\n")
    assert done.stdout == "\nBye.\n"
    assert "there are no tools: the calls were not run; --tools FILE.py" in done.stderr
    assert "how high" not in prompts(h)[1]  # nothing was said: it is forgotten


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tools", "{file}"], "stdin is no terminal; pass --yes"),
        (["--tools", "/no/such.py", "--yes"], "is no Python file"),
        (["--tools", "{broken}", "--yes"], "broken.py, line 2: NameError: name 'nowhere'"),
        (["--tools", "{wrong}", "--yes"], "wrong.py, line 1"),
        (["--tools", "{unhinted}", "--yes"], "f cannot be a tool: 'x' has no type hint"),
        (["--tools", "{empty}", "--yes"], "defines no public function"),
        (["--tools", "{later}", "--yes"], "f is a coroutine function"),
        (["--tool-choice", "gauge"], "--tool-choice needs --tools"),
        (["--tools", "{file}", "--yes", "--tool-choice", "{{"], "--tool-choice: Expecting"),
        (["-o", "n=2"], "-o n: it is no option of a conversation"),
    ],
)
def test_wrong_usage(tmp_path: Path, tools: Path, words: list[str], said: str) -> None:
    texts = {
        "broken": "import os\nnowhere", "wrong": "def", "unhinted": "def f(x): ...",
        "empty": "import os", "later": "async def f() -> None: ...",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = {name: str(tmp_path / f"{name}.py") for name in texts} | {"file": str(tools)}
    words = [word.format(**paths) for word in words]
    done = subprocess.run(
        [*COMMAND, "--target", "127.0.0.1:1", "chat", *words],
        input="", capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# ---- at a terminal -------------------------------------------------------------------------------


class Terminal:
    """The command at a pseudo-terminal; killed at the block's end if it has not ended."""

    def __init__(self, harness: Harness, *words: str | Path) -> None:
        self.shown = ""
        self._own, theirs = pty.openpty()
        # A session's leader that opens a terminal has Ctrl-C from it. (Not in `preexec_fn`, which
        # would run what gRPC has for forks, in this process's copy.)
        opened = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(theirs)]
        target = ["--target", harness.server.addresses[0]]
        self.process = subprocess.Popen(
            [*opened, *COMMAND, *target, *map(str, words)], start_new_session=True
        )
        self._theirs = theirs  # open until the process has it open, and to its end

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait, WAIT_S)
        os.close(self._theirs)  # which ends a read that still waits
        os.close(self._own)

    async def until(self, wanted: Callable[[str], bool]) -> str:
        """Reads until what is shown is as wanted."""
        async with asyncio.timeout(WAIT_S):
            while not wanted(self.shown):
                self.shown += await asyncio.to_thread(self._read)
        return self.shown

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    async def interrupt(self, wanted: Callable[[str], bool]) -> None:
        """Types Ctrl-C until what is shown is as wanted: Python's input() misses one that comes
        just before it waits. One too many would take the next line with it, so an empty line
        goes first.
        """
        await self._type_until("\x03", wanted)
        prompts = self.shown.count("> ")
        await self._type_until("\n", lambda shown: shown.count("> ") > prompts)

    async def _type_until(self, text: str, wanted: Callable[[str], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            reading = asyncio.ensure_future(self.until(wanted))
            while not reading.done():
                self.type(text)
                await asyncio.wait([reading], timeout=1)
            await reading

    async def leave(self, said: str) -> int:
        """Types Ctrl-D at the prompt after this, and waits for the end."""
        await self.until(lambda shown: said in shown and shown.endswith("> "))
        self.type("\x04")
        return await asyncio.to_thread(self.process.wait, WAIT_S)

    def _read(self) -> str:
        return os.read(self._own, 1 << 16).decode().replace("\r\n", "\n")


def plain(shown: str) -> str:
    """Without colours and the modes that readline sets."""
    for code in ("\x1b[2m", "\x1b[0m", "\x1b[?2004h", "\x1b[?2004l", "\r"):
        shown = shown.replace(code, "")
    return shown


async def test_at_a_terminal_a_person_is_asked(tools: Path) -> None:
    async with (
        talking(TWICE, "Three.") as h,
        Terminal(h, "chat", "--tools", tools) as terminal,
    ):
        await terminal.until(lambda shown: shown.endswith("> "))
        terminal.type("how high\n")
        question = 'run gauge({"at": {"name": "Ulm"}})? [y/N] '
        await terminal.until(lambda shown: shown.count(question) == 1)
        terminal.type("y\n")
        await terminal.until(lambda shown: shown.count(question) == 2)
        terminal.type("\n")
        assert await terminal.leave("Three.") == 0
    shown = plain(terminal.shown)
    one = 'gauge {"at": {"name": "Ulm"}}'
    assert (
        f"Hm.\nI look.\n{one}\n{one}\n{question}y\ngauge: 3 m today\n{question}\n"
        "gauge: error: this call was declined\nThree.\n" in shown
    )
    thought = terminal.shown.partition("how high\n")[2].partition("I look.")[0]
    assert thought.count("\x1b[2m") > 0
    assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", thought).strip("\r\n") == ""
    assert "\nI look.\n" in terminal.shown
    assert "tool\nerror: this call was declined<|im_end|>" in prompts(h)[1]


async def test_reasoning_may_be_hidden() -> None:
    async with (
        talking("<think>\nHm.\n</think>\n\nYes.") as h,
        Terminal(h, "chat", "--no-reasoning") as terminal,
    ):
        await terminal.until(lambda shown: shown.endswith("> "))
        terminal.type("well?\n")
        assert await terminal.leave("Yes.") == 0
    assert "well?\nYes.\n" in plain(terminal.shown)
    assert "Hm." not in plain(terminal.shown)


@pytest.mark.parametrize("where", ["reply", "question", "function"])
async def test_ctrl_c_cancels_the_answer_alone(tools: Path, where: str) -> None:
    replies = {
        "reply": f"Well{ENDLESS}", "question": ULM, "function": call("stop", "{}"),
    }  # fmt: skip
    async with (
        talking(replies[where], "Bye.", auto=False) as h,
        Terminal(h, "chat", "--tools", tools) as terminal,
    ):
        stepping = asyncio.create_task(step(h, 4 if where == "reply" else 500))
        await terminal.until(lambda shown: shown.endswith("> "))
        terminal.type("how high\n")
        if where == "reply":
            await terminal.until(lambda shown: "Well" in shown)
        else:
            await terminal.until(lambda shown: "[y/N] " in shown)
        if where == "function":
            terminal.type("y\n")
            await terminal.until(cancelled)
        else:
            await terminal.interrupt(cancelled)
        if where == "reply":
            await until(lambda: h.engine.cancelled)
        terminal.type("bye\n")
        assert await terminal.leave("Bye.") == 0
        stepping.cancel()
    kept = where == "reply"
    assert ("how high" in prompts(h)[1]) == kept
    assert ("assistant\nWell<|im_end|>" in prompts(h)[1]) == kept


def cancelled(shown: str) -> bool:
    return "(cancelled)" in shown and shown.endswith("> ")


async def step(harness: Harness, first: int) -> None:
    """Takes so many steps for the first request, and then all that there are."""
    engine = harness.engine
    await until(lambda: engine.submitted)
    for _ in range(first):
        engine.step()
    await until(lambda: len(engine.submitted) == 2)
    engine.run()


# ---- generate ------------------------------------------------------------------------------------


async def generate(harness: Harness, *words: str | Path) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke,
        app,
        ["--target", harness.server.addresses[0], "generate", "hi", *map(str, words)],
    )


async def test_generate_writes_calls_as_lines(tools: Path, tmp_path: Path) -> None:
    definitions = tmp_path / "tools.json"
    definitions.write_text('[{"type": "function", "function": {"name": "gauge"}}]')
    async with talking(TWICE, ULM, TWICE, "No.") as h:
        found = await generate(h, "--tools", definitions)
        bare = await generate(h, "--tools", tools)
        whole = await generate(h, "--tools", definitions, "--json")
        none = await generate(h, "--tools", definitions)
    text, *lines = found.stdout.splitlines()
    assert text == "I look."
    calls = [json.loads(line) for line in lines]
    function = {"name": "gauge", "arguments": '{"at": {"name": "Ulm"}}'}
    assert [one["function"] for one in calls] == [function, function]
    [line] = bare.stdout.splitlines()
    assert json.loads(line)["function"] == function
    told = json.loads(whole.stdout)
    assert (told["text"], told["reasoning"], len(told["tool_calls"])) == ("I look.", "Hm.", 2)
    assert none.stdout == "No.\n"


async def test_generate_sends_what_was_chosen(server: Any, tools: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "tools.json"
    run = CliRunner()
    target = ["--target", server.target, "generate", "hi"]
    words = ["--tools", str(tools), "--max-reasoning-tokens", "0"]
    choice = '{"type": "function", "function": {"name": "gauge"}}'
    for given in ("required", "gauge", choice, "auto", "none"):
        assert run.invoke(app, [*target, *words, "--tool-choice", given]).exit_code == 0
    chats = [spec.chat for spec in server.specs]
    assert [one.name for one in chats[0].tools] == ["gauge", "stop"]
    assert [(chat.tool_choice.mode, list(chat.tool_choice.tool_names)) for chat in chats] == [
        (3, []), (3, ["gauge"]), (3, ["gauge"]), (0, []), (2, []),
    ]  # fmt: skip
    assert server.specs[0].stop.HasField("max_reasoning_tokens")
    for text in ("{}", "[5]", "nonsense"):
        wrong.write_text(text)
        done = run.invoke(app, [*target, "--tools", str(wrong)])
        assert (done.exit_code, f"--tools {wrong}" in done.stderr) == (2, True)
    done = run.invoke(app, [*target, "--tools", str(tools), "--token-ids"])
    assert (done.exit_code, "excludes" in done.stderr) == (2, True)


async def test_lines_of_a_batch_have_tools(server: Any, tmp_path: Path) -> None:
    definition = {"type": "function", "function": {"name": "gauge"}}
    messages = [{"role": "user", "content": "hi"}]
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": messages, "tools": [definition]}) + "\n")
    async with talking(TWICE) as h:
        done = await command(h, "batch", source, "-")
    [line] = done.stdout.splitlines()
    told = json.loads(line)
    assert (told["text"], told["reasoning"], told["finish_reason"]) == (
        "I look.", "Hm.", "tool_calls",
    )  # fmt: skip
    assert [one["function"]["name"] for one in told["tool_calls"]] == ["gauge", "gauge"]
    words = ["--target", server.target, "batch", str(source), "-", "-o", "tool_choice=required"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert server.specs[0].chat.tool_choice.mode == 3
