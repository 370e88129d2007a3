"""What clients leave behind: programs that `test_leaving.py` runs, each in a process of its own.

Run as `python leaving.py PROGRAM TARGET [ARGUMENT]`; a program prints what came of it, as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import headrace

HANG_S = 5.0
"""A child that has not ended by then hangs."""


def use(target: str, kind: str) -> None:
    """Makes a client, uses it in one way, and drops it without a close."""
    client = headrace.Client(targets(target, kind))
    if kind == "unused":
        return
    if kind in ("call", "several"):
        client.generate("a b")
    elif kind == "stream":
        next(client.stream("hold on"))
    elif kind == "session":
        next(iter(client.session().submit("hold on")))
    elif kind == "lease":
        next(iter(client.session(lease=5).submit("hold on")))
    elif kind == "batch":
        next(client.batch(["a", "hold on"], max_in_flight=1))
    else:
        raise ValueError(kind)


def targets(target: str, kind: str) -> str | list[str]:
    """One server, or two addresses of it."""
    return [target, target.replace("127.0.0.1", "localhost")] if kind == "several" else target


async def use_async(target: str, kind: str) -> None:
    """The same for asyncio."""
    client = headrace.AsyncClient(targets(target, kind))
    if kind == "unused":
        return
    if kind in ("call", "several"):
        await client.generate("a b")
    elif kind == "stream":
        await anext(client.stream("hold on"))
    elif kind in ("session", "lease"):
        session = client.session(lease=5 if kind == "lease" else None)
        await session.__aenter__()
        await anext(aiter(session.submit("hold on")))
    elif kind == "batch":
        await anext(client.batch(["a", "hold on"], max_in_flight=1))
    else:
        raise ValueError(kind)


def counts() -> tuple[int, int]:
    """The process' threads and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def memory() -> int:
    """The process' resident memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def dropped(target: str, argument: str) -> Any:
    """Uses and drops `times` clients, and tells what was there before and after."""
    kind, times = argument.split("*")
    keep = headrace.Client(target)  # so that gRPC's own threads stay
    for _ in range(3):
        keep.generate("a")
        use(target, kind)
    settle(0.5, (0, 0))
    before, held = counts(), memory()
    for _ in range(int(times)):
        use(target, kind)
    settle(10, (before[0] + 2, before[1] + 2))
    return {"before": before, "after": counts(), "grown": memory() - held}


def dropped_async(target: str, argument: str) -> Any:
    """The same for asyncio."""
    kind, times = argument.split("*")

    async def run() -> Any:
        async def settle(seconds: float, wanted: tuple[int, ...]) -> None:
            end = time.monotonic() + seconds
            gc.collect()
            while any(
                has > want
                for has, want in zip((*counts(), len(asyncio.all_tasks())), wanted, strict=True)
            ):
                if time.monotonic() > end:
                    return
                await asyncio.sleep(0.02)
                gc.collect()

        keep = headrace.AsyncClient(target)  # so that gRPC's thread for asyncio stays
        await keep.generate("a")
        for _ in range(3):
            await use_async(target, kind)
        await settle(0.5, (0, 0, 0))
        before, held = counts(), memory()
        for _ in range(int(times)):
            await use_async(target, kind)
        await settle(10, (before[0] + 2, before[1] + 2, 1))
        tasks = len(asyncio.all_tasks())
        return {"before": before, "after": counts(), "grown": memory() - held, "tasks": tasks}

    return asyncio.run(run())


def settle(seconds: float, wanted: tuple[int, int]) -> None:
    """Waits until there is no more than this, at most so many seconds."""
    end = time.monotonic() + seconds
    gc.collect()
    while any(has > want for has, want in zip(counts(), wanted, strict=True)):
        if time.monotonic() > end:
            return
        time.sleep(0.02)
        gc.collect()


@contextmanager
def in_state(target: str, state: str) -> Iterator[headrace.Client]:
    """A client that is unused, idle, or has a call of this kind open."""
    several = state.startswith("several")
    client = headrace.Client(f"dns:///{target}" if several else target)
    kept: Any = None
    if state == "idle" or state == "several idle":
        client.generate("a b")
    elif state == "call":
        client.generate("a b")  # a fork while it connects may break the call, which is tried again
        threading.Thread(target=waiting, args=[client], daemon=True).start()
        while not list(client._servers.links[0].open_calls):
            time.sleep(0.001)
    elif state == "stream":
        next(kept := client.stream("hold on"))
    elif state in ("session", "lease"):
        kept = client.session(lease=5 if state == "lease" else None)
        next(iter(kept.submit("hold on")))
    yield client
    del kept


def waiting(client: headrace.Client) -> None:
    """A call that waits for ever, in a thread."""
    with suppress(headrace.HeadraceError):
        client.generate("hold on")


def in_child(act: Callable[[], Any]) -> list[Any]:
    """What the call of a function in a forked child gives or raises, and after how many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps([said, time.monotonic() - began]).encode())
        sys.exit()  # the interpreter's whole end
    os.close(writing)
    end = time.monotonic() + HANG_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return ["hangs", HANG_S]
        time.sleep(0.005)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return json.loads(said) if said else [f"died of {ended[1]}", 0]


def forked(target: str, state: str) -> Any:
    """Forks eight times with a client in a state. Tells what each child's call gave, what a call of
    a client of its own gave, and what the parent's client still gives.
    """
    with in_state(target, state) as client:
        old = [in_child(lambda: client.generate("a b").text) for _ in range(8)]
        new = [in_child(lambda: headrace.Client(target).generate("a b").text) for _ in range(2)]
        return {"old": old, "new": new, "parent": client.generate("a b").text}


def forked_session(target: str, state: str) -> Any:
    """What a parent's session, handle and stream say in a child; and that they go on."""
    client = headrace.Client(target)
    with client.session(lease=5 if state == "lease" else None) as session:
        handle, stream = session.submit("hold on"), client.stream("hold on")
        next(iter(handle)), next(stream)

        def close() -> str:
            session.close()
            stream.close()
            return "closed"

        said = [
            in_child(lambda: handle.result().text),
            in_child(lambda: session.submit("a").request_id),
            in_child(lambda: next(stream).text),
            in_child(close),
        ]
        handle.cancel()
        client.cancel(stream.request_id)
        return {"said": said, "parent": [handle.result(5).text, stream.result().text]}


def forked_async(target: str, state: str) -> Any:
    """A client for asyncio, used in children: made, used or closed before the fork."""

    async def ask(client: headrace.AsyncClient) -> str:
        return (await client.generate("a b")).text

    async def before(client: headrace.AsyncClient) -> Any:
        if state != "unused":
            await ask(client)
        if state == "closed":
            await client.close()
            client = headrace.AsyncClient(target)
        said = [in_child(lambda: asyncio.run(ask(client))) for _ in range(8)]
        other = [in_child(lambda: headrace.Client(target).generate("a b").text) for _ in range(2)]
        return {"old": said, "new": other, "parent": await ask(client)}

    return asyncio.run(before(headrace.AsyncClient(target)))


def left_open(target: str, state: str) -> Any:
    """Ends with something open."""
    state_of = in_state(target, state)
    state_of.__enter__()
    globals()["kept"] = state_of
    return time.time()


def asked_in_child(target: str, _argument: str) -> Any:
    """Forks with a client of a name that has been used, and calls in the child for each line of
    stdin.
    """
    client = headrace.Client(f"dns:///{target}")
    client.generate("a b")
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        return "over"
    for _ in sys.stdin:
        try:
            said = client.generate("a b").text
        except headrace.HeadraceError as error:
            said = error.code.name
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    found = globals()[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(found), flush=True)  # noqa: T201
