"""The types that describe a hostile input."""

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
        name: a name that is unique among all inputs.
        meaning: one line that says what is sent.
        send: sends the input. It returns when everything has been sent and answered, or is
            cancelled when its time is up.
        fields: the contract fields under attack, as "Label.name" (message and field).
        answers: the answers of which at least one must occur, in the format of `sending.told`, to
            show that the input reached its target. Empty if no answer is required.
        cases: the single messages that make up the input, if it is made of such messages.
        models: the models that the input is tried on.
        stranger: whether the attacker has no token. The server's memory then has a separate limit.
        judge: checks the answers too; returns what is wrong with them, or None.
        seconds: the duration, if it differs from the campaign's default.
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
    """One message and its expected answers.

    Attributes:
        method: the path of the RPC; for a session, the message is the first command.
        message: builds the message from what the attacker knows of the server.
        answers: the expected answers, in the format of `sending.told`.
        each: whether the message is rebuilt for every call, so that the server cannot use a cache.
        metadata: the metadata of the call.
        patience_s: the time after which the caller gives up.
        is_operator: whether an operator makes the call.
    """

    method: str
    message: Callable[[Sender], Message]
    answers: tuple[str, ...] = (OK,)
    each: bool = False
    metadata: Sequence[tuple[str, str | bytes]] = ()
    patience_s: float | None = None
    is_operator: bool = False

    async def ask(self, s: Sender, raw: bytes) -> str:
        """Send the message and tally the answer as expected or unexpected."""
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
    """Return an input that repeats a list of messages with the given number of concurrent calls."""

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
    """Return the answer to a field with an invalid value."""
    return tuple(f"INVALID_ARGUMENT INVALID_FIELD {one}" for one in fields)


def lacking(field: str) -> str:
    """Return the answer to a field that needs something the server lacks."""
    return f"UNIMPLEMENTED UNSUPPORTED_FIELD {field}"


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs that are tried on one server after one calm period.

    Attributes:
        name: a name that is unique among all groups.
        inputs: the inputs in the order in which they are tried.
        tls: whether the server uses TLS on a TCP address; the witness then uses a Unix socket.
        options: the server's options in addition to its defaults.
    """

    name: str
    inputs: tuple[Input, ...]
    tls: bool = False
    options: tuple[str, ...] = ()
