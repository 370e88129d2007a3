"""Part `proxy`: headers that gRPC does not limit, sent directly and through a proxy that limits
them.

gRPC's core buffers a call's headers until their end, whatever `max_metadata_size` says, and HTTP/2
lets them continue in CONTINUATION frames indefinitely. A stranger needs no token for this attack.
The same flood is therefore sent twice. Sent directly, the server's memory growth is reported but
not judged. Sent through Envoy with the configuration in `deploy/`, neither the server nor Envoy may
grow by more than the limit for strangers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import grpc

from benchmarks.models import DEMO
from benchmarks.processes import SystemFailure
from benchmarks.proxies.running import ENVOY, proxy
from benchmarks.rig.serving import Process
from tests.campaign.hostile.judging import STRANGERS_BYTES
from tests.campaign.hostile.sending import MODEL, told
from tests.campaign.hostile.server import WITNESS, Server
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.proxy.flood import BLOCKS, flood
from tests.campaign.witness.memory import Watched

SECONDS = 5.0
READY_S = 30.0
"""The time limit for Envoy to find the server healthy."""
STRAIGHT, THROUGH = "straight", "through Envoy"
LACK = "gRPC's core has no bound for it, docs/promises.md says so"


def run(course: Course) -> None:
    """Send each kind of headers by each route."""
    for way in (STRAIGHT, THROUGH):
        for kind in BLOCKS:
            if not course.is_wanted(f"{way}, {kind}"):
                continue
            if way == THROUGH and ENVOY.path is None:
                course.add(_row(way, kind, not_judged=ENVOY.missing))
            else:
                course.add(flooded(course, way, kind))


def flooded(course: Course, way: str, kind: str) -> Tried:
    """Flood a new server and return the row. Raises SystemFailure if it or Envoy did not start."""
    with closing(Server(DEMO, course.folder)) as server, _before(server, way, course) as before:
        pids = {name.replace("_", " "): pid for name, pid in server.pids.items()}
        if before is not None:
            pids["Envoy"] = before.pid
        port = _port(server) if before is None else before.port
        watched = {name: Watched(pid) for name, pid in pids.items()}
        for one in watched.values():
            one.begin()
        sent = flood(
            port,
            BLOCKS[kind],
            course.seconds or SECONDS,
            lambda: max(one.memory().growth for one in watched.values()),
        )
        answer = _answer(server, port)  # what was sent before is read by then
        growths = {name: one.memory().growth for name, one in watched.items()}
        wrong = [
            f"{name} grew by {grown / 1e6:.0f} MB, above {STRANGERS_BYTES / 1e6:.0f}"
            for name, grown in growths.items()
            if grown > STRANGERS_BYTES
        ]
        if answer != "OK":
            wrong.append(f"a caller got {answer} afterwards")
        if "engine" not in server.pids:
            wrong.append("a process of the server has ended")
    grown = ", ".join(f"{name} {size / 1e6:+.0f} MB" for name, size in growths.items())
    stopped = ", where it was stopped" if sent.is_capped else ""
    return _row(
        way,
        kind,
        count=sent.connections,
        worst=f"{sent.bytes / 1e6:,.0f} MB sent: {grown}{stopped}",
        wrong=wrong,
        not_judged=LACK if way == STRAIGHT else "",
    )


def _row(way: str, kind: str, **more: Any) -> Tried:
    what = f"connections with {kind} that do not end, {way} to the server"
    values = {"name": f"{way}, {kind}", "what": what, "promises": (7,), "count": 0, **more}
    return Tried(**values)


@contextmanager
def _before(server: Server, way: str, course: Course) -> Iterator[Process | None]:
    """Start Envoy in front of a server and wait until it serves; None for the direct route."""
    if way == STRAIGHT:
        yield None
        return
    with proxy(ENVOY, course.folder, _port(server)) as before:
        ends = time.monotonic() + READY_S
        while (answer := _answer(server, before.port)) != "OK":
            before.check()
            if time.monotonic() > ends:
                raise SystemFailure(f"through Envoy a call ends with {answer}")
            time.sleep(0.1)
        yield before


def _port(server: Server) -> int:
    return int(server.target.rpartition(":")[2])


def _answer(server: Server, port: int) -> str:
    """Return the answer that a caller with a token gets at a port."""
    try:
        server.call(MODEL + "GetModel", b"", WITNESS, target=f"127.0.0.1:{port}")
    except grpc.RpcError as error:
        return told(error)
    return "OK"


PROXY = Part(
    name="proxy",
    meaning="headers without an end, straight to the server and through the proxy of deploy/",
    run=run,
    has_calm=False,
    in_cut=False,
)
