"""The benchmark of the wire: what it counts, and that a session stays as small as it says."""

from __future__ import annotations

from collections import Counter

import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.wire_size import PARTS, add_message, measure, merged_share, summary
from tests.service.real_server import demo_server

MOST = {"text": 22.0, "ids": 15.0}
"""Bytes a token, with 32 requests of 64 tokens."""


def message() -> rpc.StreamResultResponse:
    """One with all kinds of events, and something else."""
    return rpc.StreamResultResponse(
        instance_id="abc",
        events=[
            pb.ResultEvent(request_number=1, seq=1, accepted=pb.Accepted(request_id="r" * 32)),
            pb.ResultEvent(request_number=1, seq=2, prompt=pb.PromptProcessed(prompt_tokens=3)),
            pb.ResultEvent(
                request_number=1, seq=3, delta=pb.Delta(token_ids=[7, 300], text=" dog")
            ),
            pb.ResultEvent(
                request_number=1,
                seq=4,
                finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH),
            ),
        ],
    )


def test_every_byte_is_counted_once() -> None:
    counted: Counter[str] = Counter()
    sent = message()
    add_message(counted, sent)
    parts = (*PARTS, "delta", "besides events")
    assert counted["total"] == sent.ByteSize() == sum(counted[part] for part in parts)
    assert counted["besides events"] == 5  # the instance's id, its tag and its length
    assert counted["accepted.request_id"] == 34
    assert counted["tokens"] == 2
    assert merged_share(counted) == 0.5
    found = summary([counted])
    assert found["bytes_a_token"] == sent.ByteSize() / 2
    assert sum(found["of_it"].values()) == pytest.approx(found["bytes_a_token"])
    delta = {name: size * 2 for name, size in found["delta_fields"].items()}
    assert delta == {
        "event's tag and length": 2,
        "request_number": 2,
        "seq": 2,
        "delta's tag and length": 2,
        "token_ids": 5,
        "text": 6,
    }


@pytest.mark.parametrize("kind", sorted(MOST))
def test_a_session_is_small_on_the_wire(kind: str) -> None:
    address = demo_server().addresses[0]
    found = summary([measure(address, kind, 32, 64, run=1)])
    assert found["bytes_a_token"] <= MOST[kind]
