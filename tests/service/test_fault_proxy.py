"""The proxy leaves nothing open, whenever it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import pytest

from tests.service.fault_proxy import fault_proxy


@pytest.mark.parametrize("passes", range(5))
async def test_a_connection_that_comes_as_it_closes_is_closed(passes: int) -> None:
    loop = asyncio.get_running_loop()
    seen: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: seen.append(context))
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        target = f"127.0.0.1:{upstream.getsockname()[1]}"
        async with fault_proxy(target) as proxy:
            host, _, port = proxy.target.rpartition(":")
            client = socket.create_connection((host, int(port)))
            for _ in range(passes):
                await asyncio.sleep(0)
    with client:
        gc.collect()  # tells of sockets that nobody closed
        assert seen == []
        client.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # it had not been accepted yet
            assert client.recv(1) == b""
