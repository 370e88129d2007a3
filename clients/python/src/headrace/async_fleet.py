"""The servers of a client that has several, for asyncio: tracks them and makes unary calls to them.

Two tasks run in the background: one resolves names (in a thread), and one checks the health of
servers that are not ready. They start on first use, in the event loop running then. They do not
keep the fleet alive: when a fleet is no longer referenced, it is collected and its tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace import _forks
from headrace._async_link import A, AsyncLink, Method, Q
from headrace._attempts import Attempts, OwnerTries
from headrace._channel import ChannelSettings
from headrace._deadline import Deadline
from headrace._fleet import (
    CHECK_SECONDS,
    PATIENCE_SECONDS,
    RESOLVE_AGAIN_SECONDS,
    RESOLVE_SECONDS,
    FleetState,
    Server,
)
from headrace._health import questions
from headrace._placement import prefix_keys
from headrace._targets import Address, Name, Place, resolve
from headrace.errors import HeadraceError, NotFoundError, UnavailableError
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import (
    CANCEL_STATUS_NOT_FOUND,
    AddRequestRequest,
    CancelRequest,
    CancelResponse,
    CancelResult,
    GetResultRequest,
    GetResultResponse,
)


class AsyncFleet:
    """The servers of one client. Implements `headrace._async_servers.AsyncServers`."""

    def __init__(
        self, settings: ChannelSettings, only: Callable[[], AsyncLink] | None = None
    ) -> None:
        """Initializes the fleet. `only` returns the connection to a single server, if it is
        shared.
        """
        self.settings = settings
        self._only = only
        self.state = FleetState()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self._changed = asyncio.Event()  # replaced by a new one whenever it is set
        self._kicked = asyncio.Event()  # look names up now
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Starts looking for servers, if that has not started yet.

        Raises:
            UnavailableError: the client is closed.
            FailedPreconditionError: gRPC cannot connect because this process was forked.
        """
        if self._closed:
            raise UnavailableError("the client is closed")
        if self._tasks:
            return
        _forks.may_connect()
        places = self.settings.places
        self._add([place for place in places if isinstance(place, Address)])
        me = weakref.ref(self)
        self._tasks.append(asyncio.create_task(_check(me)))
        if any(isinstance(place, Name) for place in places):
            self._tasks.append(asyncio.create_task(_resolve(me, places, self._kicked)))
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _end, loop, self._tasks, _forks.generation()).atexit = False

    # ---- calls -----------------------------------------------------------------------------------

    async def call(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """Makes a unary call that any server may answer."""
        attempts = Attempts(self.state, None, retries=self.settings.retries)
        return await self._call(attempts, pick, request, Deadline(seconds))

    async def start(
        self,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        seconds: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request, and remembers the instance that has it."""
        attempts = Attempts(
            self.state,
            prefix_keys(spec),
            retries=self.settings.retries,
            sticks=isinstance(request, AddRequestRequest),
        )
        answer: Any = await self._call(attempts, pick, request, Deadline(seconds), spec.request_id)
        self.state.note_owner(spec.request_id, answer.instance_id)
        if isinstance(request, AddRequestRequest):
            for server in self.state.by_instance(answer.instance_id)[:1]:
                self.state.runs_alone(spec.request_id, server)
        return answer  # type: ignore[no-any-return]

    async def get_result(
        self, request: GetResultRequest, seconds: float | None
    ) -> GetResultResponse:
        """Reads a request's results from the server that has it."""
        deadline = Deadline(seconds)
        if not self.state.owner(request.request_id):
            await self._settle(deadline)
        tries = OwnerTries(self.state, request.request_id, retries=self.settings.retries)
        while True:
            server = tries.next()
            request.instance_id = tries.owner
            try:
                method = server.link.generation.GetResult
                answer: GetResultResponse = await server.link.call(
                    method, request, deadline.left(), request.request_id
                )
            except HeadraceError as error:
                await self._pause_after(tries, server, error, deadline)
                continue
            self.state.note_owner(request.request_id, answer.instance_id)
            if answer.done:
                self.state.ended_alone(request.request_id)
            return answer

    async def cancel(self, request: CancelRequest, seconds: float | None) -> CancelResponse:
        """Ends requests on the servers that have them.

        If a request's server is unknown, the servers are asked one after another.

        Raises:
            HeadraceError: a server refuses the caller, or none can be reached.
        """
        deadline = Deadline(seconds)
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        for request_id in request.request_ids:
            owner = self.state.owner(request_id)
            known = self.state.by_instance(owner)
            by_owner[owner if known else ""].append(request_id)
        if "" in by_owner:
            await self._settle(deadline)
        anywhere = self.state.reachable()
        found: dict[str, CancelResult] = {}
        for owner, ids in by_owner.items():
            servers = self.state.by_instance(owner)[:1] if owner else anywhere
            if not servers:
                raise self.state.nobody()
            await self._cancel_at(servers, owner, ids, deadline, found)
        missing = CANCEL_STATUS_NOT_FOUND
        return CancelResponse(
            results=[
                found.get(one, CancelResult(request_id=one, status=missing))
                for one in request.request_ids
            ]
        )

    async def _cancel_at(
        self,
        servers: list[Server],
        owner: str,
        ids: list[str],
        deadline: Deadline,
        found: dict[str, CancelResult],
    ) -> None:
        """Cancels the requests on each of these servers in order, skipping those already found."""
        problem: HeadraceError | None = None
        answered = False
        for server in servers:
            left = [one for one in ids if one not in found]
            if not left:
                return
            request = CancelRequest(request_ids=left, instance_id=owner)
            try:
                answer: CancelResponse = await server.link.call(
                    server.link.generation.Cancel, request, deadline.left()
                )
            except NotFoundError:  # another process is at that address now
                answered = True
                continue
            except UnavailableError as error:
                problem = problem or error
                continue
            answered = True
            for result in answer.results:
                if result.status != CANCEL_STATUS_NOT_FOUND:
                    found[result.request_id] = result
        if problem is not None and not answered:
            raise problem

    async def place(self, attempts: Attempts, deadline: Deadline) -> Server:
        """Waits for a server for the next attempt and returns it.

        The request counts as started there.

        Raises:
            UnavailableError: no server has become ready in time, or the client is closed.
            DeadlineExceededError: the deadline has passed.
        """
        self.begin()
        while True:
            if self._closed:
                raise UnavailableError("the client is closed")
            found = attempts.next()
            if isinstance(found, Server):
                self.state.begun(found)
                return found
            deadline.check()
            await self._wait(deadline.within(found))

    async def failed(
        self, attempts: Attempts, server: Server, error: HeadraceError, deadline: Deadline
    ) -> None:
        """Records a failed attempt and waits until the next one is due.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        await self._pause_after(attempts, server, error, deadline)

    def owned(self, request_id: str, server: Server, instance_id: str) -> None:
        """Records that a server has begun to answer a request, and the instance it named."""
        server.instance_id = instance_id
        self.state.note_owner(request_id, instance_id)
        self.state.budget.succeeded()

    def over(self, server: Server) -> None:
        """Records the end of a request that was started on a server by `place`."""
        self.state.over(server)

    async def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""
        self._closed = True
        servers = list(self.state.servers.values())
        self._notify()
        self._kicked.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # with the calls in their tracebacks, which would keep connections
        for server in servers:
            await server.link.close()

    async def _settle(self, deadline: Deadline) -> None:
        """Waits until all servers have been health-checked."""
        self.begin()
        end = self.state.clock() + deadline.within(PATIENCE_SECONDS)
        while not self.state.is_settled and (left := end - self.state.clock()) > 0:
            await self._wait(left)
        deadline.check()

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._closed

    def _notify(self) -> None:
        """Wakes everything that waits for a change of the state."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait(self, seconds: float | None) -> None:
        """Waits up to `seconds` for a change."""
        await _wait(self._changed, seconds)

    async def _call(
        self,
        attempts: Attempts,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        deadline: Deadline,
        request_id: str = "",
    ) -> A:
        while True:
            server = await self.place(attempts, deadline)
            try:
                answer: A = await server.link.call(
                    pick(server.link), request, deadline.left(), request_id
                )
            except HeadraceError as error:
                self.over(server)
                await self._pause_after(attempts, server, error, deadline)
            except BaseException:
                self.over(server)
                raise
            else:
                self.state.over(server)
                attempts.succeeded()
                return answer

    async def _pause_after(
        self,
        tries: Attempts | OwnerTries,
        server: Server,
        error: HeadraceError,
        deadline: Deadline,
    ) -> None:
        if self._closed:
            raise error
        pause = tries.failed(server, error)
        self.look()
        end = self.state.clock() + deadline.within(pause)
        while (left := end - self.state.clock()) > 0 and not self.is_closed:
            await self._wait(left)
        deadline.check()

    # ---- who is there ----------------------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a callback that is called when a server has become ready."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Unregisters a callback of `listen`."""
        with contextlib.suppress(ValueError):  # it has ended already
            self._listeners.remove(listener)

    def look(self) -> None:
        """Resolves names and checks servers soon, because a server was lost or is not ready."""
        self._kicked.set()
        self._notify()

    def _add(self, addresses: list[Address]) -> None:
        """Connects to new addresses, and closes the connections of servers that are gone."""
        for server in self.state.listed(addresses):
            make = self._only or partial(AsyncLink, self.settings, server.address)
            server.link = make()
        gone = self.state.left()
        self._notify()
        for server in gone:
            self._closing.add(task := asyncio.create_task(server.link.close()))
            task.add_done_callback(self._closing.discard)

    def _step(self, asking: asyncio.TaskGroup) -> None:
        """Starts the health checks that are due, each in a task, and announces ready servers."""
        for server in self.state.to_ask():
            asking.create_task(self._ask(server))
        if self.state.tell():
            self._notify()
            for listener in list(self._listeners):
                listener()

    async def _ask(self, server: Server) -> None:
        """Asks a server all questions of its health check."""
        link: AsyncLink = server.link
        asking = questions(self.state, server)
        with contextlib.suppress(StopIteration):
            question = next(asking)
            while True:
                try:
                    method = question.pick(link)
                    answer = await link.call(method, question.request, CHECK_SECONDS)
                except HeadraceError as error:
                    question = asking.throw(error)
                else:
                    question = asking.send(answer)
        self._notify()


def _end(loop: asyncio.AbstractEventLoop, tasks: list[asyncio.Task[None]], generation: int) -> None:
    """Ends a fleet's tasks, from whichever thread collects the fleet."""
    if generation == _forks.generation():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and they have ended
            for task in tasks:
                loop.call_soon_threadsafe(task.cancel)


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Waits up to `seconds` for an event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _check(of: weakref.ref[AsyncFleet]) -> None:
    """Runs a fleet's steps whenever they are due."""
    async with asyncio.TaskGroup() as asking:
        while (fleet := of()) is not None:
            wait, changed = fleet.state.next_in(), fleet._changed
            if wait == 0.0:
                fleet._step(asking)
            del fleet  # not kept while this waits
            if wait != 0.0:
                await _wait(changed, wait)


async def _resolve(
    of: weakref.ref[AsyncFleet], places: tuple[Place, ...], kicked: asyncio.Event
) -> None:
    """Resolves a fleet's names every few seconds and after failures.

    A name that cannot be resolved keeps its previous addresses.
    """
    known: dict[Name, list[Address]] = {}
    while True:
        addresses: list[Address] = []
        problem = ""
        for place in places:
            if isinstance(place, Name):
                try:
                    known[place] = await asyncio.to_thread(resolve, place)
                except OSError as error:
                    problem = f"{place.host} cannot be looked up: {error}"
                addresses += known.get(place, [])
            else:
                addresses.append(place)
        if (fleet := of()) is None:
            return
        fleet.state.unresolved = problem or fleet.state.unresolved
        fleet._add(addresses)
        del fleet
        await _wait(kicked, RESOLVE_SECONDS)
        kicked.clear()
        await asyncio.sleep(RESOLVE_AGAIN_SECONDS)  # failures that come together are one reason
