"""The servers of a client that has several, for threads: tracks them and makes unary calls to them.

Two threads run in the background from the first use on: one resolves names, and one checks the
health of servers that are not ready. They do not keep the fleet alive: when a fleet is no longer
referenced, it is collected and its threads end. Every call takes the lock only to choose a server
and to record its outcome.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from headrace import _forks
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
from headrace._health import Question, Questions, questions
from headrace._link import A, Link, Method, Q
from headrace._placement import prefix_keys
from headrace._targets import Address, Name, Place, resolve
from headrace.errors import (
    HeadraceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    error_from_rpc,
)
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


class Fleet:
    """The servers of one client. Implements `headrace._servers.Servers`. Thread-safe."""

    def __init__(self, settings: ChannelSettings, only: Link | None = None) -> None:
        """Initializes the fleet. `only` is the connection to a single server, if it is shared."""
        self.settings = settings
        self._only = only
        self.state = FleetState()
        self.changed = threading.Condition()
        """Guards the state with its lock. Notified when a server may have become usable."""
        self._listeners: list[Callable[[], None]] = []
        self._answers: list[Callable[[], None]] = []
        """Callbacks that process the health check answers that have arrived."""
        self._has_begun = False
        self._over = threading.Event()
        """Set when the fleet was closed or is no longer referenced."""
        self._kicked = threading.Event()  # look names up now
        weakref.finalize(self, _end, self._over, self._kicked, self.changed).atexit = False

    def begin(self) -> None:
        """Starts looking for servers, if that has not started yet.

        Raises:
            FailedPreconditionError: gRPC cannot connect because this process was forked.
        """
        with self.changed:
            if self._has_begun or self.is_closed:
                return
            _forks.may_connect()
            self._has_begun = True
        places = self.settings.places
        self._add([place for place in places if isinstance(place, Address)])
        me = weakref.ref(self)
        threading.Thread(
            target=_check, args=(me, self.changed), name="headrace-health", daemon=True
        ).start()
        if any(isinstance(place, Name) for place in places):
            threading.Thread(
                target=_resolve,
                args=(me, places, self._over, self._kicked),
                name="headrace-names",
                daemon=True,
            ).start()

    # ---- calls -----------------------------------------------------------------------------------

    def call(self, pick: Callable[[Link], Method[Q, A]], request: Q, timeout: float | None) -> A:
        """Makes a unary call that any server may answer."""
        attempts = Attempts(self.state, None, retries=self.settings.retries)
        return self._call(attempts, pick, request, Deadline(timeout))

    def start(
        self,
        pick: Callable[[Link], Method[Q, A]],
        request: Q,
        timeout: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request, and remembers the instance that has it."""
        attempts = Attempts(
            self.state,
            prefix_keys(spec),
            retries=self.settings.retries,
            sticks=isinstance(request, AddRequestRequest),
        )
        answer: Any = self._call(attempts, pick, request, Deadline(timeout), spec.request_id)
        with self.changed:
            self.state.note_owner(spec.request_id, answer.instance_id)
            if isinstance(request, AddRequestRequest):
                for server in self.state.by_instance(answer.instance_id)[:1]:
                    self.state.runs_alone(spec.request_id, server)
        return answer  # type: ignore[no-any-return]

    def get_result(self, request: GetResultRequest, timeout: float | None) -> GetResultResponse:
        """Reads a request's results from the server that has it."""
        deadline = Deadline(timeout)
        with self.changed:
            if not self.state.owner(request.request_id):
                self._settle(deadline)
            tries = OwnerTries(self.state, request.request_id, retries=self.settings.retries)
        while True:
            with self.changed:
                server = tries.next()
            request.instance_id = tries.owner
            try:
                method = server.link.generation.GetResult
                answer: GetResultResponse = server.link.call(
                    method, request, deadline.left(), request.request_id
                )
            except HeadraceError as error:
                self._pause_after(tries, server, error, deadline)
                continue
            with self.changed:
                self.state.note_owner(request.request_id, answer.instance_id)
                if answer.done:
                    self.state.ended_alone(request.request_id)
            return answer

    def cancel(self, request: CancelRequest, timeout: float | None) -> CancelResponse:
        """Ends requests on the servers that have them.

        If a request's server is unknown, the servers are asked one after another.

        Raises:
            HeadraceError: a server refuses the caller, or none can be reached.
        """
        deadline = Deadline(timeout)
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        with self.changed:
            for request_id in request.request_ids:
                owner = self.state.owner(request_id)
                known = self.state.by_instance(owner)
                by_owner[owner if known else ""].append(request_id)
            if "" in by_owner:
                self._settle(deadline)
            anywhere = self.state.reachable()
        found: dict[str, CancelResult] = {}
        for owner, ids in by_owner.items():
            with self.changed:
                servers = self.state.by_instance(owner)[:1] if owner else anywhere
                if not servers:
                    raise self.state.nobody()
            self._cancel_at(servers, owner, ids, deadline, found)
        missing = CANCEL_STATUS_NOT_FOUND
        return CancelResponse(
            results=[
                found.get(one, CancelResult(request_id=one, status=missing))
                for one in request.request_ids
            ]
        )

    def _cancel_at(
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
                answer: CancelResponse = server.link.call(
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

    def place(self, attempts: Attempts, deadline: Deadline) -> Server:
        """Waits for a server for the next attempt and returns it.

        The request counts as started there.

        Raises:
            UnavailableError: no server has become ready in time, or the client is closed.
            DeadlineExceededError: the deadline has passed.
        """
        with self.changed:
            self.begin()
            while True:
                if self.is_closed:
                    raise UnavailableError("the client is closed")
                found = attempts.next()
                if isinstance(found, Server):
                    self.state.begun(found)
                    return found
                deadline.check()
                self.changed.wait(deadline.within(found))

    def failed(
        self, attempts: Attempts, server: Server, error: HeadraceError, deadline: Deadline
    ) -> None:
        """Records a failed attempt and waits until the next one is due.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        self._pause_after(attempts, server, error, deadline)

    def owned(self, request_id: str, server: Server, instance_id: str) -> None:
        """Records that a server has begun to answer a request, and the instance it named."""
        with self.changed:
            server.instance_id = instance_id
            self.state.note_owner(request_id, instance_id)
            self.state.budget.succeeded()

    def over(self, server: Server) -> None:
        """Records the end of a request that was started on a server by `place`."""
        with self.changed:
            self.state.over(server)

    def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""
        with self.changed:
            _end(self._over, self._kicked, self.changed)
            links = self.links
        for link in links:
            link.close()

    @property
    def links(self) -> list[Link]:
        """The connections to the servers."""
        return [server.link for server in self.state.servers.values()]

    def _settle(self, deadline: Deadline) -> None:
        """Waits until all servers have been health-checked. The lock is held."""
        self.begin()
        self.changed.wait_for(
            lambda: self.is_closed or self.state.is_settled, deadline.within(PATIENCE_SECONDS)
        )
        deadline.check()

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._over.is_set()

    def _call(
        self,
        attempts: Attempts,
        pick: Callable[[Link], Method[Q, A]],
        request: Q,
        deadline: Deadline,
        request_id: str = "",
    ) -> A:
        while True:
            server = self.place(attempts, deadline)
            try:
                answer: A = server.link.call(
                    pick(server.link), request, deadline.left(), request_id
                )
            except HeadraceError as error:
                self.over(server)
                self._pause_after(attempts, server, error, deadline)
            except BaseException:
                self.over(server)
                raise
            else:
                with self.changed:
                    self.state.over(server)
                    attempts.succeeded()
                return answer

    def _pause_after(
        self,
        tries: Attempts | OwnerTries,
        server: Server,
        error: HeadraceError,
        deadline: Deadline,
    ) -> None:
        with self.changed:
            if self.is_closed:
                raise error
            pause = tries.failed(server, error)
            self.look()
            end = self.state.clock() + deadline.within(pause)
            while (left := end - self.state.clock()) > 0 and not self.is_closed:
                self.changed.wait(left)
        deadline.check()

    # ---- who is there ----------------------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a callback that a thread of the fleet calls when a server has become ready."""
        with self.changed:
            self.begin()
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Unregisters a callback of `listen`. Takes no lock."""
        with contextlib.suppress(ValueError):  # it has ended already
            self._listeners.remove(listener)

    def look(self) -> None:
        """Resolves names and checks servers soon, because a server was lost or is not ready."""
        self._kicked.set()
        with self.changed:
            self.changed.notify_all()

    def _add(self, addresses: list[Address]) -> None:
        """Connects to new addresses, and closes the connections of servers that are gone."""
        with self.changed:
            for server in self.state.listed(addresses):
                server.link = self._only or Link(self.settings, server.address)
            gone = self.state.left()
            self.changed.notify_all()
        for server in gone:
            server.link.close()

    def _listed(self, addresses: list[Address], problem: str) -> None:
        """Handles the result of a name lookup: the addresses, and the reason for any failure."""
        with self.changed:
            self.state.unresolved = problem or self.state.unresolved
        self._add(addresses)

    def _due_in(self) -> float | None:
        """The seconds until `_step` is due; None if only a change makes it due. The lock is
        held.
        """
        return 0.0 if self._answers else self.state.next_in()

    def _step(self) -> None:
        """Starts the health checks that are due, processes answers, and announces ready servers."""
        with self.changed:
            answers, self._answers = self._answers, []
            asked = self.state.to_ask()
            told = self.state.tell()
            self.changed.notify_all()
        for server in asked:
            asking = questions(self.state, server)
            self._go_on(server, asking, partial(next, asking))
        for take in answers:
            take()
        if told:
            for listener in list(self._listeners):
                listener()

    def _go_on(self, server: Server, asking: Questions, step: Callable[[], Question]) -> None:
        """Asks a server the next question of its health check, if `step` returns one."""
        link: Link = server.link
        with self.changed:
            try:
                question = step()
            except StopIteration:
                self.changed.notify_all()
                return
        try:
            call = question.pick(link).future(
                question.request, timeout=CHECK_SECONDS, metadata=self.settings.metadata
            )
        except InvalidArgumentError as error:  # of the token's file
            self._go_on(server, asking, partial(asking.throw, error))
            return
        except ValueError:  # the channel was closed
            return
        call.add_done_callback(lambda call: self._answer(partial(self._take, server, asking, call)))

    def _take(self, server: Server, asking: Questions, call: Any) -> None:
        """Processes the answer to a question."""
        try:
            step = partial(asking.send, call.result())
        except grpc.FutureCancelledError:  # the client is being closed
            return
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, target=server.link.target)
            step = partial(asking.throw, error)
        self._go_on(server, asking, step)

    def _answer(self, take: Callable[[], None]) -> None:
        """Queues an answer, which arrives in a gRPC thread, for the health check thread."""
        with self.changed:
            self._answers.append(take)
            self.changed.notify_all()


def _end(over: threading.Event, kicked: threading.Event, changed: threading.Condition) -> None:
    """Ends a fleet's threads."""
    over.set()
    kicked.set()
    with changed:
        changed.notify_all()


def _check(of: weakref.ref[Fleet], changed: threading.Condition) -> None:
    """Runs a fleet's steps whenever they are due."""
    while (fleet := of()) is not None and not fleet.is_closed:
        with changed:
            wait = fleet._due_in()
            if wait != 0.0 and not fleet.is_closed:
                del fleet  # not kept while this waits
                if of() is not None:
                    changed.wait(wait)
                continue
        fleet._step()
        del fleet


def _resolve(
    of: weakref.ref[Fleet],
    places: tuple[Place, ...],
    over: threading.Event,
    kicked: threading.Event,
) -> None:
    """Resolves a fleet's names every few seconds and after failures.

    A name that cannot be resolved keeps its previous addresses.
    """
    known: dict[Name, list[Address]] = {}
    while not over.is_set():
        addresses: list[Address] = []
        problem = ""
        for place in places:
            if isinstance(place, Name):
                try:
                    known[place] = resolve(place)
                except OSError as error:
                    problem = f"{place.host} cannot be looked up: {error}"
                addresses += known.get(place, [])
            else:
                addresses.append(place)
        if (fleet := of()) is None:
            return
        fleet._listed(addresses, problem)
        del fleet
        kicked.wait(RESOLVE_SECONDS)
        kicked.clear()
        over.wait(RESOLVE_AGAIN_SECONDS)  # failures that come together are one reason
