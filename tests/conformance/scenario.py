"""One vector with one driver: its steps, one after another, and what is looked at in each.

A step is one of: a command of the driver (`op`), the answer of a command that was begun (`await`),
what a server sends (`serve`), what happens to it (`server`), what it must have seen (`saw`), or
several steps for each of some names (`each`). vectors/README.md lists their members.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.v1 import generation_service_pb2 as s

from tests.conformance.certificates import Certificates
from tests.conformance.chance import Chance
from tests.conformance.driver import ANSWER_SECONDS, Driver
from tests.conformance.events import UNKNOWN_FIELD, EventMaker, accepted
from tests.conformance.folding import difference
from tests.conformance.judging import Handle, Judge
from tests.conformance.proxy import Proxy
from tests.conformance.requests import fault_of_spec, make_request
from tests.conformance.server import ScriptedServer, accept_alone, answer_whole
from tests.conformance.stage import Served, Stage, Unmet, make_status

CLEAR_SECONDS = 5.0
"""How long what was closed may take to be gone."""
_OWN = ("op", "begin", "expect", "request", "requests", "targets", "patiently")
_BY_SESSION = ("submit", "attach", "resume", "session", "close_session", "open_session")
_BY_HANDLE = ("read", "result", "cancel", "leave")


class NotApplicable(Exception):
    """The driver's language has no means for a command of the vector; its registry row says so."""


class Scenario:
    """One run of one vector."""

    def __init__(
        self, vector: dict[str, Any], driver: Driver, folder: Path, *, unix: bool, seed: int
    ) -> None:
        self.vector = vector
        self.driver = driver
        self.chance = Chance(seed, vector["name"])
        self.stage = Stage()
        self.events = EventMaker(self.chance)
        self.prefix = self.chance.identifier()
        self.judge = Judge(
            self.stage, "real" in vector, lambda name: f"{name}-{self.chance.identifier()}"
        )
        self.id_of, self.served = self.judge.id_of, self.judge.served
        self.begun: dict[str, tuple[int, asyncio.Future[Any], dict[str, Any]]] = {}
        self.clients: list[str] = []
        self.at: dict[str, str] = {}
        """Which server had a request last."""
        self.servers: dict[str, Any] = {}
        if vector.get("tls"):
            self._certificates = Certificates(folder)
        for name in vector.get("servers", ["A"]):
            proxy = Proxy(folder, name, unix=unix)
            if vector.get("dribble"):
                proxy.dribble = self.chance.random()
            self.servers[name] = self._make_server(name, proxy, folder)

    def _make_server(self, name: str, proxy: Proxy, folder: Path) -> Any:
        if "real" in self.vector:
            from tests.conformance.real import RealServer  # all of the server's code

            return RealServer(name, proxy, folder, self.vector["real"])
        server = ScriptedServer(self.stage, name, proxy, folder, self.chance)
        self.stage.unasked.add(name)
        server.token = self.vector.get("token")
        if self.vector.get("tls"):
            server.secure = self._certificates.credentials
        server.lease_seconds = self.vector.get("lease_seconds", server.lease_seconds)
        return server

    async def run(self) -> None:
        """Runs the vector.

        Raises:
            Unmet: it is not met.
            NotApplicable: the driver cannot do what it needs.
        """
        for server in self.servers.values():
            await server.proxy.start()
            await server.start()
        try:
            await self.steps([*self._prelude(), *self.vector["steps"]])
            await self.finish()
        finally:
            for server in self.servers.values():
                await server.proxy.stop()
                await server.stop()

    async def steps(self, steps: Sequence[dict[str, Any]]) -> None:
        """Runs these steps."""
        kinds: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
            "op": self.do_op,
            "await": self.do_await,
            "serve": self.do_serve,
            "server": self.do_server,
            "saw": self.do_saw,
            "each": self.do_each,
            "lose": self.do_lose,
        }
        for index, step in enumerate(steps):
            kind = next(name for name in kinds if name in step)
            try:
                await kinds[kind](step)
            except Unmet as unmet:
                shown = json.dumps(step, ensure_ascii=False)[:160]
                raise Unmet(f"step {index} {shown}\n    {unmet}") from None

    def _prelude(self) -> list[dict[str, Any]]:
        """A client `c` of all servers; a session `s`, if the vector has one."""
        targets = list(self.servers)
        steps = [
            {"op": "connect", "client": "c", "targets": targets, **self.vector.get("connect", {})}
        ]
        if "session" in self.vector:
            steps.append({"op": "open_session", **self.vector["session"]})
        return steps

    async def finish(self) -> None:
        """Closes what is open; nothing may be left then, and nothing unexpected have come."""
        if self.begun:
            raise Unmet(f"the vector does not await {', '.join(self.begun)}")
        for client in list(self.clients):
            await self.do_op({"op": "close_client", "client": client.removeprefix(self.prefix)})
        calls = self.stage.open_calls

        def what() -> str:
            return "; ".join(f"{c.method} at {c.server}" for c in calls())

        try:
            await self.stage.until(lambda: not calls() or None, "", CLEAR_SECONDS)
        except Unmet:
            raise Unmet(f"after the close of the client it left calls open: {what()}") from None
        for server in self.servers.values():
            end = asyncio.get_running_loop().time() + CLEAR_SECONDS
            while server.proxy.connections:
                if asyncio.get_running_loop().time() > end:
                    raise Unmet(f"it left {server.proxy.connections} connections open")
                await asyncio.sleep(0.01)
        if left := self.stage.leftovers():
            raise Unmet("; ".join(left))

    # ---- the driver ------------------------------------------------------------------------------

    async def do_op(self, step: dict[str, Any]) -> None:
        """A command, and its answer unless it is only begun."""
        members = self._members(step)
        if step.get("patiently"):
            await self._patiently(step["op"], members)
        number, future = self.driver.begin(step["op"], members)
        if "begin" in step:
            self.begun[step["begin"]] = (number, future, step)
            return
        await self._answer(future, step)

    async def do_await(self, step: dict[str, Any]) -> None:
        """The answer of a command that was begun."""
        _, future, begun = self.begun.pop(step["await"])
        await self._answer(future, {**begun, **step})

    async def _patiently(self, op: str, members: dict[str, Any]) -> None:
        """Repeats a command while the server cannot be reached."""

        async def is_there() -> bool:
            _, future = self.driver.begin(op, members)
            return (await future).get("error", {}).get("code") != "UNAVAILABLE"

        async with asyncio.timeout(ANSWER_SECONDS):
            while not await is_there():
                pass
        self.stage.cancels.clear()

    def _members(self, step: dict[str, Any]) -> dict[str, Any]:
        op = step["op"]
        members = {key: value for key, value in step.items() if key not in _OWN}
        if op in _BY_SESSION:
            members.setdefault("session", "s")
        elif op not in _BY_HANDLE:
            members.setdefault("client", "c")
        if op in ("open_session", "stream"):
            members.setdefault("client", "c")
        if "request" in step:
            told = step["request"]
            told = {"name": told} if isinstance(told, str) else told
            members["request"] = self._request(told)
            if op in ("stream", "submit"):
                members.setdefault("handle", told["name"])
                self.judge.handles[members["handle"]] = Handle(told["name"])
        if "requests" in step:
            members["requests"] = [self._request(one) for one in step["requests"]]
        if op == "attach":
            name = step["of"]
            members.pop("of")
            members |= {"request_id": self.id_of(name)}
            first = max(members.get("from_seq", 1), 1) - 1
            self.judge.handles[members["handle"]] = Handle(name, first)
        elif op == "resume":
            old = self.judge.handles[step["of"]]
            self.judge.handles[members["handle"]] = Handle(old.name, old.first)
            members["of"] = self.prefix + step["of"]
        elif op == "load_adapter":
            members["source"] = self.id_of(members["source"])
        elif op == "abandon":
            members = {"of": self.begun[step["of"]][0]}
        elif op == "get_result":
            members["request_id"] = self.id_of(members.pop("of"))
        elif op == "cancel_ids":
            members["request_ids"] = [self.id_of(one) for one in members.pop("of")]
        elif op == "connect":
            self.clients.append(self.prefix + members["client"])
            names = step.get("targets", ["A"])
            if self.vector.get("tls") and members.pop("trusts", True):
                members["ca"] = str(self._certificates.authority)
            members["targets"] = [self.servers[one].proxy.address for one in names]
        elif op == "close_client":
            self.clients.remove(self.prefix + members["client"])
        for kind in ("client", "session", "handle"):
            if kind in members:
                members[kind] = self.prefix + members[kind]
        return members

    def _request(self, told: dict[str, Any] | str) -> dict[str, Any]:
        told = {"name": told} if isinstance(told, str) else told
        request = make_request(told, self.id_of(told["name"]), self.chance)
        self.judge.requests[told["name"]] = request
        return request

    async def _answer(self, future: asyncio.Future[Any], step: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                told = await future
        except TimeoutError:
            raise Unmet(f"no answer within {ANSWER_SECONDS:g} s. {self.stage.summary()}") from None
        if "unsupported" in told:
            raise NotApplicable(f"{step['op']}: {told['unsupported']}")
        self.judge.judge(told, step)

    # ---- the servers -----------------------------------------------------------------------------

    async def do_serve(self, step: dict[str, Any]) -> None:
        """Sends what a request's server says."""
        name, told = step["serve"], list(step.get("events", ()))
        if step.get("ignore"):
            self.stage.ignored.add(self.id_of(name))
        if "script" in step:
            script = self.vector["scripts"][step["script"]]
            told += script[int(step.get("from", 0)) : int(step.get("to", len(script)))]
        extra = UNKNOWN_FIELD if step.get("unknown_fields") else b""
        together: list[Any] = []
        for one in told:
            if one == "accept":
                await self._accept(name, step)
            elif isinstance(one, dict) and "refuse" in one:
                await self._refuse(name, one["refuse"], step)
            elif isinstance(one, dict) and "attach" in one:
                await self._attach(name, int(one["attach"]), step)
            else:
                served = self.served(name)
                event = self.events.make(one, served.request_id)
                served.note(event)
                if isinstance(one, dict):
                    self._damage(served, event, one)
                together.append(event)
                if step.get("together"):
                    continue
                self._tell(served, together, extra)
                together = []
        if together:
            self._tell(self.served(name), together, extra)
        self.stage.changed()

    def _damage(self, served: Served, event: Any, told: dict[str, Any]) -> None:
        """Sends an event with a wrong number; the request's truth ends before it."""
        if "wrong_seq" in told:
            event.seq += told["wrong_seq"]
            served.log.pop()

    def _tell(self, served: Served, events: list[Any], extra: bytes) -> None:
        served.tell(events, extra)
        if served.ended:
            if served.call.method == "GenerateStream":
                last = events[-1]
                served.call.finish(last.failed.status if last.HasField("failed") else None)
            elif served.call.method == "Generate":
                answer_whole(served)

    async def _accept(self, name: str, step: dict[str, Any]) -> None:
        request = self.judge.requests[name]
        wanted = self.id_of(name) if "id" in request else ""
        if not wanted:
            wanted = await self._new_id(name)
        arrival = await self.stage.take(wanted, step.get("via", ""))
        if fault := fault_of_spec(request, arrival.message, arrival.required):
            raise Unmet(fault)
        other = step.get("elsewhere_than")
        if other is not None and self.served(other).call.server == arrival.call.server:
            raise Unmet(f"it came to server {arrival.call.server}, which has {other}")
        at = step.get("at")
        if at is not None and arrival.call.server != at:
            raise Unmet(f"it came to server {arrival.call.server}; {at} is right")
        is_again = self.at.get(name) == arrival.call.server
        if step.get("again" if not is_again else "elsewhere"):
            raise Unmet(f"it came to server {arrival.call.server}, after {self.at.get(name)}")
        silent = step.get("not_held_up_by")
        if silent is not None and (fault := self.servers[silent].held_up(arrival)):
            raise Unmet(f"{fault} than the question to server {silent}, which answers none")
        self.at[name] = arrival.call.server
        served = Served(arrival)
        self.stage.served[wanted] = served
        event = accepted(served.spec, arrival.command_id, self.chance)
        served.note(event)
        self._tell(served, [event], b"")
        if served.call.method == "AddRequest":
            accept_alone(served)

    async def _new_id(self, name: str) -> str:
        """The id that the library made for a request."""
        known = set(self.judge.ids.values()) - {self.judge.ids.get(name)}

        def find() -> str | None:
            new = (one for one in self.stage.arrivals if not one.answered)
            return next((one.request_id for one in new if one.request_id not in known), None)

        made = await self.stage.until(find, f"a request for {name}")
        if len(made) < 8:
            raise Unmet(f"the library made the id {made!r}; it can be guessed")
        self.judge.ids[name] = made
        return made

    async def _refuse(self, name: str, told: dict[str, Any], step: dict[str, Any]) -> None:
        arrival = await self.stage.take(self.id_of(name), told.get("of", step.get("via", "")))
        self.at[name] = arrival.call.server
        status, seconds = make_status(told)
        self.stage.refused(arrival, seconds)
        if arrival.call.method == "StreamResult":
            rejection = s.CommandRejection(
                command_id=arrival.command_id, request_id=arrival.request_id, status=status
            )
            arrival.call.send(s.StreamResultResponse(rejections=[rejection]))
        else:
            arrival.call.finish(status)

    async def _attach(self, name: str, first: int, step: dict[str, Any]) -> None:
        served = self.served(name)
        arrival = await self.stage.take(served.request_id, "attach")
        wanted = arrival.message.from_seq or 1
        if wanted != first:
            raise Unmet(f"it attaches from event {wanted}; {first} is right")
        if step.get("at") not in (None, arrival.call.server):
            raise Unmet(f"it attaches at server {arrival.call.server}")
        instance_id = arrival.message.instance_id
        if instance_id and instance_id != arrival.call.instance_id:
            raise Unmet(f"it attaches at instance {instance_id}")
        old, number = served.call, served.number
        old.live.pop(number, None)
        if old.is_open and old.method == "StreamResult":
            detached = s.SessionDetached(request_id=served.request_id, request_number=number)
            old.send(s.StreamResultResponse(detached=[detached]))
        served.place(arrival.call)
        attached = s.SessionAttached(
            command_id=arrival.command_id,
            request_id=served.request_id,
            from_seq=first,
            request_number=served.number,
        )
        served.call.send(s.StreamResultResponse(attached=[attached]))
        if served.log[first - 1 :]:
            self._tell(served, served.log[first - 1 :], b"")

    async def do_server(self, step: dict[str, Any]) -> None:
        """Something happens to a server."""
        server = self.servers[step["server"]]
        does = step["does"]
        if does in ("cut", "reset", "go_away"):
            if does != "cut":
                calls = [c for c in self.stage.open_calls() if c.server == server.name]
                await server.proxy.answering(sum("Stream" in c.method for c in calls))
            if does == "reset":
                server.proxy.reset(int(step["code"]))
            elif does == "go_away":
                server.proxy.go_away()
            else:
                server.proxy.cut()
            await self.stage.until(
                lambda: all(c.server != server.name for c in self.stage.open_calls()) or None,
                "the end of all calls after the cut",
            )
        elif does == "restart":
            await server.restart()
        elif does == "drain":
            await server.drain()
        elif does == "down":
            self.stage.unasked.discard(server.name)
            server.proxy.accepting = False
            server.proxy.cut()
        elif does == "up":
            server.proxy.accepting = True
        elif does in ("unhealthy", "healthy", "silent"):
            server.become(does)
            self.stage.unasked.discard(server.name)
        elif does == "end_sessions":
            status = make_status(step["status"])[0] if "status" in step else None
            for call in self.stage.open_calls():
                if call.server == server.name and call.method == "StreamResult":
                    call.finish(status)
        else:
            raise ValueError(f"a server does not {does}")

    async def do_saw(self, step: dict[str, Any]) -> None:
        """What the servers must have seen by now, or see soon."""
        told, stage = step["saw"], self.stage
        if told == "cancel":
            wanted = (self.id_of(step["of"]), step.get("by", "session"))
            await stage.until(lambda: wanted in stage.cancels or None, f"cancel of {wanted}")
            stage.cancels.remove(wanted)
        elif told == "credit":
            name = self.id_of(step["of"])
            count = step["tokens"]
            await stage.until(lambda: stage.credits[name] >= count or None, "credit")
            if stage.credits[name] != count:
                raise Unmet(f"credit for {stage.credits[name]} tokens; {count} is right")
        elif told == "no credit":
            if self.stage.credits[self.id_of(step["of"])]:
                raise Unmet("credit was given")
        elif told == "half close":
            await stage.until(lambda: any(c.half_closed for c in stage.calls) or None, "half-close")
        elif told == "gone":
            call = self.served(step["of"]).call
            await stage.until(lambda: not call.is_open or None, "the end of the request's call")
            if not call.was_cancelled:
                raise Unmet("the call ended by itself")
        elif told == "calls":
            for method, count in step["count"].items():
                if stage.count(method) != count:
                    raise Unmet(
                        f"{method} was called {stage.count(method)} times; {count} is right"
                    )
        elif told == "metadata":
            self._saw_metadata(step)
        elif told == "arrived":
            name = self.id_of(step["of"])
            await stage.until(
                lambda: (
                    any(a.request_id == name and not a.answered for a in stage.arrivals) or None
                ),
                "arrival",
            )
        elif told == "open":
            await stage.until(
                lambda: next((True for c in stage.calls if _opened(c, step["members"])), None),
                f"open with {step['members']}",
            )
        else:
            raise ValueError(f"nothing to be seen: {told}")

    def _saw_metadata(self, step: dict[str, Any]) -> None:
        calls = [call for call in self.stage.calls if call.method == step["method"]]
        if not calls:
            raise Unmet(f"{step['method']} was not called")
        for call in calls:
            for key, value in step["metadata"].items():
                told = call.metadata.get(key, "")
                fits = told.startswith(value[:-1]) if value.endswith("*") else told == value
                if not fits:
                    raise Unmet(f"{step['method']} came with {key}: {told!r}; {value!r} is right")

    async def do_each(self, step: dict[str, Any]) -> None:
        """The same steps for each of some numbers, in place of {i}."""
        for number in range(step.get("from", 0), step["each"]):
            text = json.dumps(step["steps"], ensure_ascii=False)

            def count(match: re.Match[str], number: int = number) -> str:
                return str(number + int(match[1] or 0))

            await self.steps(json.loads(re.sub(r"\{i(?:\+(\d+))?\}", count, text)))

    async def do_lose(self, step: dict[str, Any]) -> None:
        """The server that has a request is gone, and takes no more connections."""
        server = self.servers[self.served(step["lose"]).call.server]
        server.proxy.accepting = False
        server.proxy.cut()


def _opened(call: Any, members: dict[str, Any]) -> bool:
    for message in call.messages if call.method == "StreamResult" else ():
        if message.WhichOneof("command") == "open":
            lease = message.open.lease.ToMilliseconds() if message.open.HasField("lease") else None
            told = {"lease_ms": lease, "initial_credit": message.open.initial_credit}
            return not difference(members, told)
    return False
