"""What a client asks a server before that gets requests: whether it is ready, then who it is.

The part that does no input or output. A flavour (threads or asyncio) makes each `Question`'s call
at the server, and gives the answer back; what it says of the server is noted in the `FleetState`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from grpc_health.v1 import health_pb2

from headrace._calls import GENERATION_SERVICE
from headrace._fleet import FleetState, Server
from headrace.errors import HeadraceError, UnavailableError
from headrace.v1 import model_service_pb2

_log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Question:
    """A unary call that is to be made now, for at most `CHECK_SECONDS`."""

    pick: Callable[[Any], Any]
    """Its method, of the flavour's link to the server."""
    request: Any


Questions: TypeAlias = Generator[Question, Any, None]


def questions(state: FleetState, server: Server) -> Questions:
    """The questions for one server, in order; at their end it is `FleetState.found`, or not joined.

    Each one's answer is sent in, or the HeadraceError of its call thrown in.
    """
    try:
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        answer = yield Question(lambda link: link.health.Check, request)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise UnavailableError(f"the server at {server.link.target} is not ready")
        instance_id, capacity = yield from _identity(server)
    except HeadraceError as error:
        state.not_joined(server, error)
    else:
        state.found(server, instance_id, capacity)


def _identity(server: Server) -> Generator[Question, Any, tuple[str, int]]:
    """A server's instance and how many requests it runs; a caller that may not ask for its model
    gets neither.

    Raises:
        UnavailableError: it is not ready after all.
    """
    request = model_service_pb2.GetModelRequest()
    try:
        card = (yield Question(lambda link: link.models.GetModel, request)).model
    except UnavailableError:
        raise
    except HeadraceError as error:
        _log.debug("%s does not tell its instance: %s", server.link.target, error)
        return "", 1
    return card.instance_id, card.limits.max_running_requests
