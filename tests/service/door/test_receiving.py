"""How large a message may be where nobody says, in whose turn it is parsed, and that a refused one
is let go.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import model_service_pb2 as model

from engine.contract.errors import InvalidRequestError
from service.door.reading import LARGE_BYTES, Unparsed, Unreadable, parsed
from service.door.receiving import default_receive_bytes
from service.errors.call_errors import MalformedMessageError
from tests.service.helpers import refused, serving, spec, until

MIB = 1 << 20


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ('{"max_position_embeddings": 2048}', MIB),
        ('{"max_position_embeddings": 262144}', 2 * MIB),
        ('{"text_config": {"max_position_embeddings": 1048576}}', 8 * MIB),
        ('{"n_positions": 262144}', 2 * MIB),
        ('{"max_position_embeddings": "many"}', MIB),
        ("[1]", MIB),
        ("{", MIB),
        ("[" * 100_000, MIB),
        (None, MIB),
    ],
)
def test_it_comes_from_the_context_that_the_model_declares(
    tmp_path: Path, config: str | None, right: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert default_receive_bytes(str(tmp_path)) == right


@pytest.mark.parametrize("model", ["some-body/some-model-that-is-not-here", "/no/such/directory"])
def test_a_model_that_is_not_here_gets_room_for_a_long_context(model: str) -> None:
    assert default_receive_bytes(model) == 8 * MIB


async def test_others_go_on_between_large_messages_that_arrive_together() -> None:
    course: list[str] = []
    over = asyncio.Event()

    async def neighbour() -> None:
        while not over.is_set():
            course.append("neighbour")
            await asyncio.sleep(0)

    def parse(raw: bytes) -> str:
        course.append("parse")
        return raw.decode()

    turn = asyncio.Lock()
    going = asyncio.ensure_future(neighbour())
    large = [parsed(Unparsed(f"{i}".encode(), parse, turn)) for i in range(9)]
    assert await asyncio.gather(*large) == [f"{i}" for i in range(9)]
    over.set()
    await going
    assert course.count("parse") == 9
    assert ("parse", "parse") not in pairwise(course)


async def test_a_large_message_that_cannot_be_read_is_refused_in_its_turn() -> None:
    turn = asyncio.Lock()
    wrong = Unparsed(b"?", lambda _: Unreadable(MalformedMessageError()), turn)
    with pytest.raises(MalformedMessageError):
        await parsed(wrong)
    assert not turn.locked()
    async with serving() as h:
        raw = h.channel.unary_unary("/headrace.v1.ModelService/Tokenize")
        error = await refused(raw(b"\xff" * (LARGE_BYTES + 1)))
        assert (error.code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
        )
        text = model.TokenizeRequest(text={"text": "x" * (LARGE_BYTES + 1)})
        assert len((await h.models.Tokenize(text)).token_ids) == LARGE_BYTES + 1


@pytest.mark.parametrize("call", ["Generate", "GenerateStream", "StreamResult"])
async def test_what_was_refused_is_let_go_at_once(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Not by the garbage collector: a hundred large messages may come before it does."""

    class Held:
        """Stands for what the frames of the refusal hold."""

    held: list[weakref.ref[Held]] = []

    def refuse(*_: Any) -> str:
        mine = Held()
        held.append(weakref.ref(mine))
        raise InvalidRequestError("request_id", "is wrong")

    async with serving() as h:
        monkeypatch.setattr(h.server.state.front.converter, "draft", refuse)
        gc.disable()
        try:
            if call == "StreamResult":
                session = h.session()
                await session.add(spec())
                await session.read_until(lambda message: message.rejections)
            else:
                await refused(h.generate(spec()) if call == "Generate" else h.stream(spec()))
            await until(lambda: held[0]() is None)
        finally:
            gc.enable()
