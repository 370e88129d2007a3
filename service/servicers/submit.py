"""From a caller's draft to a request that runs: the same for all RPCs and commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from engine.errors import DuplicateRequestError, InvalidRequestError, UnsupportedFeatureError
from service.admission import Charge
from service.auth import Permit
from service.call_errors import FieldError
from service.convert.fields import field_error
from service.convert.request import Draft
from service.delivery.request import ServedRequest
from service.delivery.session import ResultStream
from service.delivery.submission import LivesBy
from service.state import FrontEnd
from service.telemetry import label_span


@asynccontextmanager
async def called_request(
    front: FrontEnd, permit: Permit, draft: Draft, lives_by: LivesBy
) -> AsyncIterator[ServedRequest]:
    """The request of a call that may be retried, once the engine took it in: the one that the same
    call has started before, if that is there, or else a new one. It is waited for until the end of
    the context.

    A call that finds its request there costs what its message takes, and nothing else.

    Args:
        front, permit, draft: as of `start_request`.
        lives_by: what keeps the request from being cancelled.

    Raises:
        OtherContentError: the id belongs to another request.
        TooManyWaitError: as many calls wait for the request as may.
        HeadraceError: as of `start_request`.
    """
    registry, account = front.registry, permit.account
    identity, request_id = account.identity, draft.request_id
    with ExitStack() as waiting:
        with registry.arriving():
            while True:
                found = await registry.retried(identity, request_id, draft.digest)
                if found is None:
                    try:
                        found = await start_request(front, permit, draft, None, lives_by=lives_by)
                    except DuplicateRequestError:
                        continue  # another call was quicker: see which
                    waiting.callback(found.left)
                    break
                label_span(request_id, draft.labels, is_session=False)
                with ExitStack() as joining:
                    joining.enter_context(found.joined())
                    holding = joining.enter_context(registry.admission.holding(account))
                    holding.take(Charge(size=draft.footprint.size), draft.footprint.field)
                    await registry.settled(identity, request_id)
                    if found.log.accepted is not None:
                        waiting.push(joining.pop_all())
                        break
                # The engine refused it: the next try is this call's own.
        yield found


async def start_request(
    front: FrontEnd,
    permit: Permit,
    draft: Draft,
    stream: ResultStream | None,
    *,
    lives_by: LivesBy = LivesBy.STREAM,
    command_id: int = 0,
) -> ServedRequest:
    """Convert a caller's spec and start the request. Its name is checked before any work is done
    for it, and a drain that begins meanwhile waits for it.

    Args:
        front: what requests need.
        permit: of whoever asks for it.
        draft: what is to be generated.
        stream: where the results go; None: they are kept.
        lives_by: what keeps the request from being cancelled.
        command_id: see `Registry.start`.

    Raises:
        FieldError: something is wrong with the spec; names it by the field's whole path.
        HeadraceError: it is refused for another reason.
    """
    registry, account = front.registry, permit.account
    is_session = stream is not None and stream.is_session
    label_span(draft.request_id, draft.labels, is_session=is_session)
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
                    lives_by=lives_by,
                )
                holding.admit(submission.footprint, submission.reserved_tokens, unread)
                try:
                    return await registry.start(submission, holding, stream, command_id=command_id)
                finally:
                    # Else gRPC holds it as long as the RPC is.
                    if lives_by is LivesBy.ITSELF or is_session:
                        holding.drop(draft.footprint)
    except (FieldError, InvalidRequestError, UnsupportedFeatureError) as error:
        raise field_error(error, f"{draft.field}.") from None
