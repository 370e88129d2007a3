"""Splits one choice's reply, as it arrives, into text, reasoning and tool calls.

    TextStream ──▶ text with marks ──▶ ReplyParser ──▶ parts that wait for their delta ──▶ Apart

The text of a part is what the client sees; marks are not passed on.
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
    """A fragment of a tool call. Only the call's first fragment has `id` and `name`."""

    index: int
    id: str
    name: str
    arguments: str

    @property
    def size(self) -> int:
        """The approximate number of bytes that the fragment takes in a message."""
        return _CALL_BYTES + len(self.id) + len(self.name) + len(self.arguments)


class Apart(msgspec.Struct, frozen=True, gc=False):
    """What a delta has in addition to text."""

    reasoning: str
    calls: tuple[CallPart, ...]
    size: int


Part = str | Reasoning | CallPart
"""Text, reasoning, or a fragment of a call."""


def together(parts: Iterable[Part]) -> tuple[str, Apart | None]:
    """Combine the parts of one delta into its text and everything else."""
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
    """Splits one reply into text, reasoning and tool calls.

    Attributes:
        reasoning_tokens: how many tokens were reasoning, including those that complete its marks.
    """

    __slots__ = ("_num_calls", "_num_whole", "_parser", "reasoning_tokens")

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._num_calls = 0
        self._num_whole = 0
        self.reasoning_tokens = 0

    @property
    def size(self) -> int:
        """How many characters are held back."""
        return self._parser.size

    @property
    def calls_tools(self) -> bool:
        """Whether the reply has calls, all with complete arguments."""
        return 0 < self._num_calls == self._num_whole

    def push(
        self, stream: TextStream, ids: Sequence[TokenId], *, ends_with_stop_token: bool
    ) -> list[Part]:
        """Add one step's token ids, up to any stop string that ends them."""
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
        """End the output with this text. A second call does nothing."""
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
