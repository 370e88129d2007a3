"""A gRPC server that survives any method name.

grpcio's server decodes the method name of each call in its main loop, before any interceptor. A
name that is not UTF-8 ends that loop: because of one request of any client, the server cancels all
calls and stops listening. Only calls of unregistered methods can have such a name, and gRPC's core
delivers them through a separate function. They are answered there: their names are not decoded,
nothing is logged or traced, and their messages are not read.

Unauthenticated callers only learn that, not which methods exist.

(That function was seen in grpcio 1.85, and the project requires at least that version.)
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc._cython

from engine.errors import HeadraceError
from service.auth import Authenticator, PermissionDeniedError
from service.status_table import abort, to_status

logger = logging.getLogger(__name__)

_core: Any = grpc._cython.cygrpc  # type: ignore[attr-defined]  # it has no types
_UNKNOWN = "this server has no such method"


def make_server(authenticator: Authenticator, **arguments: Any) -> grpc.aio.Server:
    """Make a server for handlers that are registered by method name (as generated code does); other
    handlers are never called.

    Args:
        authenticator: identifies callers.
        arguments: those of `grpc.aio.server`.
    """
    plain: Any = _core.AioServer
    answering: set[asyncio.Task[None]] = set()

    class Server(plain):  # type: ignore[misc]  # untyped base
        """The class behind `grpc.aio.server`."""

        async def _request_call(self) -> Any:
            """Wait for the next call of an unregistered method; grpcio never gets one, because they
            are answered here.
            """
            while True:
                call = await super()._request_call()
                task = asyncio.create_task(_refuse(call, authenticator))
                answering.add(task)
                task.add_done_callback(answering.discard)

    # grpc.aio makes its server by this name and offers no other way. No other code runs in between.
    _core.AioServer = Server
    try:
        return grpc.aio.server(**arguments)
    finally:
        _core.AioServer = plain


async def _refuse(call: Any, authenticator: Authenticator) -> None:
    """End a call with UNIMPLEMENTED, or UNAUTHENTICATED."""
    context = _core._ServicerContext(call, None, None, asyncio.get_running_loop())
    try:
        try:
            authenticator.by_token("", context.invocation_metadata())
        except PermissionDeniedError:
            pass  # known; permissions do not matter here
        except HeadraceError as error:
            await abort(context, to_status(error))
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)
    except grpc.aio.AbortError:
        pass  # how abort always ends
    except Exception:
        # The caller has gone, or the server has stopped; either ends the call.
        logger.debug("a call of an unknown method was not answered", exc_info=True)
