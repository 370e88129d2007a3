"""`headrace tour`: shows what a server does by sending requests to a running one, each with a line
on what happened inside.

    a section ──▶ requests with bounds ──▶ their output as it comes, then `inside: …`

Every number comes from the server: from the request (usage, timings), its session (the load), or
the server as a whole (ControlService's statistics, where available). If the server or its model
lacks a feature, the section is skipped and the server's reason is shown. A section is also skipped
if a busy server has no room or no time for it. Each request has a time limit, enforced by the
server, and a timeout, enforced here, so that the tour ends within a minute whatever the server
does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from headrace._tool_loop import ToolAnswer, ToolRunEnd
from headrace.cli import common
from headrace.cli.options import ServerOptions, grouped
from headrace.client import Client
from headrace.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    NotSupportedError,
    ResourceExhaustedError,
    UnavailableError,
)
from headrace.messages import Message, Prompt
from headrace.model_card import ModelCard
from headrace.results import Chunk, FinishReason, Result, ServerLoad
from headrace.session import RequestHandle, Session
from headrace.v1 import control_service_pb2 as pb

_TIME_LIMIT_S = 7.0
_CALL_S = 9.0
"""The time limit of a request, and the timeout of any call. Six requests run one after another, and
a few short calls.
"""
_TOUR_S = 57.0
_STREAM = "Once upon a time"
_QUESTION = "How high is the Danube in Ulm?"
_FACTS = "Anna is 36 years old and lives in Ulm. As JSON, please."
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_SCHEMA_IN_WORDS = "schema: an object of name (text), age (0 to 150) and city (text)"
_THINGS = ("a river", "a dog", "a bridge", "rain", "a bee", "a server", "a volcano", "an owl")
_CANCEL_AFTER = 8  # tokens
_LINE = 88  # characters of an answer among several
_LOOK_S = 0.1


@common.tells_errors
@grouped
def tour(context: typer.Context, *, server: ServerOptions) -> None:
    """Show what a server does, in less than a minute: a stream, a tool that the model calls, JSON
    that satisfies a schema, eight requests at once, and a cancel; each with a line on what happened
    inside. Ctrl-C ends it.

    What the server lacks, or is too busy for, is passed over with the reason; the exit code is then
    0.

    Examples:

        headrace tour

        headrace tour --target 127.0.0.1:50051 | less
    """
    connection = server.connection(context)
    timeout = min(connection.timeout or _CALL_S, _CALL_S)
    with replace(connection, timeout=timeout).open() as client:
        _Tour(client, client.model(), _Teller()).run()


def read_gauge(place: str) -> str:
    """How high a river is.

    Args:
        place: a town on the river.
    """
    return f"{len(place)} m"


class _Teller:
    """Writes the tour. Titles and remarks are highlighted on a terminal unless NO_COLOR is set."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._is_plain = self._console.no_color or not self._console.is_terminal
        self._wraps = self._console.is_terminal
        self._is_open = False

    def title(self, text: str) -> None:
        """Writes the title of a section."""
        self.line("")
        self._write(text, "bold")

    def line(self, text: str) -> None:
        """Writes a line of a question or an answer."""
        self.end_piece()
        self._write(text, "")

    def piece(self, text: str) -> None:
        """Writes a chunk of a line as it arrives."""
        if text:
            self._console.print(Text(text), end="", soft_wrap=True)
            self._is_open = not text.endswith("\n")

    def end_piece(self) -> None:
        """Ends the line of chunks, if one is open."""
        if self._is_open:
            self._is_open = False
            self._console.print()

    def remark(self, text: str) -> None:
        """Writes what happened inside, or why nothing did."""
        self.end_piece()
        self._write(text, "dim")

    def _write(self, text: str, style: str) -> None:
        shown = Text(text, "" if self._is_plain else style)
        self._console.print(shown, soft_wrap=not self._wraps)


class _Tour:
    """The sections of the tour, in order. `run` shows them all."""

    def __init__(self, client: Client, card: ModelCard, teller: _Teller) -> None:
        self._client = client
        self._card = card
        self._tell = teller
        self._began = time.monotonic()
        self._alone_rate: float | None = None
        """The tokens per second of the first section's request."""
        self._tells_statistics = True

    def run(self) -> None:
        """Shows all sections."""
        card, tell = self._card, self._tell
        tell.line(
            f"{card.name} at {self._client.target}: {card.architecture}, {card.parameters:,} "
            f"parameters, {card.dtype} on {card.device}; up to {card.limits.max_running_requests} "
            f"requests at once, {card.limits.max_context_tokens} tokens each."
        )
        parts: Sequence[tuple[str, Callable[[], None]]] = (
            ("A stream: each token is sent as it is made", self._stream),
            ("A tool: the model calls a Python function of this program", self._tool),
            ("A form: JSON that satisfies a schema", self._form),
            (f"{len(_THINGS)} requests at once, on one session", self._many),
            ("A cancel: a request of a session is ended by a message", self._cancel),
        )
        shown = sum(self._shown(f"{n}. {title}", part) for n, (title, part) in enumerate(parts, 1))
        tell.line("")
        tell.line(
            f"{shown} of {len(parts)} parts in {time.monotonic() - self._began:.0f} s. To go on: "
            "`headrace chat`, `headrace top`, `headrace --help`."
        )

    def _shown(self, title: str, part: Callable[[], None]) -> bool:
        """Shows a section. Returns whether the server could do it."""
        self._tell.title(title)
        try:
            part()
        except (NotSupportedError, FailedPreconditionError) as error:
            self._tell.remark(f"passed over: {error.message}")
        except (ResourceExhaustedError, DeadlineExceededError) as error:
            self._tell.remark(f"passed over, the server is busy: {error.message}")
        else:
            return True
        return False

    # ---- the parts -------------------------------------------------------------------------------

    def _stream(self) -> None:
        self._tell.line(f"> {_STREAM}")
        look = None
        asked = self._client.stream(_STREAM, max_tokens=48, **self._bounds())
        with asked as stream:
            for chunk in stream:
                self._tell.piece(chunk.text)
                look = look or self._look()
            result = stream.result()
        timings, usage = result.timings, result.usage
        if timings.first_token is None or timings.first_scheduled is None:
            self._tell.remark(f"no token came: {_why(result)}")
            return
        words = [
            f"it waited {_ms(timings.first_scheduled)} in the queue; its {usage.prompt_tokens} "
            f"tokens of prompt were computed, and the first new one was there after "
            f"{_ms(timings.first_token)}"
        ]
        self._alone_rate = _rate(result)
        if self._alone_rate is not None:
            made = usage.completion_tokens - 1
            words.append(f"then each step made one: {made} at {self._alone_rate:.0f} a second")
        if look is not None:
            words.append(
                f"as the first came, the batch had {_count(look.running, 'request')}, and "
                f"requests held {look.blocks_used} of the KV cache's {look.blocks_total} blocks"
            )
        self._inside(*words, *_cut(result))

    def _tool(self) -> None:
        self._tell.line(f"> {_QUESTION}")
        names = self._card.capabilities.names
        run = self._client.run_tools(
            [Message.user(_QUESTION)],
            [read_gauge],
            max_turns=2,
            tool_choice="required" if "tool_choice" in names else None,
            max_tokens=128,
            temperature=0,
            **self._bounds(),
        )
        for event in run.events():
            if isinstance(event, Chunk):
                self._tell.piece(event.text)
            elif isinstance(event, ToolAnswer):
                self._tell.line(f"{event.call.name} {event.call.arguments}: {event.content}")
        first, *others = (turn.result for turn in run.turns)
        if not run.turns[0].answers:
            self._tell.remark(
                f"the reply was cut: {_why(first)}"
                if run.end is ToolRunEnd.CUT
                else "the model called no tool"
            )
            return
        held = first.usage.completion_tokens - first.usage.reasoning_tokens
        words = []
        if "tool_choice" in names:
            words.append(
                f"each of the call's {held} tokens was chosen among those with which it stays a "
                "call of read_gauge whose arguments fit the function's type hints: a grammar masks "
                "all others"
            )
        parser = self._card.capabilities.output.reply_parser
        words.append(f"the server took the call out of the reply by the format {parser}")
        if run.end is not ToolRunEnd.ANSWERED:
            words.append("the model did not come to an answer after it, which ends the part")
        for second in others:
            words.append(
                f"the next prompt repeats the first, so that {second.usage.cached_tokens} of its "
                f"{second.usage.prompt_tokens} tokens came from the prefix cache"
            )
        self._inside(*words)

    def _form(self) -> None:
        self._tell.line(f"> {_FACTS}")
        self._tell.line(f"> {_SCHEMA_IN_WORDS}")
        asked = self._client.stream(
            self._as_prompt(_FACTS),
            json_schema=_SCHEMA,
            max_tokens=128,
            temperature=0,
            **self._bounds(),
        )
        with asked as stream:
            for chunk in stream:
                self._tell.piece(chunk.text)
            result = stream.result()
        if result.finish_reason is not FinishReason.STOP:
            self._tell.remark(f"it is not whole: {_why(result)}")
            return
        members = ", ".join(f"{name}={value!r}" for name, value in json.loads(result.text).items())
        self._inside(
            "the schema became a grammar, and in each of "
            f"{result.usage.completion_tokens} steps it masked the tokens with which no such JSON "
            "goes on",
            f"read here by json.loads: {members}",
        )

    def _many(self) -> None:
        loads: list[ServerLoad] = []
        before, began = self._look(), time.monotonic()
        bounds = self._bounds()
        with self._client.session(load_interval=_LOOK_S) as session:
            handles = [
                session.submit(
                    self._as_prompt(f"What is {thing}?"), max_tokens=32, temperature=0, **bounds
                )
                for thing in _THINGS
            ]
            _watch(session, handles, loads)
            results = [handle.result() for handle in handles]
        seconds, after = time.monotonic() - began, self._look()
        for thing, result in zip(_THINGS, results, strict=True):
            said = " ".join(result.text.split())
            shown = said if len(said) <= _LINE else f"{said[:_LINE]}..."
            self._tell.line(f"> What is {thing}?  {shown or _why(result)}")
        tokens = sum(result.usage.completion_tokens for result in results)
        words = [f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} a second together"]
        if self._alone_rate is not None:
            words[0] += f" (the stream above: {self._alone_rate:.0f})"
        words.append("one stream of one connection carried them all")
        if most := max((load.running for load in loads), default=0):  # 0: too fast to be told
            full = max(load.kv_cache_usage for load in loads)
            words.append(
                f"the server's batch had up to {_count(most, 'request')} at once, and {full:.1%} "
                "of its KV cache was held"
            )
        if before is not None and after is not None:
            steps, made = after.steps - before.steps, after.generated_tokens
            words.append(
                f"meanwhile its engine took {steps} steps, which made "
                f"{made - before.generated_tokens} tokens, of all callers"
            )
        self._inside(*words, *_cut(*results))

    def _cancel(self) -> None:
        self._tell.line(f"> {_STREAM}")
        count, cancelled_at, before = 0, None, None
        with self._client.session() as session:
            handle = session.submit(_STREAM, max_tokens=512, ignore_eos=True, **self._bounds())
            for chunk in handle:
                self._tell.piece(chunk.text)
                if cancelled_at is not None:
                    continue
                count += len(chunk.token_ids)
                if count >= _CANCEL_AFTER:
                    before = self._look()
                    cancelled_at = time.monotonic()
                    handle.cancel()
            result = handle.result()
        if cancelled_at is None or result.finish_reason is not FinishReason.CANCELLED:
            self._tell.remark(f"it ended before it was cancelled: {_why(result)}")
            return
        took, after = time.monotonic() - cancelled_at, self._look()
        words = [
            f"the message was sent when {count} tokens of 512 had been read; {_ms(took)} later the "
            f"request had ended, between two steps, with {result.usage.completion_tokens}"
        ]
        if before is not None and after is not None:
            words.append(
                f"its blocks of the KV cache are free: requests held {before.blocks_used} before, "
                f"and {after.blocks_used} now"
            )
        self._inside(*words)

    # ---- what they share -------------------------------------------------------------------------

    def _bounds(self) -> dict[str, Any]:
        """Returns the time limit and the timeout of a request that starts now.

        Raises:
            DeadlineExceededError: the tour's total time is over.
        """
        left = _TOUR_S - (time.monotonic() - self._began)
        if left < 1:
            raise DeadlineExceededError("the tour's minute is over")
        timeout = min(self._client.timeout or _CALL_S, left)
        return {"time_limit": min(_TIME_LIMIT_S, timeout), "timeout": timeout}

    def _as_prompt(self, text: str) -> Prompt:
        """Returns a question in the form the model accepts: a conversation or plain text."""
        return [Message.user(text)] if self._card.capabilities.input.chat else text

    def _look(self) -> pb.EngineStatistics | None:
        """Returns the server's statistics.

        Returns None if this caller may not read them or the client has several servers.
        """
        if not self._tells_statistics:
            return None
        try:
            found = self._client.control.statistics()
        except UnavailableError:
            raise
        except HeadraceError:
            self._tells_statistics = False
            return None
        return found.engine if found.HasField("engine") else None

    def _inside(self, *words: str) -> None:
        self._tell.remark(f"inside: {'; '.join(words)}.")


def _watch(session: Session, handles: Sequence[RequestHandle], loads: list[ServerLoad]) -> None:
    """Waits for the requests, and keeps the load reports of the server."""
    while not all(handle.done for handle in handles):
        time.sleep(_LOOK_S / 5)
        if (load := session.load) is not None:
            loads.append(load)


def _cut(*results: Result) -> list[str]:
    """Describes how many requests were cut off by a time limit; empty if none was."""
    cut = [one for one in results if one.finish_reason is FinishReason.TIME_LIMIT]
    of = f" of {len(cut)} requests" if len(results) > 1 else ""
    return [f"the time limit{of} was reached, the server is busy"] if cut else []


def _why(result: Result) -> str:
    """Returns why a request has ended."""
    if result.finish_reason is FinishReason.TIME_LIMIT:
        return "its time limit was reached, the server is busy"
    return f"it ended with {result.finish_reason.value}"


def _rate(result: Result) -> float | None:
    """Returns the tokens per second after the first token; None if there were too few."""
    first, last = result.timings.first_token, result.timings.last_token
    if first is None or last is None or last <= first:
        return None
    return (result.usage.completion_tokens - 1) / (last - first)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
