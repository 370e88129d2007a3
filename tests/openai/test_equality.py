"""What HTTP answers is what gRPC answers, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from headrace import AsyncClient
from openai._streaming import SSEDecoder

from tests.openai.asking import PATHS, draw, join, joined, over_grpc, whole
from tests.openai.doors import OpenDoor, open_door
from tests.service.callers import calling, make_directory
from tests.service.real_server import real_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
AT_ONCE = 8


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["demo", "tiny"])
async def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[AsyncClient, OpenDoor]]:
    """A client of a server, and a door before the same server."""
    if request.param == "demo":
        # In bfloat16 neighbours decide near-ties: of tokens, and of candidates.
        with real_server("--listen", "127.0.0.1:0", "--dtype", "float32") as server:
            server.wait_until_ready()
            target = server.addresses[0]
            async with AsyncClient(target) as client, open_door(target) as door:
                yield client, door
        return
    made = make_directory(tmp_path_factory.mktemp("models") / "tiny", "hermes")
    async with calling(made, "hermes") as client, open_door(client.target) as door:
        yield client, door


@pytest.mark.parametrize("start", range(0, 80, 20))
async def test_random_requests_have_the_answers_of_grpc(
    places: tuple[AsyncClient, OpenDoor], start: int
) -> None:
    client, door = places
    room = asyncio.Semaphore(AT_ONCE)

    async def compare(number: int) -> None:
        asked = draw(random.Random(number), number)
        async with room:
            right = await over_grpc(client, asked, f"{number} grpc")
            (await whole(door, asked, f"{number} whole")).check(right)
            (await joined(door, asked, f"{number} stream")).check(right)

    numbers = range(start, start + 20)
    found = await asyncio.gather(*map(compare, numbers), return_exceptions=True)
    differ = {n: one for n, one in zip(numbers, found, strict=True) if one is not None}
    assert not differ, "\n".join(f"{number}: {one!s}" for number, one in differ.items())


async def test_a_streams_bytes_are_the_same_events_at_every_cut(
    places: tuple[AsyncClient, OpenDoor],
) -> None:
    """As OpenAI's own decoder reads them, in two pieces and byte by byte."""
    _, door = places
    body = {
        "prompt": ["größe 水 🙂\n\ndata: x", "a"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 12,
        "seed": 3,
        "temperature": 1.5,
        "echo": True,
        "n": 2,
    }
    raw = await door.raw(PATHS["completions"], body)

    def read(*pieces: bytes) -> list[str]:
        return [event.data for event in SSEDecoder().iter_bytes(iter(pieces))]

    right = read(raw)
    *events, done = right
    assert done == "[DONE]"
    answer = join("completions", [json.loads(one) for one in events])
    for index, choice in enumerate(answer.choices):
        assert choice["text"].startswith(body["prompt"][index // 2])
    for cut in range(1, len(raw)):
        assert read(raw[:cut], raw[cut:]) == right, f"cut at {cut}"
    assert read(*(raw[i : i + 1] for i in range(len(raw)))) == right
