"""What a client asks a server before sending it requests: whether it is ready, and its identity.

This module does no I/O. A flavour (threads or asyncio) makes the call of each `Question` and passes
back the answer. The outcome is recorded in the `FleetState`.
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
    """A unary call to make now, with a timeout of `CHECK_SECONDS`."""

    pick: Callable[[Any], Any]
    """Returns the call's method, given the flavour's link to the server."""
    request: Any


Questions: TypeAlias = Generator[Question, Any, None]


def questions(state: FleetState, server: Server) -> Questions:
    """Yields the questions for one server, in order.

    Send in each call's answer, or throw in the HeadraceError of a failed call. At the end, the
    server is `found` or `not_joined` in `state`.
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
    """Asks for a server's instance id and how many requests it can run.

    Returns an empty id and 1 if the caller may not read the server's model card.

    Raises:
        UnavailableError: the server has become unready.
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
