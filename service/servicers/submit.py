"""From an RPC's message to a submission, the same for all RPCs and commands that start a
request.
"""

from __future__ import annotations

from headrace.v1 import generation_pb2, generation_service_pb2

from service.delivery.submission import Submission
from service.errors import FieldError
from service.state import FrontEnd


async def submission_of(
    front: FrontEnd,
    identity: str,
    request: generation_service_pb2.AddRequestRequest
    | generation_service_pb2.GenerateRequest
    | generation_service_pb2.GenerateStreamRequest,
    *,
    final: bool = False,
) -> Submission:
    """The submission of an RPC that has a spec. `identity`: the caller's."""
    if not request.HasField("spec"):
        raise FieldError("spec", "is missing; say what to generate")
    return await convert_spec(front, identity, request.spec, final=final)


async def convert_spec(
    front: FrontEnd, identity: str, spec: generation_pb2.GenerationSpec, *, final: bool = False
) -> Submission:
    """Convert a caller's spec; the request's name is checked before any work is done for it."""
    request_id = front.converter.check_id(spec)
    await front.registry.settled(identity, request_id)
    front.registry.check_free(identity, request_id)
    return await front.converter.submission(
        spec,
        identity=identity,
        request_id=request_id,
        engine_id=front.registry.engine_id,
        final=final,
    )
