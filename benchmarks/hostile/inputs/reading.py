"""Session commands and calls by request id with hostile values, repeated commands and calls, and
hostile metadata.
"""

from __future__ import annotations

import itertools
from typing import Any

from google.protobuf.message import Message
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from benchmarks.hostile.inputs.kinds import OK, Case, Group, Input, by_cases, invalid
from benchmarks.hostile.sending import CONTROL, GENERATION, MODEL, Sender

MOST_32, MOST_63, MOST_64 = 2**32 - 1, 2**63 - 1, 2**64 - 1
SESSION = GENERATION + "StreamResult"
ADD, GET = GENERATION + "AddRequest", GENERATION + "GetResult"
GENERATE = GENERATION + "Generate"
NOBODY = "NOT_FOUND REQUEST_NOT_FOUND"
ELSEWHERE = "NOT_FOUND WRONG_INSTANCE"
SPEC: dict[str, Any] = {"text": {"text": "Once upon a time"}, "stop": {"max_tokens": 2}}


def _command(*answers: str, **command: Any) -> Case:
    return Case(SESSION, lambda s: rpc.StreamResultRequest(**command), answers or (OK,))


def _get(*answers: str, **question: Any) -> Case:
    return Case(GET, lambda s: rpc.GetResultRequest(**{"request_id": "none", **question}), answers)


def _cancel(*answers: str, **question: Any) -> Case:
    return Case(GENERATION + "Cancel", lambda s: rpc.CancelRequest(**question), answers or (OK,))


NEEDING: dict[str, tuple[type[Message], str, bool]] = {
    "AddRequest": (rpc.AddRequestRequest, GENERATION, False),
    "Cancel": (rpc.CancelRequest, GENERATION, False),
    "Generate": (rpc.GenerateRequest, GENERATION, False),
    "GenerateStream": (rpc.GenerateStreamRequest, GENERATION, False),
    "GetResult": (rpc.GetResultRequest, GENERATION, False),
    "GetModel": (model.GetModelRequest, MODEL, False),
    "Tokenize": (model.TokenizeRequest, MODEL, False),
    "Detokenize": (model.DetokenizeRequest, MODEL, False),
    "GetStatistics": (control.GetStatisticsRequest, CONTROL, True),
    "WatchStatistics": (control.WatchStatisticsRequest, CONTROL, True),
    "ListRequests": (control.ListRequestsRequest, CONTROL, True),
    "CancelRequests": (control.CancelRequestsRequest, CONTROL, True),
    "Pause": (control.PauseRequest, CONTROL, True),
    "Resume": (control.ResumeRequest, CONTROL, True),
    "Drain": (control.DrainRequest, CONTROL, True),
    "ResetPrefixCache": (control.ResetPrefixCacheRequest, CONTROL, True),
    "SetLogLevel": (control.SetLogLevelRequest, CONTROL, True),
}
"""The methods whose messages may require capabilities."""
TOO_MANY = invalid("required_capabilities")
MISSING = ("UNIMPLEMENTED CAPABILITY_MISSING",)


def _needing(number: int, name: str, answers: tuple[str, ...]) -> list[Case]:
    names = [f"{name}{n}" for n in range(number)]
    cases = [
        Case(
            service + method,
            lambda s, kind=kind: kind(required_capabilities=names),  # type: ignore[misc]
            answers,
            is_operator=is_operator,
        )
        for method, (kind, service, is_operator) in NEEDING.items()
    ]
    session = Case(SESSION, lambda s: rpc.StreamResultRequest(required_capabilities=names), answers)
    return [*cases, session]


async def read_again(s: Sender) -> None:
    """Read a large detailed result repeatedly, with 32 calls at the same time."""
    name = f"kept-{s.source.getrandbits(40):x}"
    spec = {
        **SPEC,
        "request_id": name,
        "stop": {"max_tokens": 200, "ignore_eos": True},
        "output": {"logprobs": s.card.logprobs},
    }
    added = rpc.AddRequestRequest(spec=spec).SerializeToString()
    question = rpc.GetResultRequest(request_id=name, until_done=True, wait={"seconds": 60})
    await s.ask(ADD, added, (OK,))
    await s.again(32, lambda _: s.ask(GET, question.SerializeToString(), (OK,)))


async def told_loads(s: Sender) -> None:
    """Open 300 sessions that ask for load updates as often as allowed."""
    opened = rpc.StreamResultRequest(open={"load_interval": {"nanos": 100_000_000}})
    raw = opened.SerializeToString()
    await s.crowd(300, lambda _: s.session([raw], stay=True))


async def the_same_call(s: Sender) -> None:
    """Send identical calls with the same request id from 64 callers, and different calls with that
    id.
    """
    numbers = itertools.count()
    run = f"{s.source.getrandbits(40):x}"

    async def one(_: int) -> None:
        name = f"same-{run}-{next(numbers) // 32}"
        for tokens in (2, 3):
            spec = {**SPEC, "request_id": name, "stop": {"max_tokens": tokens}}
            raw = rpc.GenerateRequest(spec=spec).SerializeToString()
            await s.ask(GENERATE, raw, (OK, "ALREADY_EXISTS DUPLICATE_REQUEST_ID"))

    await s.again(64, one)


_READING: tuple[Input, ...] = (
    by_cases(
        "open-values",
        "sessions that are opened with leases and intervals that are none, and twice",
        *(
            _command(*invalid("open.lease"), command_id=MOST_64, open={"lease": lease})
            for lease in ({"seconds": -1}, {"nanos": 2_000_000_000}, {"seconds": MOST_63})
        ),
        *(
            _command(*invalid("open.load_interval"), open={"load_interval": interval})
            for interval in ({}, {"nanos": 1}, {"seconds": 3601}, {"seconds": -MOST_63})
        ),
        _command(open={"lease": {"seconds": 315_576_000_000}, "initial_credit": MOST_32}),
        _command(*invalid("command"), command_id=MOST_64),
        fields=[
            "OpenCommand.lease",
            "OpenCommand.load_interval",
            "OpenCommand.initial_credit",
            "StreamResultRequest.command_id",
        ],
        width=8,
    ),
    Input(
        name="told-loads",
        meaning="300 sessions that are told the load ten times a second",
        send=told_loads,
        fields=("OpenCommand.load_interval",),
    ),
    by_cases(
        "commands-by-id",
        "attaches, cancels and credits of what is not there, with numbers beyond all and servers "
        "that are not",
        _command(NOBODY, attach={"request_id": "none", "from_seq": MOST_64}),
        _command(ELSEWHERE, attach={"request_id": "none", "instance_id": "i" * 900_000}),
        _command(*invalid("attach.request_id"), attach={"request_id": "\x00" * 900_000}),
        _command(ELSEWHERE, cancel={"request_id": "none", "instance_id": "\n\x1b[2J"}),
        _command(
            "FAILED_PRECONDITION FAILED_PRECONDITION",
            credit={"request_id": "none", "tokens": MOST_32},
        ),
        _command(
            "FAILED_PRECONDITION FAILED_PRECONDITION",
            credit={"request_id": "none", "tokens": 0},
        ),
        fields=[
            "AttachCommand.request_id",
            "AttachCommand.from_seq",
            "AttachCommand.instance_id",
            "CancelCommand.instance_id",
            "CreditCommand.request_id",
            "CreditCommand.tokens",
        ],
        width=8,
    ),
    by_cases(
        "calls-by-id",
        "GetResult and Cancel of what is not there, with waits that are none and servers that are "
        "not",
        _get(NOBODY, from_seq=MOST_64, until_done=True, wait={"seconds": 60}),
        _get(*invalid("wait"), wait={"seconds": 61}),
        _get(*invalid("wait"), wait={"nanos": -1}),
        _get(*invalid("wait"), wait={"seconds": MOST_63}),
        _get(ELSEWHERE, instance_id="i" * 900_000),
        _get(*invalid("request_id"), request_id="\u20ac" * 300_000),
        _cancel(ELSEWHERE, request_ids=["none"], instance_id="i" * 900_000),
        _cancel(*invalid("request_ids")),
        _cancel(*invalid("request_ids"), request_ids=["none"] * 1025),
        _cancel(request_ids=["none"] * 1024),
        fields=[
            "GetResultRequest.request_id",
            "GetResultRequest.from_seq",
            "GetResultRequest.wait",
            "GetResultRequest.until_done",
            "GetResultRequest.instance_id",
            "CancelRequest.request_ids",
            "CancelRequest.instance_id",
        ],
        width=8,
    ),
    Input(
        name="read-again",
        meaning="a result with the most log-probabilities, read again and again, 32 at once",
        send=read_again,
        fields=("GetResultRequest.request_id", "OutputOptions.logprobs"),
    ),
    Input(
        name="the-same-call",
        meaning="the same call by 32 at once, and another one with its id",
        send=the_same_call,
        fields=("GenerationSpec.request_id",),
    ),
    by_cases(
        "needed-capabilities",
        "capabilities that nobody has, and too many, in every method",
        *_needing(1, "\x00none", MISSING),
        *_needing(16_000, "c", TOO_MANY),
        fields=[
            "StreamResultRequest.required_capabilities",
            *(f"{kind.DESCRIPTOR.name}.required_capabilities" for kind, _, _ in NEEDING.values()),
        ],
    ),
    by_cases(
        "detokenized",
        "ids that are not there, and special ones as many as fit",
        Case(
            MODEL + "Detokenize",
            lambda s: model.DetokenizeRequest(token_ids=[MOST_32]),
            invalid("token_ids[]"),
        ),
        Case(
            MODEL + "Detokenize",
            lambda s: model.DetokenizeRequest(
                token_ids=[1, 2] * (s.most_ids // 2), skip_special_tokens=False
            ),
        ),
        fields=["DetokenizeRequest.token_ids", "DetokenizeRequest.skip_special_tokens"],
    ),
)

_HEX = "0123456789abcdef"
_TRACE = f"00-{_HEX * 2}-{_HEX}-01"
HEADERS: dict[str, list[tuple[str, str | bytes]]] = {
    "no parent": [("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01")],
    "broken parents": [("traceparent", "ff-zz"), ("traceparent", "-" * 2000)],
    "two parents": [("traceparent", _TRACE)] * 50,
    "full state": [
        ("traceparent", _TRACE),
        ("tracestate", ",".join(f"a{n}@b={'v' * 250}" for n in range(32))),
    ],
    "broken state": [("traceparent", _TRACE), ("tracestate", "=,=,=," * 1000)],
    "full baggage": [("baggage", ",".join(f"k{n}={'v' * 30}" for n in range(180)))],
    "broken baggage": [("baggage", "%zz=%" * 1500)],
    "many names": [(f"x-{n}", "v" * 60) for n in range(80)],
    "binary": [("x-data-bin", bytes(range(256)) * 20), ("grpc-tags-bin", b"\xff" * 500)],
    "two tokens": [("authorization", "Bearer nobody")],
    "agents": [("x-forwarded-for", "1.2.3.4, " * 500), ("x-request-id", "\x7e" * 4000)],
}
"""Hostile metadata of calls. The transport refuses headers above the total size limit."""


def _beside(headers: list[tuple[str, str | bytes]], *answers: str) -> Case:
    return Case(
        GENERATE,
        lambda s: rpc.GenerateRequest(spec=SPEC),
        answers or (OK,),
        metadata=tuple(headers),
    )


_TOLD: tuple[Input, ...] = (
    by_cases(
        "headers",
        "parents, states and baggage of traces that are none or full, many names, bytes",
        *(
            _beside(found, "UNAUTHENTICATED TOKEN_INVALID")
            if name == "two tokens"
            else _beside(found)
            for name, found in HEADERS.items()
        ),
        fields=[],
        width=8,
    ),
    by_cases(
        "deadlines",
        "deadlines of a millisecond and of a few in each kind of call, 32 at once",
        *(
            Case(
                method,
                lambda s: rpc.GenerateRequest(spec={**SPEC, "stop": {"max_tokens": 500}}),
                ("DEADLINE_EXCEEDED (bare)", "CANCELLED (bare)", OK),
                patience_s=patience_s,
            )
            for method in (GENERATE, GENERATION + "GenerateStream", ADD)
            for patience_s in (0.001, 0.03)
        ),
        fields=[],
        width=32,
    ),
)

READING = Group("reading", (*_READING, *_TOLD))
