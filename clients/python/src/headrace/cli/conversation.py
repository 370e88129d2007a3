"""A conversation at a terminal or from a pipe: the questions, the commands, and what is shown.

Only the text of the answers goes to stdout. Reasoning, tool calls and tool results go to stderr, so
that stdout can be piped.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import typer

from headrace._tool_loop import ToolAnswer, ToolRunEnd, ToolTurn
from headrace.cli import common
from headrace.client import Client
from headrace.errors import HeadraceError, UnavailableError
from headrace.messages import Message, ToolCall
from headrace.options import TurnOptions
from headrace.results import Chunk, Result
from headrace.tool_run import ToolRun
from headrace.tools import FunctionTool

_HELP = """\
/reset          forget the conversation
/system TEXT    change the instructions (and forget the conversation)
/undo           forget the last question and its answer
/history        show the conversation
/quit           leave (so does Ctrl-D); Ctrl-C cancels the running answer"""
_SHOWN_CHARACTERS = 500


class Conversation:
    """The state of a conversation. `failed` is whether a request was refused or failed."""

    def __init__(
        self,
        client: Client,
        options: TurnOptions,
        system: str | None,
        *,
        tools: Sequence[FunctionTool] = (),
        max_turns: int = 1,
        asks: bool = True,
        reasoning: bool = True,
        interactive: bool,
    ) -> None:
        """Initializes the conversation.

        Args:
            asks: whether to ask the user before a tool runs.
            reasoning: whether to show the model's reasoning on a terminal.
        """
        self._client = client
        self._options = options
        self._system = system
        self._tools = tools
        self._max_turns = max_turns
        self._asks = asks
        self._reasoning = reasoning and sys.stderr.isatty()
        self.interactive = interactive
        self.failed = False
        self._messages: list[Any] = []

    def run(self, model: str) -> None:
        """Answers questions until there are no more."""
        if self.interactive:
            with contextlib.suppress(ImportError):  # not everywhere; only line editing is lost
                import readline  # noqa: F401  # input() uses it once it is imported
            typer.echo(f"{model} - /help for commands, Ctrl-D to leave", err=True)
        while (line := self._read()) is not None:
            line = line.strip()
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask(line)

    def _read(self) -> str | None:
        """Returns the next line, or None at the end. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                if self.interactive:
                    return input("> ")
                return sys.stdin.readline() or None
            except EOFError:
                typer.echo()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                typer.echo()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._messages.clear()
        elif name == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
        elif name == "/undo":
            while self._messages and not isinstance(self._messages.pop(), Message):
                pass  # a question is a Message, what came of it is not
        elif name == "/history":
            for message in self._messages:
                typer.echo(_line(message), err=True)
        elif name == "/help":
            typer.echo(_HELP, err=True)
        else:
            typer.echo(f"no such command: {name}; /help lists them", err=True)

    def _ask(self, line: str) -> None:
        before = [Message.system(self._system)] if self._system else []
        asked = [*before, *self._messages, Message.user(line)]
        reply = _Reply(reasoning=self._reasoning)

        def approve(call: ToolCall) -> bool:
            reply.stop()
            return _approve(call)

        run = self._client.run_tools(
            asked,
            self._tools,
            max_turns=self._max_turns,
            approve=approve if self._asks else None,
            **self._options,
        )
        try:
            with contextlib.closing(run.events()) as events:  # type: ignore[type-var]
                for event in events:
                    reply.show(event)
        except KeyboardInterrupt:  # leaving the block has cancelled the request
            reply.stop()
            typer.echo("(cancelled)", err=True)
            self._keep_part(run, reply, len(before))
            return
        except HeadraceError as error:
            if isinstance(error, UnavailableError) and not self.interactive:
                raise
            self.failed = True
            reply.stop()
            typer.echo(f"headrace: {common.explain(error)}", err=True)
            return
        last = run.turns[-1].result
        reply.end()
        if run.end is ToolRunEnd.ANSWERED or not last.tool_calls:
            self._messages = run.messages[len(before) :]
        else:
            typer.echo(_unrun(run.end, last, self._max_turns, self._tools), err=True)
            self._keep_part(run, reply, len(before))

    def _keep_part(self, run: ToolRun, reply: _Reply, skip: int) -> None:
        """Keeps the output of an incomplete answer, or discards the question if there is none."""
        if reply.text or reply.reasoning:
            part = {"role": "assistant", "content": reply.text}
            if reply.reasoning:
                part["reasoning_content"] = reply.reasoning
            self._messages = [*run.messages[skip:], part]


class _Reply:
    """Shows replies one after the other. `text` and `reasoning` are those of the last reply."""

    def __init__(self, *, reasoning: bool) -> None:
        self.text = ""
        self.reasoning = ""
        self._has_text = False
        self._shows_reasoning = reasoning
        self._line: Literal["", "text", "reasoning", "call"] = ""
        """What the current, unfinished line contains."""

    def show(self, event: Chunk | ToolAnswer | ToolTurn) -> None:
        """Shows a chunk of a reply, or a tool's answer."""
        if isinstance(event, Chunk):
            self._chunk(event)
        elif isinstance(event, ToolAnswer):
            content = event.content
            if len(content) > _SHOWN_CHARACTERS:
                content = f"{content[:_SHOWN_CHARACTERS]}… ({len(content)} characters)"
            self._begin("")
            self._aside(f"{event.call.name}: {content}\n")
        elif event.answers:  # another reply follows
            self.text = self.reasoning = ""

    def end(self) -> None:
        """Ends the answer, writing a line even if the answer is empty."""
        if not self._has_text:
            self._begin("text")
        self._begin("")

    def stop(self) -> None:
        """Ends the current line when an answer is interrupted."""
        self._begin("")

    def _chunk(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        if chunk.reasoning and self._shows_reasoning:
            self._begin("reasoning")
            self._aside(chunk.reasoning)
        if chunk.text:
            self._begin("text")
            self._has_text = True
            typer.echo(chunk.text, nl=False)
        for part in chunk.tool_calls:
            if part.name:
                self._begin("")
                self._begin("call")
                self._aside(f"{part.name} ")
            self._aside(part.arguments)

    def _begin(self, line: Literal["", "text", "reasoning", "call"]) -> None:
        """Starts output of a kind, ending the current line first if it has another kind."""
        if self._line not in ("", line):
            typer.echo(err=self._line != "text")
        self._line = line

    def _aside(self, text: str) -> None:
        typer.echo(typer.style(text, dim=True), err=True, nl=False)  # plain if it is no terminal


def _approve(call: ToolCall) -> bool:
    """Asks the user whether a call may run."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    try:
        said = input(f"run {call.name}({arguments})? [y/N] ")
    except EOFError:
        typer.echo()
        return False
    return said.strip().lower() in ("y", "yes")


def _unrun(
    end: ToolRunEnd | None, last: Result, max_turns: int, tools: Sequence[FunctionTool]
) -> str:
    """Returns a note on why the calls of the last reply were not run."""
    if end is ToolRunEnd.CUT:
        cut = f"stop string {last.stop_string!r}" if last.stop_string else last.finish_reason
        return f"(the reply was cut by {cut}: its calls were not run)"
    if not tools:
        return "(there are no tools: the calls were not run; --tools FILE.py brings some)"
    return f"(the last of {max_turns} replies calls tools again, which were not run; --max-turns)"


def _line(message: Message | Mapping[str, Any]) -> str:
    """Formats a message of the history."""
    if isinstance(message, Message):
        return f"{message.role}: {message.content}"
    calls = [one["function"] for one in message.get("tool_calls", ())]
    words = [message["content"] or "", *(f"{one['name']} {one['arguments']}" for one in calls)]
    return f"{message['role']}: {' '.join(filter(None, words))}"
