"""`headrace-server serve` as a separate process, over a Unix socket; this process is its client.

Options: "style" is "session" (all requests on one StreamResult call) or "streams" (one
GenerateStream call per request); "flags" are additional flags of the server.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from typing import Any

import headrace

from benchmarks.adapters.loop import Turn, main, versions
from benchmarks.rig.serving import serve
from engine.contract.config import CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE


class HeadraceServer:
    """A server and its client."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        limits, options = order["limits"], order["options"]
        self._style = options.get("style", "session")
        device = order.get("device", "cpu")
        on_cuda = device.startswith("cuda")
        block_size = options.get("block_size", CUDA_BLOCK_SIZE if on_cuda else CPU_BLOCK_SIZE)
        blocks = options.get(
            "num_blocks", -(-limits["kv_tokens"] // block_size) + limits["max_requests"]
        )
        flags = [
            "--dtype", order["dtype"], "--device", device,
            "--threads", str(order["threads"]),
            "--block-size", str(block_size), "--num-blocks", str(blocks),
            "--max-requests-per-batch", str(limits["max_requests"]), *options.get("flags", []),
        ]  # fmt: skip
        stack = contextlib.ExitStack()
        server = stack.enter_context(
            serve("--log-level", "warning", *flags, model=order["model"], on_socket=True)
        )
        atexit.register(stack.close)
        self._address = server.address
        return {
            "pid": server.pid,
            "start_s": server.start_s,
            "settings": {"style": self._style, "flags": flags},
            "versions": versions("headrace-server", "headrace", "torch", "transformers", "grpcio"),
        }

    def run(self, turn: Turn) -> None:
        asyncio.run(self._run(turn))

    async def _run(self, turn: Turn) -> None:
        async with headrace.AsyncClient(self._address, rpc_timeout=None) as client:
            turn.started = time.perf_counter()  # a client that is connected for every turn
            if self._style == "streams":
                await _pace(turn, lambda request: client.stream(request["prompt"], **_of(request)))
                return
            async with client.session() as session:
                await _pace(turn, lambda request: session.submit(request["prompt"], **_of(request)))


async def _pace(turn: Turn, submit: Any) -> None:
    """Submit the requests that are due, and read their results."""
    changed = asyncio.Event()

    async def read(index: int) -> None:
        output = submit(turn.requests[index])
        is_stream = isinstance(output, headrace.AsyncStream)
        async with output if is_stream else contextlib.nullcontext():
            async for chunk in output:
                turn.add(index, chunk.token_ids)
        turn.finish(index)
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        while not turn.is_over:
            for index in turn.due():
                tasks.create_task(read(index))
            changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(turn.wait_s()):
                    await changed.wait()


def _of(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_tokens": request["max_tokens"],
        "temperature": 0.0,
        "ignore_eos": True,
        "omit_text": True,
    }


if __name__ == "__main__":
    main(HeadraceServer())
