"""What a client knows about its servers, and the decisions that follow from it. Does no I/O.
docs/fleet.md describes it in full.

1. `listed` takes the addresses that the targets have now. A new one is JOINING: the flavour
   (threads or asyncio) checks its health (`_health`) until it is `found`, and `tell` makes it
   READY.
2. `choose` returns a READY server for a request (`_placement`). The sender of the request calls
   `begun` when it starts there and `over` when it ends.
3. A server that cannot be reached, is draining or is loading is `set_aside`: it is JOINING again. A
   server without room is `full` for as long as it said.
4. An address that is no longer listed is LEAVING: it gets no new requests, and running ones
   continue.
5. `owner` finds the server that has a request, by the instance named in its answer.

Nothing here is thread-safe: the threaded flavour holds its lock around every call.
"""

from __future__ import annotations

import enum
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from headrace._placement import Candidate, Placement, PrefixKeys
from headrace._targets import Address
from headrace.errors import HeadraceError, UnavailableError
from headrace.results import ServerLoad

RESOLVE_SECONDS = 3.0
"""How often names are resolved."""
RESOLVE_AGAIN_SECONDS = 0.5
"""The minimum pause between two lookups after failures."""
CHECK_SECONDS = 2.0
"""The timeout of a health check, and the longest pause between two checks."""
PATIENCE_SECONDS = 5.0
"""How long a request waits for a server to become ready."""
LOAD_INTERVAL = 1.0
"""How often sessions request their servers' loads, in seconds."""
_LOAD_SECONDS = 5.0  # an older report says nothing any more
TOGETHER_SECONDS = 0.1
"""How long a ready server waits for the others that are being checked."""
_FIRST_CHECK = 0.1
_TWIN_SECONDS = 10.0
_LEFT_SECONDS = 60.0
_ALONE_SECONDS = 60.0
_OWNERS = 65_536


class MemberState(enum.Enum):
    """Whether a server is usable."""

    JOINING = "joining"  # not known to be ready: asked until it is
    READY = "ready"
    LEAVING = "leaving"  # listed no longer: what runs there goes on


class Server:
    """One server, as the client knows it. `link` is the flavour's channel and stubs."""

    def __init__(self, address: Address, now: float) -> None:
        self.address = address
        self.link: Any = None
        self.state = MemberState.JOINING
        self.instance_id = ""
        """The instance id of its process; empty while unknown."""
        self.capacity = 1
        """The number of requests it can run at the same time."""
        self.outstanding = 0
        """The number of this client's requests that it has."""
        self.full_until = 0.0
        """When it expects to have room again, according to its last refusal."""
        self.check_at = now
        self.used_at = now
        self.turn = 0
        """When it was last chosen."""
        self.problem: HeadraceError | None = None
        """Why it is not ready."""
        self.is_known = False
        """Whether a health check has completed, successfully or not."""
        self.is_asked = False
        """Whether a health check is in progress."""
        self._checks = 0
        self._others = 0
        self._others_until = 0.0

    @property
    def name(self) -> str:
        """The name that all clients use for it: its instance id or, while that is unknown, its
        address.
        """
        return self.instance_id or self.address.target

    def take_load(self, load: ServerLoad, now: float) -> None:
        """Records the load that it reported, less this client's own requests."""
        self._others = max(load.running + load.waiting - self.outstanding, 0)
        self._others_until = now + _LOAD_SECONDS

    def load(self, now: float) -> int:
        """Returns the number of requests it has, as far as this client knows."""
        return self.outstanding + (self._others if now < self._others_until else 0)

    def wait_for_check(self, now: float) -> None:
        """Postpones the next health check: by 0.1 s at first, doubling each time."""
        self.check_at = now + min(_FIRST_CHECK * 2**self._checks, CHECK_SECONDS)
        self._checks = min(self._checks + 1, 10)

    def found_ready(self) -> None:
        """Records that it is healthy."""
        self.state = MemberState.READY
        self.problem = None
        self._checks = 0


class RetryBudget:
    """Limits immediate retries with a token bucket, like gRPC's retry throttling (gRFC A6).

    A failure takes one token, and a success returns a tenth of one. While the bucket is less than
    half full, nothing is retried immediately.
    """

    def __init__(self, tokens: float = 100.0, ratio: float = 0.1) -> None:
        self._most = self._tokens = tokens
        self._ratio = ratio

    def failed(self) -> bool:
        """Records a failure. Returns whether an immediate retry is allowed."""
        self._tokens = max(self._tokens - 1, 0.0)
        return self._tokens > self._most / 2

    def succeeded(self) -> None:
        """Records a success."""
        self._tokens = min(self._tokens + self._ratio, self._most)


class FleetState:
    """The servers of one client. Times are in seconds of `clock`."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] | None = None
    ) -> None:
        self.clock = clock
        self.jitter = jitter or random.random
        """Returns a random number from 0 to 1, used to spread simultaneous retries."""
        self.servers: dict[Address, Server] = {}
        self.budget = RetryBudget()
        self.unresolved = ""
        """The reason for the last failed name lookup."""
        self._placement = Placement()
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._found: dict[Server, tuple[str, int]] = {}
        """Ready servers that have not been announced yet, with their instances and capacities."""
        self._tell_at = 0.0
        self._turn = 0
        self._alone: OrderedDict[str, tuple[Server, float]] = OrderedDict()

    def listed(self, addresses: Iterable[Address]) -> list[Server]:
        """Updates the servers to the current addresses. Returns the new servers."""
        now, wanted, new = self.clock(), list(dict.fromkeys(addresses)), []
        for address in wanted:
            server = self.servers.get(address)
            if server is None:
                server = self.servers[address] = Server(address, now)
                new.append(server)
            elif server.state is MemberState.LEAVING:
                server.state, server.check_at = MemberState.JOINING, now
        for address in self.servers.keys() - set(wanted):
            self.servers[address].state = MemberState.LEAVING
        return new

    def left(self) -> list[Server]:
        """Removes the servers that are leaving and idle. Returns them so that they can be
        closed.
        """
        before = self.clock() - _LEFT_SECONDS
        gone = [
            server
            for server in self.servers.values()
            if server.state is MemberState.LEAVING
            and not server.outstanding
            and server.used_at < before
        ]
        for server in gone:
            del self.servers[server.address]
        return gone

    def to_ask(self) -> list[Server]:
        """Returns the servers to health-check now.

        They count as being checked until they are `found` or `not_joined`.
        """
        now = self.clock()
        due = [one for one in self._unasked() if one.check_at <= now]
        for server in due:
            server.is_asked = True
            server.wait_for_check(now)
        return due

    def next_in(self) -> float | None:
        """The seconds until a health check is due or found servers must be announced.

        0 means now; None means there is nothing to do.
        """
        now = self.clock()
        times = [one.check_at for one in self._unasked()]
        if self._found:
            times.append(now if self._is_time_to_tell(now) else self._tell_at)
        return max(min(times) - now, 0.0) if times else None

    def _is_time_to_tell(self, now: float) -> bool:
        asked = (one for one in self.servers.values() if one.is_asked)
        return now >= self._tell_at or all(one in self._found for one in asked)

    def _unasked(self) -> list[Server]:
        every = self.servers.values()
        return [s for s in every if s.state is MemberState.JOINING and not s.is_asked]

    def found(self, server: Server, instance_id: str, capacity: int) -> None:
        """Records that a server is ready. It gets requests after the next `tell`.

        It waits for the other servers being checked, so that the first requests do not all go to
        the first server that answers, but no longer than TOGETHER_SECONDS.
        """
        if not self._found:
            self._tell_at = self.clock() + TOGETHER_SECONDS
        self._found[server] = (instance_id, capacity)

    def tell(self) -> bool:
        """Makes the found servers READY if it is time. Returns whether there were any."""
        if not self._found or not self._is_time_to_tell(self.clock()):
            return False
        found, self._found = self._found, {}
        for server, told in found.items():
            self.joined(server, *told)
        return True

    def joined(self, server: Server, instance_id: str, capacity: int) -> None:
        """Makes a server READY, with its reported instance id (empty if unknown) and capacity.

        If the same instance is already in use under another address, this one is not used.
        """
        server.instance_id = instance_id
        server.capacity = max(capacity, 1)
        server.is_known, server.is_asked = True, False
        if server.state is not MemberState.JOINING:
            return
        twins = [one for one in self.by_instance(instance_id) if one is not server]
        if any(one.state is MemberState.READY for one in twins):
            server.check_at = self.clock() + _TWIN_SECONDS
        else:
            server.found_ready()

    def set_aside(self, server: Server, problem: HeadraceError) -> None:
        """Sends a server no new requests until it is ready again. It is unreachable or not
        ready.
        """
        server.problem = problem
        if server.state is MemberState.LEAVING:
            return
        server.state = MemberState.JOINING
        server.wait_for_check(self.clock())
        for twin in self.by_instance(server.instance_id):
            if twin.state is MemberState.JOINING and twin is not server:
                twin.check_at = self.clock()

    def full(self, server: Server, seconds: float) -> None:
        """Records that a server has no room for the given time."""
        server.full_until = max(server.full_until, self.clock() + seconds)

    def choose(
        self,
        keys: PrefixKeys | None,
        *,
        avoid: Collection[Server] = (),
        without: Collection[Server] = (),
        even_full: bool = False,
    ) -> Server | None:
        """Returns the server for a request, or None if no server is ready and has room.

        Args:
            keys: the keys of the request's prompt.
            avoid: servers to use only if there is no other.
            without: servers not to use, because they lack what the request needs.
            even_full: whether to choose a full server if all servers are full.
        """
        now = self.clock()
        while self._alone and next(iter(self._alone.values()))[1] < now:
            self.ended_alone(next(iter(self._alone)))
        ready = self._ready(without)
        roomy = [one for one in ready if one.full_until <= now]
        chosen_from = [one for one in roomy if one not in avoid] or roomy
        if not chosen_from and even_full:
            chosen_from = [one for one in ready if one not in avoid] or ready
        if len(chosen_from) <= 1:
            return chosen_from[0] if chosen_from else None
        by_name = {one.name: one for one in chosen_from}
        candidates = [Candidate(name, one.load(now), one.capacity) for name, one in by_name.items()]
        return by_name[self._placement.choose(keys, candidates)]

    def _ready(self, without: Collection[Server]) -> list[Server]:
        every = self.servers.values()
        return [one for one in every if one.state is MemberState.READY and one not in without]

    def room_in(self, without: Collection[Server] = ()) -> float | None:
        """The seconds until a ready server expects to have room; None if no server is ready.

        Servers that are not to be used are `without`.
        """
        ready = self._ready(without)
        return max(min(one.full_until for one in ready) - self.clock(), 0.0) if ready else None

    def begun(self, server: Server) -> None:
        """Records that a request is sent to a server."""
        self._turn += 1
        server.turn = self._turn
        server.outstanding += 1
        server.used_at = self.clock()

    def over(self, server: Server) -> None:
        """Records that a request has ended on a server or moves elsewhere."""
        server.outstanding -= 1
        server.used_at = self.clock()

    def runs_alone(self, request_id: str, server: Server) -> None:
        """Records that a request runs without a call.

        It counts towards the server's load until its end is seen, for at most a minute.
        """
        self.ended_alone(request_id)
        self._alone[request_id] = (server, self.clock() + _ALONE_SECONDS)
        self.begun(server)

    def ended_alone(self, request_id: str) -> None:
        """Records the end of a request that ran without a call."""
        found = self._alone.pop(request_id, None)
        if found is not None:
            self.over(found[0])

    def note_owner(self, request_id: str, instance_id: str) -> None:
        """Records which instance has a request, as named in an answer."""
        if not instance_id:
            return
        self._owners[request_id] = instance_id
        self._owners.move_to_end(request_id)
        if len(self._owners) > _OWNERS:
            self._owners.popitem(last=False)

    def owner(self, request_id: str) -> str:
        """Returns the instance that has a request; empty if unknown."""
        return self._owners.get(request_id, "")

    def by_instance(self, instance_id: str) -> list[Server]:
        """Returns the servers with this instance id, ready ones first."""
        found = [s for s in self.servers.values() if instance_id and s.instance_id == instance_id]
        return sorted(found, key=lambda one: one.state is not MemberState.READY)

    def not_joined(self, server: Server, problem: HeadraceError) -> None:
        """Records that a health check found the server not ready."""
        server.problem = problem
        server.is_known, server.is_asked = True, False

    @property
    def is_settled(self) -> bool:
        """Whether all servers have been health-checked.

        If so, a request that none of them has does not exist.
        """
        return bool(self.servers) and all(one.is_known for one in self.servers.values())

    def reachable(self) -> list[Server]:
        """Returns the servers that can answer for their requests: those that are ready or
        leaving.
        """
        return [one for one in self.servers.values() if one.state is not MemberState.JOINING]

    def nobody(self) -> UnavailableError:
        """Returns the error for a request that found no server."""
        told = "; ".join(
            dict.fromkeys(one.problem.message for one in self.servers.values() if one.problem)
        )
        problem = next((one.problem for one in self.servers.values() if one.problem), None)
        told = told or self.unresolved or "no answer yet"
        return UnavailableError(
            f"none of {len(self.servers)} servers is ready: {told}",
            status=None if problem is None or not problem.reason else problem.status,
        )
