r"""The pieces of a reply, as they arrive: text, reasoning and tool calls.

    raw      Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>
    pieces   Text        Mark, CallBegin               Arguments, CallEnd  Mark

Each piece keeps its raw text. Together, the pieces' `raw` texts are the reply as the model wrote
it, whatever was recognised in it. `fold` joins pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Templates of the Mistral family require an id of exactly 9 letters and digits; others accept any.
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A fragment of the answer itself."""

    raw: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A fragment of the reasoning before the answer."""

    raw: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Text that belongs only to the format: marks, the blanks around them, and a call's other
    members.
    """

    raw: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call; its arguments follow.

    Attributes:
        raw: all text that was held back until the call was certain.
        index: the index of the call in the reply, from 0.
        id: 9 letters and digits, or the id that the model wrote if the format has ids; unique in
            the reply.
        name: the tool's name.
    """

    raw: str
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of a call's arguments. Concatenated, the fragments are the text of a JSON
    object.
    """

    raw: str
    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call's arguments. `complete` says whether they are a whole JSON object. It is
    False if the output ended or stopped being JSON before that.
    """

    index: int
    complete: bool
    raw: str = ""


Piece = Text | Reasoning | Mark | CallBegin | Arguments | CallEnd


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call; see `CallBegin` and `CallEnd`."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    raw: str


def fold(pieces: Iterable[Piece]) -> Reply:
    """Join pieces into a reply."""
    raw: list[str] = []
    text: list[str] = []
    reasoning: list[str] = []
    begun: list[CallBegin] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for piece in pieces:
        raw.append(piece.raw)
        match piece:
            case Text():
                text.append(piece.raw)
            case Reasoning():
                reasoning.append(piece.raw)
            case CallBegin():
                begun.append(piece)
                arguments.append([])
            case Arguments():
                arguments[piece.index].append(piece.json)
            case CallEnd():
                if piece.complete:
                    complete.add(piece.index)
            case Mark():
                pass
    calls = tuple(
        ParsedCall(call.index, call.id, call.name, "".join(fragments), call.index in complete)
        for call, fragments in zip(begun, arguments, strict=True)
    )
    return Reply("".join(text), "".join(reasoning), calls, "".join(raw))


class PieceWriter:
    """Collects one reply's pieces, and numbers its calls.

    Attributes:
        has_text: whether there was text other than blanks.
        in_reasoning: whether what comes next is reasoning. Set by the format.
        num_calls: how many calls have begun.
    """

    __slots__ = ("_ids", "_pieces", "_seed", "has_text", "in_reasoning", "num_calls")

    def __init__(self, seed: str, *, in_reasoning: bool = False) -> None:
        """Create a writer. `seed` is the seed of the calls' ids; it differs for each reply."""
        self._seed = seed
        self._ids: set[str] = set()
        self._pieces: list[Piece] = []
        self.has_text = False
        self.in_reasoning = in_reasoning
        self.num_calls = 0

    def drain(self) -> list[Piece]:
        """Return the pieces since the last `drain` and remove them."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def text(self, raw: str) -> None:
        """Add text of the answer, which may be empty."""
        if raw:
            self._pieces.append(Text(raw))
            self.has_text = self.has_text or not raw.isspace()

    def reasoning(self, raw: str) -> None:
        """Add reasoning, which may be empty."""
        if raw:
            self._pieces.append(Reasoning(raw))

    def mark(self, raw: str) -> None:
        """Add text that belongs only to the format, which may be empty."""
        if raw:
            self._pieces.append(Mark(raw))

    def begin(self, raw: str, name: str, id: str | None = None) -> None:
        """Begin a call. `id` is the model's own id, which is used if no other call has it."""
        index = self.num_calls
        self.num_calls += 1
        if id is None or id in self._ids:
            id = self._new_id(index)
        self._ids.add(id)
        self._pieces.append(CallBegin(raw, index, id, name))

    def arguments(self, json: str, raw: str) -> None:
        """Add a fragment of the last call's arguments."""
        if json or raw:
            self._pieces.append(Arguments(raw, self.num_calls - 1, json))

    def end(self, *, complete: bool) -> None:
        """End the last call's arguments."""
        self._pieces.append(CallEnd(self.num_calls - 1, complete))

    def _new_id(self, index: int) -> str:
        attempt = 0
        while True:
            digest = hashlib.sha256(f"{self._seed}/{index}/{attempt}".encode()).digest()
            value = int.from_bytes(digest)
            digits = []
            for _ in range(_ID_LENGTH):
                value, digit = divmod(value, len(_ALPHABET))
                digits.append(_ALPHABET[digit])
            if (id := "".join(digits)) not in self._ids:
                return id
            attempt += 1
