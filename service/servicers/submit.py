"""From a caller's spec to a request that runs: the same for all RPCs and commands."""

from __future__ import annotations

from headrace.v1 import generation_pb2, generation_service_pb2

from service.auth import Permit
from service.call_errors import FieldError
from service.convert.fields import part_of_message
from service.convert.weight import message_footprint
from service.delivery.request import ServedRequest
from service.delivery.session import ResultStream
from service.state import ServerState


def spec_of(
    request: generation_service_pb2.AddRequestRequest
    | generation_service_pb2.GenerateRequest
    | generation_service_pb2.GenerateStreamRequest,
) -> generation_pb2.GenerationSpec:
    """The spec of an RPC's message.

    Raises:
        FieldError: it has none.
    """
    if not request.HasField("spec"):
        raise FieldError("spec", "is missing; say what to generate")
    return request.spec


async def start_request(
    state: ServerState,
    permit: Permit,
    spec: generation_pb2.GenerationSpec,
    stream: ResultStream | None,
    *,
    field: str = "spec",
    final: bool = False,
    durable: bool = False,
    command_id: int = 0,
) -> ServedRequest:
    """Convert a caller's spec and start the request. Its name is checked before any work is done
    for it, and a drain that begins meanwhile waits for it.

    Args:
        state: has what requests need.
        permit: of whoever asks for it.
        spec: what is to be generated.
        stream: where the results go; None: they are kept.
        field: where the spec is in the message; errors name its fields by their whole path.
        final: they are wanted in one piece.
        durable, command_id: see `Registry.start`.

    Raises:
        NotReadyError: no requests are taken any more. (A session outlives the check of its RPC.)
        HeadraceError: the request is refused, by any of the others.
    """
    front = state.check(new_work=True)
    converter, registry, account = front.converter, front.registry, permit.account
    unread = registry.undelivered_bytes
    with part_of_message(field):
        request_id, message = converter.check_id(spec), message_footprint(spec)
        with registry.arriving():
            await registry.settled(account.identity, request_id)
            engine_id = registry.new_name(account.identity, request_id)
            # What it holds counts from here on, whatever becomes of it.
            with registry.admission.holding(account) as holding:
                holding.enter(message, unread)
                submission = await converter.submission(
                    spec,
                    account=account,
                    weight=holding.weight,
                    max_priority=permit.caller.max_priority,
                    request_id=request_id,
                    engine_id=engine_id,
                    final=final,
                )
                holding.admit(submission.footprint, submission.reserved_tokens, unread)
                try:
                    return await registry.start(
                        submission, holding, stream, durable=durable, command_id=command_id
                    )
                finally:
                    # Else gRPC holds it as long as the RPC is.
                    if stream is None or stream.is_session:
                        holding.drop(message)
