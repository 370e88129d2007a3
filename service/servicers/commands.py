"""The commands of a session: read one after the other, carried out, answered in-band.

A refused command is answered by a CommandRejection and disturbs nothing else. The order of
commands is kept: a cancel that follows an add finds the request. The reader waits while answers
pile up unread, so that a client that only writes is not listened to for ever.
"""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_service_pb2

from engine.errors import UnsupportedFeatureError
from service.convert.request import check_request_id
from service.convert.unknown import refuse_unknown
from service.convert.values import seconds
from service.delivery.events import Attached, CancelAnswered, Opened, Rejected
from service.delivery.session import ResultStream
from service.errors import FieldError, PreconditionError
from service.interceptors import check_readable
from service.servicers.submit import convert_spec
from service.state import FrontEnd, ServerState

Command = generation_service_pb2.StreamResultRequest


class CommandReader:
    """Reads one session's commands. `identity`: of who opened it."""

    def __init__(
        self, front: FrontEnd, state: ServerState, identity: str, stream: ResultStream
    ) -> None:
        self._front = front
        self._state = state
        self._identity = identity
        self._stream = stream
        self._first = True

    async def run(self, commands: Any) -> None:
        """Read until the client half-closes (or the connection is lost, which looks the same
        here).
        """
        stream = self._stream
        async for command in commands:
            check_readable(command)
            stream.busy += 1
            try:
                await self._carry_out(command)
                self._first = False
            finally:
                stream.busy -= 1
                stream.nudge()
            await stream.room()
        stream.close()

    async def _carry_out(self, command: Command) -> None:
        kind = command.WhichOneof("command")
        try:
            refuse_unknown(command)
            match kind:
                case "open":
                    self._open(command)
                case "add":
                    await self._add(command)
                case "attach":
                    await self._attach(command)
                case "cancel":
                    self._cancel(command)
                case "credit":
                    raise UnsupportedFeatureError(
                        "credit", "needs credits, which this server does not support yet"
                    )
                case _:
                    raise FieldError("command", "is missing; set one of open, add, attach, cancel")
        except Exception as error:
            self._stream.reply(
                Rejected(
                    command.command_id,
                    _request_id(command),
                    error,
                    "add.spec." if kind == "add" else "",
                )
            )

    def _open(self, command: Command) -> None:
        if not self._first:
            raise PreconditionError("open: must be the session's first command")
        if command.open.initial_credit != 0:
            raise UnsupportedFeatureError(
                "open.initial_credit", "is not supported by this server yet; leave it out"
            )
        lease_s = seconds(command.open.lease, "open.lease")
        self._stream.lease_s = min(lease_s, self._front.max_lease_s)
        self._stream.reply(Opened(command.command_id, self._stream.lease_s))

    async def _add(self, command: Command) -> None:
        self._state.check(new_work=True)  # an open session outlives the check of its RPC
        if not command.add.HasField("spec"):
            raise FieldError("add.spec", "is missing; say what to generate")
        submission = await convert_spec(self._front, self._identity, command.add.spec)
        await self._front.registry.start(submission, self._stream, command_id=command.command_id)

    async def _attach(self, command: Command) -> None:
        request_id = command.attach.request_id
        check_request_id(request_id, "attach.request_id")
        await self._front.registry.settled(self._identity, request_id)
        from_seq = command.attach.from_seq or 1
        self._front.registry.attach(self._identity, request_id, from_seq, self._stream)
        self._stream.reply(Attached(command.command_id, request_id, from_seq))

    def _cancel(self, command: Command) -> None:
        request_id = command.cancel.request_id
        outcome = self._front.registry.cancel(self._identity, request_id)
        self._stream.reply(CancelAnswered(command.command_id, request_id, outcome))


def _request_id(command: Command) -> str:
    """The request that a command names, if any."""
    match command.WhichOneof("command"):
        case "add":
            return command.add.spec.request_id[:128]
        case "attach":
            return command.attach.request_id[:128]
        case "cancel":
            return command.cancel.request_id[:128]
        case "credit":
            return command.credit.request_id[:128]
        case _:
            return ""
