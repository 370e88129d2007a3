"""What an input is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from benchmarks.hostile.sending import Sender

BOTH = ("demo", "long")
OK = "OK"
Send = Callable[[Sender], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A hostile input.

    Attributes:
        name: unique among all.
        meaning: one line that says what is sent.
        send: sends it; it ends when everything was sent and answered, or is cancelled when its time
            is over.
        fields: what it attacks, as message and field of the contract: "Label.name".
        answers: one of these must come, as `sending.told` tells them: then it reaches what it is
            for. Empty: nothing is known of them.
        cases: where it is made of single messages, these.
        models: those that it is tried on.
        stranger: whether it has no token: then its memory has a bound of its own.
        judge: looks at the answers too; what is wrong with them, or None.
        seconds: its time, where it needs another than the campaign's.
    """

    name: str
    meaning: str
    send: Send
    fields: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    models: tuple[str, ...] = BOTH
    stranger: bool = False
    judge: Callable[[Mapping[str, int]], str | None] | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One message, and what it is answered with.

    Attributes:
        method: the path of the RPC; of a session it is the first command.
        message: makes it, from what the attacker knows of the server.
        answers: those that are right, as `sending.told` tells them.
        each: whether it is made anew each time: what was seen before helps nobody.
        metadata: what comes with it.
        patience_s: the caller goes after so long.
        is_operator: whether the call is an operator's.
    """

    method: str
    message: Callable[[Sender], Message]
    answers: tuple[str, ...] = (OK,)
    each: bool = False
    metadata: Sequence[tuple[str, str | bytes]] = ()
    patience_s: float | None = None
    is_operator: bool = False

    async def ask(self, s: Sender, raw: bytes) -> str:
        """Send it, and tally how it was answered: as it should have been, or not."""
        return await s.ask(
            self.method,
            raw,
            self.answers,
            token=s.operator if self.is_operator else None,
            metadata=self.metadata,
            patience_s=self.patience_s,
        )


def by_cases(
    name: str,
    meaning: str,
    *cases: Case,
    fields: Sequence[str],
    width: int = 2,
    seconds: float | None = None,
    models: tuple[str, ...] = BOTH,
) -> Input:
    """An input that sends one message after the other, again and again, so many at once."""

    async def send(s: Sender) -> None:
        known = [None if case.each else case.message(s).SerializeToString() for case in cases]

        async def one(_: int) -> None:
            for case, raw in zip(cases, known, strict=True):
                await case.ask(s, case.message(s).SerializeToString() if raw is None else raw)

        await s.again(width, one)

    return Input(
        name=name,
        meaning=meaning,
        send=send,
        fields=tuple(fields),
        answers=tuple(answer for case in cases for answer in case.answers),
        cases=cases,
        seconds=seconds,
        models=models,
    )


def invalid(*fields: str) -> tuple[str, ...]:
    """The answer to a field that is wrong."""
    return tuple(f"INVALID_ARGUMENT INVALID_FIELD {one}" for one in fields)


def lacking(field: str) -> str:
    """The answer to a field that needs what the server has not."""
    return f"UNIMPLEMENTED UNSUPPORTED_FIELD {field}"


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs that are tried on one server, after one calm time.

    Attributes:
        name: unique among all groups.
        inputs: in the order in which they are tried.
        tls: whether the server speaks TLS on a TCP address; the witness is then on a Unix socket.
        options: of the server, besides its defaults.
    """

    name: str
    inputs: tuple[Input, ...]
    tls: bool = False
    options: tuple[str, ...] = ()
