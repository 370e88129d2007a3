"""Ten minutes of everything that a client can do, while its servers come and go.

1. A name has three servers. The workers (see `_workers`) do what callers do, and check that each
   outcome has exactly the tokens that its prompt determines, once.
2. One server after another is replaced, as in a rolling update. A new one starts. Once it is ready,
   it is added to the name and the old one is removed; the old one drains and ends.
3. In the middle one server is killed. Only requests that had received tokens from it may fail.
4. At the end a fourth server is added. The time from its readiness until it has its share of the
   load is measured.
"""

from __future__ import annotations

import itertools
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import headrace
from headrace import FinishReason, Result

from tests.campaign.fleet.placing import accepted, timed_server
from tests.service.fake_server import PREFIX, expected
from tests.service.real_server import ServerProcess

NAME = "headrace.fleet"
TOKENS = 24
STEP_MS = 20.0
RUNNING = 64
_SHARE_WINDOW_S = 1.0


class Campaign:
    """One run. `seconds`: its duration; `seed`: the seed of the workers' actions; `of_servers`:
    options of each server.
    """

    servers = 3
    """How many servers there are at first."""
    strangers = 0.1
    """The share of added requests that another client collects."""

    def __init__(self, *, seconds: float, seed: int, **of_servers: float) -> None:
        self._seconds = seconds
        self._of_servers = of_servers
        self._seed = seed
        self._port = _free_port()
        self._hosts = itertools.count(2)
        self._listed: list[ServerProcess] = []
        self._all: list[ServerProcess] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._faults: list[str] = []
        self._killed_at = 0.0
        self._departures = 0
        """Grows by one when a server begins to leave, and by one when it has left."""

    def run(self) -> dict[str, Any]:
        try:
            with self._resolving():
                for _ in range(self.servers):
                    self._add(self._started())
                with headrace.Client(f"dns:///{NAME}:{self._port}") as client:
                    client.wait_until_ready()
                    return self._run(client)
        finally:
            for server in self._all:
                server.close()

    def _run(self, client: headrace.Client) -> dict[str, Any]:
        workers = self._workers(client)
        threads = [
            threading.Thread(target=self._work, args=[name, work, i], daemon=True)
            for i, (name, work) in enumerate(workers)
        ]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        seen = self._happen(begun)
        self._stop.set()
        for thread in threads:
            thread.join(120)
        stuck = sum(thread.is_alive() for thread in threads)
        return {
            "seconds": self._seconds,
            "servers": len(self._all),
            "outcomes": dict(sorted(self._outcomes.items())),
            "faults": self._faults[:50],
            "number_of_faults": len(self._faults),
            "workers_that_never_ended": stuck,
            **seen,
        }

    def _happen(self, begun: float) -> dict[str, Any]:
        """Replace, kill and add servers while the workers work, and return what happened."""
        replaced = 0
        pause = self._seconds / 8
        while time.monotonic() - begun < self._seconds * 0.85:
            time.sleep(pause)
            if replaced == 2:
                self._kill_one()
            else:
                self._replace(self._listed[0])
            replaced += 1
        share_s = self._fourth()
        time.sleep(max(begun + self._seconds - time.monotonic(), 0))
        return {"fourth_has_its_share_after_s": share_s}

    # ---- servers ---------------------------------------------------------------------------------

    @contextmanager
    def _resolving(self) -> Iterator[None]:
        """Resolve the name to the addresses of the listed servers during the block."""
        ask = socket.getaddrinfo

        def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
            if host != NAME:
                return ask(host, port, *rest, **more)
            with self._lock:
                hosts = [server.addresses[0].rpartition(":")[0] for server in self._listed]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

        with mock.patch("socket.getaddrinfo", look_up):
            yield

    def _started(self) -> ServerProcess:
        server = timed_server(
            f"127.0.0.{next(self._hosts)}:{self._port}",
            step_ms=STEP_MS,
            running=RUNNING,
            cached=30,
            **self._of_servers,
        )
        self._all.append(server)
        server.wait_until_ready()
        return server

    def _add(self, server: ServerProcess) -> None:
        with self._lock:
            self._listed.append(server)

    def _replace(self, old: ServerProcess) -> None:
        self._add(self._started())
        with self._lock:
            self._listed.remove(old)
        with self._departing():
            old.signal(signal.SIGTERM)
            code = old.ended()
        self._count("drained" if code == 0 else f"drained with exit code {code}")

    def _kill_one(self) -> None:
        doomed = self._listed[0]
        self._killed_at = time.monotonic()
        with self._departing():
            doomed.close()
        with self._lock:
            self._listed.remove(doomed)
        self._count("killed")
        self._add(self._started())

    @contextmanager
    def _departing(self) -> Iterator[None]:
        self._departures += 1
        try:
            yield
        finally:
            self._departures += 1

    def _has_one_left(self, since: int) -> bool:
        """Whether a server left, or was leaving, after the given count of departures."""
        return since % 2 == 1 or self._departures != since

    def _fourth(self) -> float | None:
        """Add a fourth server. Return how many seconds after its readiness it had 0.8 of a quarter
        of all requests that were accepted in a second; None if not within a minute.
        """
        new = self._started()
        begun = time.monotonic()
        self._add(new)
        before = {server: accepted(server.addresses[0]) for server in self._listed}
        while time.monotonic() - begun < 60:
            time.sleep(_SHARE_WINDOW_S)
            now = {server: accepted(server.addresses[0]) for server in self._listed}
            grown = {server: now[server] - before[server] for server in now}
            before = now
            if grown[new] * 4 >= 0.8 * sum(grown.values()) > 0:
                return round(time.monotonic() - begun, 1)
        return None

    # ---- what callers do -------------------------------------------------------------------------

    def _workers(
        self, client: headrace.Client
    ) -> list[tuple[str, Callable[[headrace.Client, random.Random], None]]]:
        kinds: list[tuple[str, Callable[[headrace.Client, random.Random], None], int]] = [
            ("session", self._session, 2),
            ("lost streams", self._lost_streams, 1),
            ("unary", self._unary, 3),
            ("stream", self._stream, 2),
            ("batch", self._batch, 1),
            ("added", self._added, 2),
        ]
        self._client = client
        return [(name, work) for name, work, count in kinds for _ in range(count)]

    def _work(
        self, name: str, work: Callable[[headrace.Client, random.Random], None], number: int
    ) -> None:
        source = random.Random(f"{self._seed}/{name}/{number}")
        while not self._stop.is_set():
            try:
                work(self._client, source)
            except Exception as error:
                self._fault(f"{name}: {type(error).__name__}: {error}")

    def _session(self, client: headrace.Client, source: random.Random) -> None:
        """Run a session of 100 requests, some of which are cancelled."""
        with client.session(lease=30) as session:
            flights: list[tuple[str, list[int], Any]] = []
            for i in range(100):
                prompt, kind = _prompt(source), "session"
                handle = session.submit(prompt, max_tokens=TOKENS)
                if i % 10 == 9:
                    kind = "session, with a cancel"
                    next(iter(handle), None)
                    handle.cancel()
                flights.append((kind, prompt, handle))
                if len(flights) >= 12:
                    self._judge(*flights.pop(0))
            for flight in flights:
                self._judge(*flight)

    def _lost_streams(self, client: headrace.Client, source: random.Random) -> None:
        """Run a session whose streams are lost midway; its requests are attached again. A server
        that drains does not wait for the attach: what it has finished meanwhile may go with it.
        """
        since = self._departures
        with client.session(lease=30) as session:
            prompts = [_prompt(source) for _ in range(6)]
            flights = [(one, session.submit(one, max_tokens=TOKENS)) for one in prompts]
            next(iter(flights[0][1]), None)
            core: Any = session._core
            with session._lock:
                calls = [link.wire._call for link in core.links]
            for call in calls:
                call.cancel()
            for prompt, handle in flights:
                self._judge("lost stream", prompt, handle, since)

    def _unary(self, client: headrace.Client, source: random.Random) -> None:
        prompt = _prompt(source)
        self._check("unary", prompt, client.generate(prompt, max_tokens=TOKENS))

    def _stream(self, client: headrace.Client, source: random.Random) -> None:
        prompt = _prompt(source)
        with client.stream(prompt, max_tokens=TOKENS) as stream:
            self._judge("stream", prompt, stream)

    def _batch(self, client: headrace.Client, source: random.Random) -> None:
        prompts = [_prompt(source) for _ in range(40)]
        for index, outcome in client.batch(prompts, max_tokens=TOKENS, max_in_flight=16):
            if isinstance(outcome, Result):
                self._check("batch", prompts[index], outcome)
            else:
                self._fault(f"batch: {outcome}")

    def _added(self, client: headrace.Client, source: random.Random) -> None:
        """Add a request that runs by itself, and read it from the same client or another one. If it
        is lost with its server, it is added again, as docs/fleet.md says.
        """
        prompt, since = _prompt(source), self._departures
        name = client.add_request(prompt, max_tokens=TOKENS).request_id
        kind = "added"
        try:
            if source.random() < self.strangers:
                kind = "added, read by a stranger"
                with headrace.Client(client.target) as stranger:
                    stranger.wait_until_ready()
                    result = stranger.get_result(name)
            else:
                result = client.get_result(name)
        except (headrace.UnavailableError, headrace.NotFoundError):
            if not self._has_one_left(since):
                raise
            kind = "added again"
            client.add_request(prompt, max_tokens=TOKENS, request_id=name)
            result = client.get_result(name)
        self._check(kind, prompt, result)

    # ---- judging ---------------------------------------------------------------------------------

    def _judge(self, kind: str, prompt: list[int], handle: Any, since: int | None = None) -> None:
        """Read a request to its end and check its outcome.

        since: the count of departures when it began, if any server that left may have taken it.
        """
        got: list[int] = []
        try:
            for chunk in handle:
                got += chunk.token_ids
            result = handle.result()
        except headrace.HeadraceError as error:
            whole = expected(prompt, TOKENS)
            is_right = got and tuple(got) == whole[: len(got)]
            if is_right and self._killed_lately():
                self._count(f"{kind}: failed with its tokens, on the killed server")
            elif is_right and since is not None and self._has_one_left(since):
                self._count(f"{kind}: failed with its tokens, on a server that had drained")
            else:
                self._fault(f"{kind}: {type(error).__name__}: {error} after {len(got)} tokens")
            return
        if tuple(got) != result.token_ids:
            self._fault(f"{kind}: chunks and result differ")
        self._check(kind, prompt, result)

    def _check(self, kind: str, prompt: list[int], result: Result) -> None:
        whole = expected(prompt, TOKENS)
        if result.finish_reason is FinishReason.CANCELLED and kind.endswith("cancel"):
            whole = whole[: len(result.token_ids)]
        if result.token_ids != whole:
            self._fault(f"{kind}: other tokens than its prompt has")
            return
        self._count(kind)

    def _killed_lately(self) -> bool:
        return self._killed_at > 0 and time.monotonic() - self._killed_at < 40

    def _count(self, what: str) -> None:
        with self._lock:
            self._outcomes[what] += 1

    def _fault(self, what: str) -> None:
        with self._lock:
            self._faults.append(f"{time.strftime('%H:%M:%S')} {what}")


def _prompt(source: random.Random) -> list[int]:
    """Return a prompt of one of twenty prefixes and a unique rest."""
    head = random.Random(source.randrange(20))
    return [head.randrange(256) for _ in range(PREFIX)] + [source.randrange(256) for _ in range(24)]


def _free_port() -> int:
    """Return a port that nothing uses on any of this machine's loopback addresses."""
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        return int(found.getsockname()[1])
