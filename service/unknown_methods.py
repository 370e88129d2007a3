"""A gRPC server that stands any name of a method.

grpcio's server decodes the name of each call in its one loop, before any interceptor, and a name
that is not UTF-8 ends that loop: the server cancels all calls and stops to listen, for one request
of a stranger. Only calls of methods that nobody has registered can bear such a name; they come out
of gRPC's core by a door of their own. Here they are answered at that door: nothing looks at their
names, nothing is logged or traced, and their messages are not read.

Whoever is not known is told so, and not which methods there are.

(That door was seen in grpcio 1.85, and the project asks for that version at least.)
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
    """A server, for handlers that are registered by their names (as generated code does): others
    are never called.

    Args:
        authenticator: tells who is known.
        arguments: of `grpc.aio.server`.
    """
    plain: Any = _core.AioServer
    answering: set[asyncio.Task[None]] = set()

    class Server(plain):  # type: ignore[misc]  # untyped base
        """What `grpc.aio.server` stands on."""

        async def _request_call(self) -> Any:
            """The next call of a method that is not registered: there is never one."""
            while True:
                call = await super()._request_call()
                task = asyncio.create_task(_refuse(call, authenticator))
                answering.add(task)
                task.add_done_callback(answering.discard)

    # grpc.aio makes it by this name and has no door for another. Nothing runs in between.
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
            pass  # known, whatever they may call
        except HeadraceError as error:
            await abort(context, to_status(error))
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)
    except grpc.aio.AbortError:
        pass  # the way in which abort ends
    except Exception:
        # The caller has gone, or the server has stopped. A call that is not answered ends with it.
        logger.debug("a call of an unknown method was not answered", exc_info=True)
