"""From a caller's draft to a request that runs: the same for all RPCs and commands."""

from __future__ import annotations

from engine.errors import InvalidRequestError, UnsupportedFeatureError
from service.auth import Permit
from service.call_errors import FieldError
from service.convert.fields import field_error
from service.convert.request import Draft
from service.delivery.request import ServedRequest
from service.delivery.session import ResultStream
from service.state import FrontEnd


async def start_request(
    front: FrontEnd,
    permit: Permit,
    draft: Draft,
    stream: ResultStream | None,
    *,
    final: bool = False,
    durable: bool = False,
    command_id: int = 0,
) -> ServedRequest:
    """Convert a caller's spec and start the request. Its name is checked before any work is done
    for it, and a drain that begins meanwhile waits for it.

    Args:
        front: what requests need.
        permit: of whoever asks for it.
        draft: what is to be generated.
        stream: where the results go; None: they are kept.
        final: they are wanted in one piece.
        durable, command_id: see `Registry.start`.

    Raises:
        FieldError: something is wrong with the spec; names it by the field's whole path.
        HeadraceError: it is refused for another reason.
    """
    registry, account = front.registry, permit.account
    unread = registry.undelivered_bytes
    try:
        with registry.arriving():
            await registry.settled(account.identity, draft.request_id)
            engine_id = registry.new_name(account.identity, draft.request_id)
            # What it holds counts from here on, whatever becomes of it.
            with registry.admission.holding(account) as holding:
                holding.enter(draft.footprint, unread)
                submission = await front.converter.submission(
                    draft,
                    account=account,
                    weight=holding.weight,
                    max_priority=permit.caller.max_priority,
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
                        holding.drop(draft.footprint)
    except (FieldError, InvalidRequestError, UnsupportedFeatureError) as error:
        raise field_error(error, f"{draft.field}.") from None
