"""The commands of a session: they are read in order, carried out, and answered in-band.

    commands ──▶ open, cancel, credit: immediately ───────────────▶ answers
             └─▶ add, attach: a task each, which may wait ────────▶ answers

A refused command is answered by a CommandRejection and affects nothing else, with one exception. A
session may be open for days, and its caller's permission may be revoked meanwhile. The permit is
therefore checked with each command. If it is no longer valid, the session ends with that status
after the rejection.

An add may take long, because its prompt is tokenized and its grammar compiled. Commands for other
requests do not wait for it. Commands for the same request do, so that a cancel after an add finds
the request. Commands that need not wait start in order.

A session may also be opened while the server takes no new requests, such as in a drain, to attach
those whose stream was lost. If its client adds one instead, the session ends with the reason, as
GenerateStream does.

The reader pauses while too many answers are unread, so that a client that only writes cannot be
read from indefinitely. It also pauses while MAX_WAITING commands, or MAX_WAITING_BYTES of them,
are in progress.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.v1 import generation_service_pb2

from service.admission.phases import NO_NEW_WORK
from service.convert.converter import Draft, check_request_id
from service.convert.values import interval_seconds, seconds
from service.delivery.events import Attached, CancelAnswered, Opened, Rejected
from service.delivery.session import ResultStream
from service.door.auth import Permit
from service.door.reading import parsed
from service.errors.call_errors import (
    FieldError,
    NotGrantedError,
    PreconditionError,
    UnknownCallerError,
)
from service.servicers.submit import start_request
from service.state import ServerState, current_front

Command = generation_service_pb2.StreamResultRequest

_METHOD = "headrace.v1.GenerationService/StreamResult"
MAX_WAITING = 64
"""When a session has this many unanswered commands, no further one is read."""
MAX_WAITING_BYTES = 4 << 20
"""The same limit in bytes: a few of the largest commands."""


async def read_commands(
    commands: Any, state: ServerState, permit: Permit, stream: ResultStream
) -> None:
    """Read a session's commands and carry them out; see `CommandReader.run`. `permit` belongs to
    the caller who opened the session.
    """
    await CommandReader(state, permit, stream).run(commands)


class CommandReader:
    """Reads one session's commands."""

    def __init__(self, state: ServerState, permit: Permit, stream: ResultStream) -> None:
        self._front = current_front.get()
        self._state = state
        self._permit = permit
        self._identity = permit.caller.identity
        self._stream = stream
        self._first = True
        self._is_late = state.phase in NO_NEW_WORK
        self._waiting: dict[asyncio.Task[None], int] = {}  # with the bytes of their commands
        self._waiting_bytes = 0
        self._last_of: dict[str, asyncio.Task[None]] = {}  # by request: the last waiting one

    async def run(self, commands: Any) -> None:
        """Read until the client half-closes and all commands are carried out. A lost connection
        looks the same as a half-close here.

        Raises:
            UnknownCallerError, NotGrantedError: the caller no longer has permission.
            MalformedMessageError, MessageTooLargeError: a command could not be read.
            NotReadyError: the session was opened while no new requests are taken, and begins with
                one.
        """
        stream, waiting = self._stream, self._waiting
        try:
            async for received in commands:
                command, draft = await parsed(received), None
                if self._is_late and command.HasField("add") and not (stream.requests or waiting):
                    self._state.check(new_work=True)
                try:
                    await self._permit.check()
                    self._state.incoming.check(command)  # limits the parts of waiting commands
                    if command.HasField("add"):
                        may_use = self._permit.caller.may_use
                        draft = self._front.converter.draft(command.add, may_use, "add.spec")
                except (UnknownCallerError, NotGrantedError) as error:
                    self._reject(command, error)
                    raise
                except Exception as error:
                    self._reject(command, error)
                else:
                    self._begin(command, draft)
                self._first = False
                del received, command, draft  # not kept until the next one comes
                while len(waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                await stream.has_room.wait()
            stream.close()
            if waiting:
                await asyncio.wait(waiting)
        finally:
            for task in waiting:
                task.cancel()

    def _begin(self, command: Command, draft: Draft | None) -> None:
        """Carry out a command, immediately if it need not wait."""
        request_id = _request_id(command)
        before = self._last_of.get(request_id) if request_id else None
        if before is None and command.WhichOneof("command") not in ("add", "attach"):
            try:
                self._carry_out_now(command)
            except Exception as error:
                self._reject(command, error)
            return
        self._stream.busy += 1
        task = asyncio.create_task(self._carry_out(command, draft, before))
        self._waiting[task] = size = command.ByteSize()
        self._waiting_bytes += size
        if request_id:
            self._last_of[request_id] = task
        task.add_done_callback(lambda done: self._done(request_id, done))

    def _done(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._waiting_bytes -= self._waiting.pop(task)
        if self._last_of.get(request_id) is task:
            del self._last_of[request_id]
        self._stream.busy -= 1
        self._stream.nudge()

    async def _carry_out(
        self, command: Command, draft: Draft | None, before: asyncio.Task[None] | None
    ) -> None:
        """Carry out a command after the previous one for the same request."""
        if before is not None:
            await asyncio.wait([before])
        try:
            if draft is not None:
                await self._add(command.command_id, draft)
            elif command.HasField("attach"):
                await self._attach(command)
            else:
                self._carry_out_now(command)
        except Exception as error:
            self._reject(command, error)

    def _carry_out_now(self, command: Command) -> None:
        match command.WhichOneof("command"):
            case "open":
                self._open(command)
            case "cancel":
                self._cancel(command)
            case "credit":
                self._credit(command)
            case _:
                raise FieldError(
                    "command", "is missing; set one of open, add, attach, cancel, credit"
                )

    def _reject(self, command: Command, error: Exception) -> None:
        self._state.refusals.add(_METHOD, error)
        self._stream.reply(Rejected(command.command_id, _request_id(command), error))

    def _open(self, command: Command) -> None:
        if not self._first:
            raise PreconditionError("open: must be the session's first command")
        stream, front = self._stream, self._front
        lease_s = seconds(command.open.lease, "open.lease")
        if command.open.HasField("load_interval"):
            interval_s = interval_seconds(command.open.load_interval, "open.load_interval")
            stream.load = front.loads.follow(stream, interval_s)
        stream.lease_s = min(lease_s, front.max_lease_s)
        stream.initial_credit = command.open.initial_credit or None
        stream.reply(Opened(command.command_id, stream.lease_s))

    async def _add(self, command_id: int, draft: Draft) -> None:
        if self._state.phase in NO_NEW_WORK:  # an open session outlives the check of its RPC
            self._state.check(new_work=True)
        await start_request(self._front, self._permit, draft, self._stream, command_id=command_id)

    async def _attach(self, command: Command) -> None:
        self._state.check_instance(command.attach.instance_id)
        request_id = command.attach.request_id
        check_request_id(request_id, "attach.request_id")
        registry = self._front.registry
        await registry.settled(self._identity, request_id)
        from_seq = command.attach.from_seq or 1
        number = registry.find(self._identity, request_id).attach(self._stream, from_seq)
        self._stream.reply(Attached(command.command_id, request_id, from_seq, number))

    def _cancel(self, command: Command) -> None:
        self._state.check_instance(command.cancel.instance_id)
        request_id = command.cancel.request_id
        outcome = self._front.registry.cancel(self._identity, request_id)
        self._stream.reply(CancelAnswered(command.command_id, request_id, outcome))

    def _credit(self, command: Command) -> None:
        if self._stream.initial_credit is None:
            raise PreconditionError("credit: needs a session that was opened with initial_credit")
        request_id = command.credit.request_id
        check_request_id(request_id, "credit.request_id")
        if not command.credit.tokens:
            raise FieldError("credit.tokens", "is 0; say how many more tokens may be sent")
        tokens = command.credit.tokens
        self._front.registry.grant(self._identity, request_id, tokens, self._stream)


def _request_id(command: Command) -> str:
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
