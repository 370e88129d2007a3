"""Where a request lives: every answer tells which process it is from, and one that is meant for
another process is refused with the name of that one.
"""

from __future__ import annotations

from typing import Any

import grpc
from headrace.v1 import generation_service_pb2 as rpc

from tests.service.fake_engine import FakeEngine
from tests.service.helpers import Refused, details, refused, serving, spec

ANOTHER = "hr-another"


async def test_every_answer_tells_who_gave_it() -> None:
    async with serving() as h:
        mine = h.server.instance_id
        added = await h.generation.AddRequest(
            rpc.AddRequestRequest(spec=spec(request_id="a", stop={"max_tokens": 2}))
        )
        read = await h.generation.GetResult(
            rpc.GetResultRequest(request_id="a", instance_id=mine, wait={"seconds": 9})
        )
        cancelled = await h.generation.Cancel(
            rpc.CancelRequest(request_ids=["a"], instance_id=mine)
        )
        whole = await h.generate(spec(stop={"max_tokens": 2}))
        streamed = await h.stream(spec(stop={"max_tokens": 2}))
        session = h.session()
        await session.add(spec(stop={"max_tokens": 2}))
        messages = await session.end()
    for answer in (added, read, cancelled, whole):
        assert answer.instance_id == mine
    for stream in (streamed, messages):  # once
        first, *others = stream
        assert first.instance_id == mine
        assert not any(message.instance_id for message in others)


def check_wrong(error: Refused, mine: str) -> None:
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "WRONG_INSTANCE")
    metadata = error.details["ErrorInfo"].metadata
    assert metadata == {"owner_instance_id": ANOTHER, "instance_id": mine}
    assert ANOTHER in error.message


async def test_who_is_not_meant_says_who_is_and_does_nothing() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        mine = h.server.instance_id
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a")))
        wrong: dict[str, Any] = {"instance_id": ANOTHER}
        cancel = rpc.CancelRequest(request_ids=["a"], **wrong)
        check_wrong(await refused(h.generation.Cancel(cancel)), mine)
        read = rpc.GetResultRequest(request_id="a", **wrong)
        check_wrong(await refused(h.generation.GetResult(read)), mine)
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a", **wrong))
        await session.send(2, cancel=rpc.CancelCommand(request_id="a", **wrong))
        messages = await session.end()
        assert not h.engine.cancelled
    rejections = [one for message in messages for one in message.rejections]
    assert sorted(one.command_id for one in rejections) == [1, 2]
    for one in rejections:
        assert one.status.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert details(one.status)["ErrorInfo"].reason == "WRONG_INSTANCE"
