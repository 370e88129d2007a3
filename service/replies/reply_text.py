"""One choice's reply, taken apart as it comes: text, reasoning and tool calls.

    TextStream ──▶ text with marks ──▶ ReplyParser ──▶ parts that wait for their delta ──▶ Apart

The text of a part is what its reader is shown; marks go no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.contract.types import TokenId
from engine.text import TextStream
from service.replies.format import ReplyParser
from service.replies.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text

_CALL_BYTES = 16


class CallPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a tool call. `id`, `name`: in the call's first one."""

    index: int
    id: str
    name: str
    arguments: str

    @property
    def size(self) -> int:
        """About how many bytes it takes in a message."""
        return _CALL_BYTES + len(self.id) + len(self.name) + len(self.arguments)


class Apart(msgspec.Struct, frozen=True, gc=False):
    """What a delta has besides text."""

    reasoning: str
    calls: tuple[CallPart, ...]
    size: int


Part = str | Reasoning | CallPart
"""Text, reasoning, or a part of a call."""


def together(parts: Iterable[Part]) -> tuple[str, Apart | None]:
    """What one delta has of these parts: the text, and what else there is."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, list[CallPart]] = {}
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, Reasoning):
            reasoning.append(part.raw)
        else:
            calls.setdefault(part.index, []).append(part)
    if not reasoning and not calls:
        return "".join(text), None
    thought = "".join(reasoning)
    joined = tuple([_joined(own) for own in calls.values()])
    size = len(thought) + sum([call.size for call in joined])
    return "".join(text), Apart(thought, joined, size)


def _joined(parts: Sequence[CallPart]) -> CallPart:
    first = parts[0]
    if len(parts) == 1:
        return first
    return CallPart(first.index, first.id, first.name, "".join([part.arguments for part in parts]))


class ReplyText:
    """Takes one reply apart.

    Attributes:
        reasoning_tokens: tokens that were reasoning, with those that complete its marks.
    """

    __slots__ = ("_num_calls", "_num_whole", "_parser", "reasoning_tokens")

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._num_calls = 0
        self._num_whole = 0
        self.reasoning_tokens = 0

    @property
    def size(self) -> int:
        """Characters that are held back."""
        return self._parser.size

    @property
    def calls_tools(self) -> bool:
        """Whether there are calls, and the arguments of all of them are whole."""
        return 0 < self._num_calls == self._num_whole

    def push(
        self, stream: TextStream, ids: Sequence[TokenId], *, ends_with_stop_token: bool
    ) -> list[Part]:
        """Take one step's ids, as far as no stop string ends them."""
        parts: list[Part] = []
        last = len(ids) - 1
        for index, token_id in enumerate(ids):
            thought = self._parser.in_reasoning
            text = stream.push(
                (token_id,), ends_with_stop_token=ends_with_stop_token and index == last
            )
            if stream.shown_at:
                self._parser.told(stream.shown_at)
                stream.shown_at.clear()
            if text:
                self._add(self._parser.push(text), parts)
            if thought or self._parser.in_reasoning:
                self.reasoning_tokens += 1
            if stream.stop is not None:
                break
        return parts

    def finish(self, rest: str) -> list[Part]:
        """The output is over, with this text. May be called once more, for nothing."""
        parts: list[Part] = []
        self._add(self._parser.push(rest), parts)
        self._add(self._parser.finish(), parts)
        return parts

    def _add(self, pieces: Iterable[Piece], parts: list[Part]) -> None:
        for piece in pieces:
            match piece:
                case Text():
                    parts.append(piece.raw)
                case Reasoning():
                    parts.append(piece)
                case CallBegin():
                    self._num_calls += 1
                    parts.append(CallPart(piece.index, piece.id, piece.name, ""))
                case Arguments() if piece.json:
                    parts.append(CallPart(piece.index, "", "", piece.json))
                case CallEnd() if piece.complete:
                    self._num_whole += 1
                case _:
                    pass
