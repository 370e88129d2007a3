"""What a client knows of its servers, and what follows from it; the part that does no input or
output. docs/fleet.md tells it in full.

1. `listed` takes the addresses that the targets have now. A new one is JOINING: the flavour
   (threads or asyncio) asks for its health (`_health`) until it is `found`, and `tell` makes it
   READY.
2. `choose` gives the server for a request among those that are READY (`_placement`). Whoever sends
   it there says `begun`, and `over` at its end.
3. A server that cannot be reached, drains or loads is told to `set_aside`: it is JOINING again. One
   that has no room is `full` for as long as it said.
4. An address that is listed no longer is LEAVING: it gets nothing new, and what runs there goes on.
5. `owner` finds the server that has a request, by the instance that its answer named.

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
"""How often names are looked up."""
RESOLVE_AGAIN_SECONDS = 0.5
"""The shortest pause between two look-ups, after failures."""
CHECK_SECONDS = 2.0
"""How long a question for a server's health may take, and the longest pause between two."""
PATIENCE_SECONDS = 5.0
"""How long a request waits for a server to be ready."""
LOAD_INTERVAL = 1.0
"""How often sessions ask for their servers' loads, in seconds."""
_LOAD_SECONDS = 5.0  # an older report says nothing any more
TOGETHER_SECONDS = 0.1
"""How long a server that is ready waits for the others that were asked."""
_FIRST_CHECK = 0.1
_TWIN_SECONDS = 10.0
_LEFT_SECONDS = 60.0
_ALONE_SECONDS = 60.0
_OWNERS = 65_536


class MemberState(enum.Enum):
    """What a server is good for."""

    JOINING = "joining"  # not known to be ready: asked until it is
    READY = "ready"
    LEAVING = "leaving"  # listed no longer: what runs there goes on


class Server:
    """One server, as the client knows it. `link`: the flavour's channel and stubs."""

    def __init__(self, address: Address, now: float) -> None:
        self.address = address
        self.link: Any = None
        self.state = MemberState.JOINING
        self.instance_id = ""
        """Its process; empty: not known (yet)."""
        self.capacity = 1
        """How many requests it runs at a time."""
        self.outstanding = 0
        """How many requests of this client it has."""
        self.full_until = 0.0
        """Until when it has no room, as it said."""
        self.check_at = now
        self.used_at = now
        self.turn = 0
        """When it was chosen last."""
        self.problem: HeadraceError | None = None
        """Why it is not ready."""
        self.is_known = False
        """Whether it has answered for its health, or failed to."""
        self.is_asked = False
        """Whether a question for its health is on its way."""
        self._checks = 0
        self._others = 0
        self._others_until = 0.0

    @property
    def name(self) -> str:
        """What all clients know it by; its address, as long as its instance is not known."""
        return self.instance_id or self.address.target

    def take_load(self, load: ServerLoad, now: float) -> None:
        """Notes what it told of its load: what is not this client's own."""
        self._others = max(load.running + load.waiting - self.outstanding, 0)
        self._others_until = now + _LOAD_SECONDS

    def load(self, now: float) -> int:
        """How many requests it has, as far as this client knows."""
        return self.outstanding + (self._others if now < self._others_until else 0)

    def wait_for_check(self, now: float) -> None:
        """Puts off the next question for its health: 0.1 s, then twice as long each time."""
        self.check_at = now + min(_FIRST_CHECK * 2**self._checks, CHECK_SECONDS)
        self._checks = min(self._checks + 1, 10)

    def found_ready(self) -> None:
        """Its health was good."""
        self.state = MemberState.READY
        self.problem = None
        self._checks = 0


class RetryBudget:
    """Whether what failed may be sent again at once: a bucket of tokens, as gRPC throttles retries
    (gRFC A6). A failure takes a token, a success gives back a tenth of one; while the bucket is
    less than half full, nothing is sent again at once.
    """

    def __init__(self, tokens: float = 100.0, ratio: float = 0.1) -> None:
        self._most = self._tokens = tokens
        self._ratio = ratio

    def failed(self) -> bool:
        """Notes a failure; whether there may be another try at once."""
        self._tokens = max(self._tokens - 1, 0.0)
        return self._tokens > self._most / 2

    def succeeded(self) -> None:
        """Notes a success."""
        self._tokens = min(self._tokens + self._ratio, self._most)


class FleetState:
    """The servers of one client. Times are in seconds, by `clock`."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] | None = None
    ) -> None:
        self.clock = clock
        self.jitter = jitter or random.random
        """From 0 to 1: what spreads tries that would come at the same time."""
        self.servers: dict[Address, Server] = {}
        self.budget = RetryBudget()
        self.unresolved = ""
        """Why a name could not be looked up, the last time that it could not."""
        self._placement = Placement()
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._found: dict[Server, tuple[str, int]] = {}
        """The servers that are ready and not told yet, with their instances and capacities."""
        self._tell_at = 0.0
        self._turn = 0
        self._alone: OrderedDict[str, tuple[Server, float]] = OrderedDict()

    def listed(self, addresses: Iterable[Address]) -> list[Server]:
        """Takes the addresses that there are now; returns the servers that are new."""
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
        """Forgets the servers that left and have nothing to do; returns them, to be closed."""
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
        """The servers whose health is to be asked for now. They are asked from now on, until they
        are `found` or `not_joined`.
        """
        now = self.clock()
        due = [one for one in self._unasked() if one.check_at <= now]
        for server in due:
            server.is_asked = True
            server.wait_for_check(now)
        return due

    def next_in(self) -> float | None:
        """The seconds until a server must be asked, or servers that were found must be announced.
        0: now; None: there is nothing to do.
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
        """A server is ready, and gets requests from the next `tell` on: with the others that were
        asked, so that the first requests are not all placed on the first that answers; but it does
        not wait longer than TOGETHER_SECONDS for them.
        """
        if not self._found:
            self._tell_at = self.clock() + TOGETHER_SECONDS
        self._found[server] = (instance_id, capacity)

    def tell(self) -> bool:
        """The servers that were found are ready now, if it is time; whether there were any."""
        if not self._found or not self._is_time_to_tell(self.clock()):
            return False
        found, self._found = self._found, {}
        for server, told in found.items():
            self.joined(server, *told)
        return True

    def joined(self, server: Server, instance_id: str, capacity: int) -> None:
        """A server is ready; it told its instance (empty: it did not) and its capacity. If it is
        known by another address already, this one is not used.
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
        """A server cannot be reached, or is not ready: it gets nothing new until it is."""
        server.problem = problem
        if server.state is MemberState.LEAVING:
            return
        server.state = MemberState.JOINING
        server.wait_for_check(self.clock())
        for twin in self.by_instance(server.instance_id):
            if twin.state is MemberState.JOINING and twin is not server:
                twin.check_at = self.clock()

    def full(self, server: Server, seconds: float) -> None:
        """A server has no room for so long."""
        server.full_until = max(server.full_until, self.clock() + seconds)

    def choose(
        self, keys: PrefixKeys | None, *, avoid: Collection[Server] = (), even_full: bool = False
    ) -> Server | None:
        """The server for a request; None: no server is ready and has room.

        Args:
            keys: of the request's prompt.
            avoid: servers that shall not have it, unless there is no other.
            even_full: whether a server that said that it has no room may have it, if all did.
        """
        now = self.clock()
        while self._alone and next(iter(self._alone.values()))[1] < now:
            self.ended_alone(next(iter(self._alone)))
        ready = [one for one in self.servers.values() if one.state is MemberState.READY]
        roomy = [one for one in ready if one.full_until <= now]
        chosen_from = [one for one in roomy if one not in avoid] or roomy
        if not chosen_from and even_full:
            chosen_from = [one for one in ready if one not in avoid] or ready
        if len(chosen_from) <= 1:
            return chosen_from[0] if chosen_from else None
        by_name = {one.name: one for one in chosen_from}
        candidates = [Candidate(name, one.load(now), one.capacity) for name, one in by_name.items()]
        return by_name[self._placement.choose(keys, candidates)]

    def room_in(self) -> float | None:
        """The seconds until a ready server has room, as the servers said; None: none is ready."""
        ready = [one for one in self.servers.values() if one.state is MemberState.READY]
        return max(min(one.full_until for one in ready) - self.clock(), 0.0) if ready else None

    def begun(self, server: Server) -> None:
        """A request goes to a server."""
        self._turn += 1
        server.turn = self._turn
        server.outstanding += 1
        server.used_at = self.clock()

    def over(self, server: Server) -> None:
        """A request there has ended, or goes elsewhere."""
        server.outstanding -= 1
        server.used_at = self.clock()

    def runs_alone(self, request_id: str, server: Server) -> None:
        """A request goes on without a call. It counts as the server's load until it is seen to have
        ended, or for a minute.
        """
        self.ended_alone(request_id)
        self._alone[request_id] = (server, self.clock() + _ALONE_SECONDS)
        self.begun(server)

    def ended_alone(self, request_id: str) -> None:
        """The end of such a request was seen."""
        found = self._alone.pop(request_id, None)
        if found is not None:
            self.over(found[0])

    def note_owner(self, request_id: str, instance_id: str) -> None:
        """An answer named the instance that has a request."""
        if not instance_id:
            return
        self._owners[request_id] = instance_id
        self._owners.move_to_end(request_id)
        if len(self._owners) > _OWNERS:
            self._owners.popitem(last=False)

    def owner(self, request_id: str) -> str:
        """The instance that has a request; empty: not known."""
        return self._owners.get(request_id, "")

    def by_instance(self, instance_id: str) -> list[Server]:
        """The servers that are this instance: the ready ones first."""
        found = [s for s in self.servers.values() if instance_id and s.instance_id == instance_id]
        return sorted(found, key=lambda one: one.state is not MemberState.READY)

    def not_joined(self, server: Server, problem: HeadraceError) -> None:
        """A server was asked, and is not ready."""
        server.problem = problem
        server.is_known, server.is_asked = True, False

    @property
    def is_settled(self) -> bool:
        """Whether all servers have been asked whether they are ready: what none of them has is
        nowhere.
        """
        return bool(self.servers) and all(one.is_known for one in self.servers.values())

    def reachable(self) -> list[Server]:
        """All servers that may answer for what they have: those that are ready or leave."""
        return [one for one in self.servers.values() if one.state is not MemberState.JOINING]

    def nobody(self) -> UnavailableError:
        """The error for a request that found no server."""
        told = "; ".join(
            dict.fromkeys(one.problem.message for one in self.servers.values() if one.problem)
        )
        problem = next((one.problem for one in self.servers.values() if one.problem), None)
        told = told or self.unresolved or "no answer yet"
        return UnavailableError(
            f"none of {len(self.servers)} servers is ready: {told}",
            status=None if problem is None or not problem.reason else problem.status,
        )
