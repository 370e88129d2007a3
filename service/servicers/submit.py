"""Starts a request from a caller's draft, in the same way for all RPCs and commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from engine.contract.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from engine.contract.types import RequestId
from service.admission.admission_control import Charge
from service.convert.converter import Draft
from service.delivery.served_request import ServedRequest
from service.delivery.session import ResultStream
from service.delivery.submission import LivesBy
from service.door.auth import Permit
from service.errors.call_errors import FieldError
from service.errors.contract_fields import field_error
from service.logs.context import current_adapter, current_request
from service.state import FrontEnd

if TYPE_CHECKING:
    from service.telemetry.request_spans import ServedSpan


@asynccontextmanager
async def called_request(
    front: FrontEnd, permit: Permit, draft: Draft, lives_by: LivesBy
) -> AsyncIterator[ServedRequest]:
    """Yield the accepted request of a call that may be retried. This is the request that the same
    call started before, if it still exists; otherwise a new one. The call counts as waiting for it
    until the end of the block.

    A call that finds its request costs only the memory of its message.

    Args:
        front, permit, draft: see `start_request`.
        lives_by: what the request needs in order not to be cancelled.

    Raises:
        OtherContentError: the id belongs to another request.
        TooManyWaitError: too many calls wait for the request.
        HeadraceError: see `start_request`.
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
                with ExitStack() as joining:
                    joining.enter_context(found.joined())
                    holding = joining.enter_context(registry.admission.holding(account))
                    holding.take(Charge(size=draft.footprint.size), draft.footprint.field)
                    await registry.settled(identity, request_id)
                    if found.log.accepted is not None:
                        waiting.push(joining.pop_all())
                        break
                # The engine refused it, so this call makes the next attempt itself.
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
    """Convert a caller's spec and start the request. Its id is checked before any other work is
    done, and a drain that starts meanwhile waits for it.

    Args:
        front: the front end.
        permit: the caller's permit.
        draft: what to generate.
        stream: the stream for the results; None if the results are kept.
        lives_by: what the request needs in order not to be cancelled.
        command_id: see `Registry.start`.

    Raises:
        FieldError: the spec is wrong; the message has the field's whole path.
        HeadraceError: the request is refused for another reason.
    """
    registry, account = front.registry, permit.account
    is_session = stream is not None and stream.is_session
    current_request.set(draft.request_id)
    span, engine_id, is_chat = None, None, draft.spec.HasField("chat")
    if front.spans is not None:
        span = front.spans.begin(
            draft.request_id, draft.labels, identity=account.identity, is_chat=is_chat
        )
    try:
        with registry.arriving():
            await registry.settled(account.identity, draft.request_id)
            engine_id = registry.new_name(account.identity, draft.request_id)
            # From here on, the memory that it holds is counted.
            with registry.admission.holding(account, draft.spec.request_id) as holding:
                holding.enter(draft.footprint)
                submission = await front.converter.submission(
                    draft,
                    account=account,
                    weight=holding.weight,
                    max_priority=permit.caller.max_priority,
                    engine_id=engine_id,
                    lives_by=lives_by,
                )
                current_adapter.set(submission.request.adapter)
                holding.admit(submission.footprint, submission.reserved_tokens)
                if span is not None:
                    span.submitted(submission.request)
                if front.metrics is not None:
                    front.metrics.submitting(engine_id, is_chat=is_chat)
                try:
                    return await registry.start(submission, holding, stream, command_id=command_id)
                finally:
                    # Otherwise gRPC keeps the message until the RPC ends.
                    if lives_by is LivesBy.ITSELF or is_session:
                        holding.drop(draft.footprint)
    except (FieldError, InvalidRequestError, UnsupportedFeatureError) as error:
        _refused(front, span, engine_id, error)
        raise field_error(error, f"{draft.field}.") from None
    except BaseException as error:
        _refused(front, span, engine_id, error)
        raise


def _refused(
    front: FrontEnd, span: ServedSpan | None, engine_id: RequestId | None, error: BaseException
) -> None:
    """Tell telemetry that the request was refused."""
    if span is not None:
        span.refused(error)
    if front.metrics is not None and engine_id is not None:
        front.metrics.refused(engine_id)
