from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import headrace
import pytest

from tests.clients.python.scripted import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.stop()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[headrace.Client]:
    with headrace.Client(server.target) as opened:
        yield opened


@pytest.fixture
async def aclient(server: ScriptedServer) -> AsyncIterator[headrace.AsyncClient]:
    async with headrace.AsyncClient(server.target) as opened:
        yield opened
