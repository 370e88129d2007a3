"""A gRPC server that survives any method name.

grpcio's server decodes the method name of each call in its main loop, before any interceptor. A
name that is not UTF-8 ends that loop, so one request of any client makes the server cancel all
calls and stop listening. Only calls of unregistered methods can have such a name, and gRPC's core
delivers them through a separate function. They are answered there: their names are not decoded,
nothing is logged or traced, and their messages are not read. Watchers of calls are told that a call
has ended, but not its name.

The answer to unauthenticated callers does not reveal which methods exist.

(That function was seen in grpcio 1.85, and the project requires at least that version.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc._cython

from engine.contract.errors import HeadraceError
from service.door.auth import Authenticator
from service.errors.call_errors import NotGrantedError
from service.errors.status_table import abort, status_code, to_status

logger = logging.getLogger(__name__)

_core: Any = grpc._cython.cygrpc  # type: ignore[attr-defined]  # it has no types
_UNKNOWN = "this server has no such method"


Ended = Callable[[grpc.StatusCode, float], None]
"""Called with how a call was answered, and how many seconds that took."""


def make_server(
    authenticator: Authenticator, ended: Ended | None, **arguments: Any
) -> grpc.aio.Server:
    """Make a server for handlers that are registered by method name, as in generated code. Other
    handlers are never called.

    Args:
        authenticator: identifies callers.
        ended: called for each call of an unknown method, or None.
        arguments: the arguments of `grpc.aio.server`.
    """
    plain: Any = _core.AioServer
    answering: set[asyncio.Task[None]] = set()

    class Server(plain):  # type: ignore[misc]  # untyped base
        """The class behind `grpc.aio.server`."""

        async def _request_call(self) -> Any:
            """Wait for the next call of an unregistered method. grpcio never gets one, because they
            are answered here.
            """
            while True:
                call = await super()._request_call()
                task = asyncio.create_task(_refuse(call, authenticator, ended))
                answering.add(task)
                task.add_done_callback(answering.discard)

    # grpc.aio makes its server by this name and offers no other way. No other code runs in between.
    _core.AioServer = Server
    try:
        return grpc.aio.server(**arguments)
    finally:
        _core.AioServer = plain


async def _refuse(call: Any, authenticator: Authenticator, ended: Ended | None) -> None:
    """End a call with UNIMPLEMENTED, or UNAUTHENTICATED."""
    began, code = time.monotonic(), grpc.StatusCode.UNIMPLEMENTED
    context = _core._ServicerContext(call, None, None, asyncio.get_running_loop())
    try:
        try:
            if authenticator.tables is not None:
                await authenticator.tables.fresh()
            authenticator.by_token("", context.invocation_metadata())
        except NotGrantedError:
            pass  # known; permissions do not matter here
        except HeadraceError as error:
            status = to_status(error)
            code = status_code(status)
            await abort(context, status)
        await context.abort(code, _UNKNOWN)
    except grpc.aio.AbortError:  # how abort always ends
        if ended is not None:
            ended(code, time.monotonic() - began)
    except Exception:
        # The caller has gone, or the server has stopped; either ends the call.
        logger.debug("a call of an unknown method was not answered", exc_info=True)
