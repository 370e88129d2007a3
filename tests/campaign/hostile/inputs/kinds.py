"""The types that describe a hostile input."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from headrace.v1.generation_service_pb2 import GenerateRequest

from tests.campaign.hostile.encoding import ONCE
from tests.campaign.hostile.sending import GENERATE, SESSIONS, Sender

OK = "OK"
MANY_CASES, CASES_A_SECOND = 40, 10
"""An input of more cases than these takes its time by their number."""
MISSING = ("UNIMPLEMENTED CAPABILITY_MISSING",)
Send = Callable[[Sender], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """A message as bytes, and how it is sent; a session's command is sent on a session of its own.

    Attributes:
        gzip, token, patience_s: as of `Sender.call`.
    """

    method: str
    raw: bytes
    gzip: bool = True
    token: str | None = None
    patience_s: float | None = None


Round = Callable[[Sender], Iterable[Call]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A hostile input.

    Attributes:
        send: sends the input. It returns when everything has been sent and answered, or is
            cancelled when its time is up.
        answers: the answers of which at least one must occur, in the format of `sending.told`, to
            show that the input reached its target. Empty if no answer is required.
        cases: the single messages that make up the input, if it is made of such messages.
        stranger: whether the attacker has no token. The server's memory then has a separate limit.
        judge: checks the answers too; returns what is wrong with them, or None.
        seconds: the duration, if it differs from the campaign's default.
    """

    name: str
    meaning: str
    send: Send
    answers: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    stranger: bool = False
    judge: Callable[[Mapping[str, int]], str | None] | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One message and its expected answers.

    Attributes:
        method: the path of the RPC; for a session, the message is the first command.
        message: builds the message from what the attacker knows of the server.
        answers: the expected answers, in the format of `sending.told`; `*` ends a prefix.
        each: whether the message is rebuilt for every call, so that the server cannot use a cache.
        patience_s: the time after which the caller gives up.
        field: the contract's field under attack, as "Label.name", if the case is derived from it.
    """

    method: str
    message: Callable[[Sender], Message]
    answers: tuple[str, ...] = (OK,)
    each: bool = False
    metadata: Sequence[tuple[str, str | bytes]] = ()
    patience_s: float | None = None
    is_operator: bool = False
    field: str = ""

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


def generates(*answers: str, each: bool = False, **spec: Any) -> Case:
    """Return a case of Generate with a short prompt and one token, if the spec's fields do not say
    otherwise; functions of the sender are called with it. Without answers, OK is expected.
    """

    def message(s: Sender) -> Message:
        fields = {name: one(s) if callable(one) else one for name, one in spec.items()}
        text = {} if {"tokens", "chat"} & fields.keys() else {"text": {"text": ONCE}}
        return GenerateRequest(spec={**text, "stop": {"max_tokens": 1}, **fields})

    return Case(GENERATE, message, answers or (OK,), each)


def refused(field: str, **spec: Any) -> Case:
    return generates(*invalid(f"spec.{field}"), **spec)


def invalid(*fields: str) -> tuple[str, ...]:
    return tuple(f"INVALID_ARGUMENT INVALID_FIELD {one}" for one in fields)


def lacking(name: str) -> str:
    return f"UNIMPLEMENTED UNSUPPORTED_FIELD {name}"


@dataclass(slots=True)
class Group:
    """Inputs that are tried on one server after one calm period.

    Attributes:
        tls: whether the server uses TLS on a TCP address; the witness then uses a Unix socket.
        options: the server's options in addition to its defaults.
    """

    name: str
    tls: bool = False
    options: tuple[str, ...] = ()
    inputs: list[Input] = field(default_factory=list)

    def sends(self, **more: Any) -> Callable[[Send], Send]:
        """Add the input that a function sends, under the function's name. Its docstring is the
        meaning. `more`: as of an Input, the name and the meaning too.
        """

        def add(send: Send) -> Send:
            self.inputs.append(Input(send=send, **(named(send) | more)))
            return send

        return add

    def tries(
        self,
        name: str,
        meaning: str,
        *cases: Case,
        width: int = 2,
        seconds: float | None = None,
    ) -> None:
        """Add the input that repeats a list of messages with the given number of concurrent calls.
        Without `seconds`, it takes long enough for each of many cases to be tried.
        """

        async def send(s: Sender) -> None:
            known = [None if case.each else case.message(s).SerializeToString() for case in cases]
            pairs = list(zip(cases, known, strict=True))

            async def one(index: int) -> None:
                begin = index * len(pairs) // width  # so that all are tried early
                for case, raw in (*pairs[begin:], *pairs[:begin]):
                    await case.ask(s, case.message(s).SerializeToString() if raw is None else raw)

            await s.again(width, one)

        found = Input(
            name=name,
            meaning=meaning,
            send=send,
            answers=tuple(answer for case in cases for answer in case.answers),
            cases=cases,
            seconds=seconds or (len(cases) / CASES_A_SECOND if len(cases) > MANY_CASES else None),
        )
        self.inputs.append(found)

    def repeats(self, width: int = 2, **more: Any) -> Callable[[Round], Round]:
        """Add the input whose workers repeat the calls that a function returns."""

        def add(round_of: Round) -> Round:
            async def send(s: Sender) -> None:
                calls = list(round_of(s))

                async def one(_: int) -> None:
                    for call in calls:
                        if call.method in SESSIONS:
                            await s.session([call.raw])
                        else:
                            await s.call(
                                call.method, call.raw, gzip=call.gzip, token=call.token,
                                patience_s=call.patience_s,
                            )  # fmt: skip

                await s.again(width, one)

            self.sends(**(named(round_of) | more))(send)
            return round_of

        return add


def named(found: Callable[..., object]) -> dict[str, Any]:
    """Return an input's name and meaning: a function's name, and its docstring."""
    meaning = " ".join((found.__doc__ or "").split()).removesuffix(".")
    word = meaning.partition(" ")[0]
    if word.capitalize() == word:  # not the name of an RPC or a protocol
        meaning = meaning[:1].lower() + meaning[1:]
    return {"name": found.__name__.replace("_", "-"), "meaning": meaning}
