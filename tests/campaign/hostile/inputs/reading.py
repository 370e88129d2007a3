"""Session commands and calls by request id with hostile values, repeated commands and calls, and
hostile metadata.
"""

from __future__ import annotations

import itertools
from typing import Any

from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from tests.campaign.hostile.inputs.derived import FIELDS, MOST_32, of
from tests.campaign.hostile.inputs.kinds import OK, Case, Group, invalid
from tests.campaign.hostile.sending import (
    ADD,
    CANCEL,
    DETOKENIZE,
    GENERATE,
    GET,
    SESSION,
    STREAM,
    Sender,
)

SPEC: dict[str, Any] = {"text": {"text": "Once upon a time"}, "stop": {"max_tokens": 2}}


def _command(*answers: str, **command: Any) -> Case:
    return Case(SESSION, lambda s: rpc.StreamResultRequest(**command), answers or (OK,))


def _cancel(*answers: str, **question: Any) -> Case:
    return Case(CANCEL, lambda s: rpc.CancelRequest(**question), answers or (OK,))


READING = Group("reading")
READING.tries(
    "open-values",
    "sessions that are opened with leases and intervals that are none, and twice",
    *of("OpenCommand", "StreamResultRequest.command_id"),
    _command(open={"lease": {"seconds": 315_576_000_000}, "initial_credit": MOST_32}),
    width=8,
)


@READING.sends()
async def told_loads(s: Sender) -> None:
    """300 sessions that are told the load ten times a second."""
    opened = rpc.StreamResultRequest(open={"load_interval": {"nanos": 100_000_000}})
    raw = opened.SerializeToString()
    await s.crowd(300, lambda _: s.session([raw], stay=True))


READING.tries(
    "commands-by-id",
    "attaches, cancels and credits of what is not there, with numbers beyond all and servers "
    "that are not",
    *of("AttachCommand", "CancelCommand", "CreditCommand"),
    width=8,
)
READING.tries(
    "calls-by-id",
    "GetResult and Cancel of what is not there, with waits that are none and servers that are not",
    *of("GetResultRequest", "CancelRequest"),
    _cancel(*invalid("request_ids")),
    _cancel(*invalid("request_ids"), request_ids=["none"] * 1025),
    _cancel(request_ids=["none"] * 1024),
    width=8,
)


@READING.sends()
async def read_again(s: Sender) -> None:
    """A result with the most log-probabilities, read again and again, 32 at once."""
    name = f"kept-{s.source.getrandbits(40):x}"
    spec = {
        **SPEC,
        "request_id": name,
        "stop": {"max_tokens": 200, "ignore_eos": True},
        "output": {"logprobs": s.limits.max_logprobs},
    }
    added = rpc.AddRequestRequest(spec=spec).SerializeToString()
    question = rpc.GetResultRequest(request_id=name, until_done=True, wait={"seconds": 60})
    await s.ask(ADD, added, (OK,))
    await s.again(32, lambda _: s.ask(GET, question.SerializeToString(), (OK,)))


@READING.sends()
async def the_same_call(s: Sender) -> None:
    """The same call by 32 at once, and another one with its id."""
    numbers = itertools.count()
    run = f"{s.source.getrandbits(40):x}"

    async def one(_: int) -> None:
        name = f"same-{run}-{next(numbers) // 32}"
        for tokens in (2, 3):
            spec = {**SPEC, "request_id": name, "stop": {"max_tokens": tokens}}
            raw = rpc.GenerateRequest(spec=spec).SerializeToString()
            await s.ask(GENERATE, raw, (OK, "ALREADY_EXISTS DUPLICATE_REQUEST_ID"))

    await s.again(64, one)


READING.tries(
    "needed-capabilities",
    "capabilities that nobody has, and too many, in every method",
    *of(*(key for key in FIELDS if key.endswith(".required_capabilities"))),
)
READING.tries(
    "detokenized",
    "ids that are not there, and special ones as many as fit",
    *of("DetokenizeRequest"),
    Case(
        DETOKENIZE,
        lambda s: model.DetokenizeRequest(
            token_ids=[1, 2] * (s.most_ids // 2), skip_special_tokens=False
        ),
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


READING.tries(
    "headers",
    "parents, states and baggage of traces that are none or full, many names, bytes",
    *(
        Case(
            GENERATE,
            lambda s: rpc.GenerateRequest(spec=SPEC),
            ("UNAUTHENTICATED TOKEN_INVALID",) if name == "two tokens" else (OK,),
            metadata=tuple(found),
        )
        for name, found in HEADERS.items()
    ),
    width=8,
)
READING.tries(
    "deadlines",
    "deadlines of a millisecond and of a few in each kind of call, 32 at once",
    *(
        Case(
            method,
            lambda s: rpc.GenerateRequest(spec={**SPEC, "stop": {"max_tokens": 500}}),
            ("DEADLINE_EXCEEDED (bare)", "CANCELLED (bare)", OK),
            patience_s=patience_s,
        )
        for method in (GENERATE, STREAM, ADD)
        for patience_s in (0.001, 0.03)
    ),
    width=32,
)
