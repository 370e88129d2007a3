"""How requests end: the record of a live one, and the description of its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine.outputs import Finish, FinishReason, RequestFailure, Timings, Usage
from engine.request import GenerationRequest, Request, RequestStatus
from engine.types import TokenId

STATUS_OF = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.CONTEXT: RequestStatus.FINISHED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.TIME_LIMIT: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with the choices of it that have not ended.

    Attributes:
        spec: what was asked for.
        choices: by index; empty once the request has ended.
        is_forked: whether all choices have begun; until then, the first one computes the prompt.
        is_prompt_reported: whether an output has said that the prompt was processed.
    """

    spec: GenerationRequest
    choices: dict[int, Request]
    is_forked: bool
    is_prompt_reported: bool = False


def describe_end(
    request: Request,
    reason: FinishReason,
    now: float,
    *,
    stop_token_id: TokenId | None = None,
    failure: RequestFailure | None = None,
) -> Finish:
    """How a choice ended. `now`: monotonic seconds."""
    return Finish(
        reason=reason,
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            completion_tokens=request.num_output_tokens - request.num_pending_tokens,
        ),
        timings=Timings(
            arrival=request.arrival,
            first_scheduled=request.first_scheduled,
            first_token=request.first_token,
            last_token=request.last_token,
            finished=now,
            preemptions=request.preemptions,
        ),
        stop_token_id=stop_token_id,
        failure=failure,
    )


def new_error_id() -> str:
    """A short random name under which a cause stands in the log."""
    return secrets.token_hex(6)
