"""The messages of unary calls: what the sync and asyncio clients send, and how they read
answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grpc_health.v1 import health_pb2

from headrace._capabilities import with_capabilities
from headrace._deadline import Deadline, shortest
from headrace._fold import Fold
from headrace._from_proto import cancel_status_from_proto, tokens_from_proto
from headrace.errors import DeadlineExceededError, invalid_argument
from headrace.messages import Conversation
from headrace.options import set_chat_option, set_input
from headrace.results import (
    CancelStatus,
    HealthStatus,
    Result,
    Tokenization,
)
from headrace.v1 import model_service_pb2
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import (
    CancelRequest,
    CancelResponse,
    GetResultRequest,
    GetResultResponse,
)

GENERATION_SERVICE = "headrace.v1.GenerationService"
POLL_SECONDS = 30  # of the 60 that the contract allows: proxies cut quiet calls
READY_POLL_SECONDS = 0.2
ANSWER_SECONDS = 0.15  # how much later than a wait its answer may come
PAGE_SIZE = 1000  # the contract's limit
_CANCELS_PER_CALL = 1024  # the contract's limit
_SMALL_BYTES = 64 * 1024  # far less than what a server cuts a result into

_HEALTH = {
    health_pb2.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}


def name_request(spec: GenerationSpec) -> None:
    """Gives a request an unguessable id if it has none.

    With an id, it can be cancelled from the start, and a unary call can be retried safely.
    """
    if not spec.request_id:
        spec.request_id = uuid.uuid4().hex


def cancel_requests(ids: str | Iterable[str]) -> Iterator[CancelRequest]:
    """Yields the `CancelRequest` messages that cancel these requests."""
    wanted = [ids] if isinstance(ids, str) else list(dict.fromkeys(ids))
    for start in range(0, len(wanted), _CANCELS_PER_CALL):
        yield CancelRequest(request_ids=wanted[start : start + _CANCELS_PER_CALL])


def cancel_statuses(response: CancelResponse) -> dict[str, CancelStatus]:
    """Maps each request id to its cancellation status."""
    return {one.request_id: cancel_status_from_proto(one.status) for one in response.results}


def poll_request(
    fold: Fold, *, until_done: bool = False, wait: float = POLL_SECONDS
) -> GetResultRequest:
    """Returns the message that waits up to `wait` seconds for a request's next events."""
    request = GetResultRequest(
        request_id=fold.request_id, from_seq=fold.next_seq, until_done=until_done
    )
    request.wait.FromNanoseconds(int(max(wait, 0.0) * 1e9))
    return request


def next_poll(
    fold: Fold, deadline: Deadline, pause: Deadline
) -> tuple[GetResultRequest, float | None]:
    """Returns the message that reads a request's next events, and how long to wait for the answer.

    The wait is in seconds; None means the default timeout of calls.

    Raises:
        DeadlineExceededError: `deadline` or `pause` has passed.
    """
    deadline.check(fold.request_id)
    pause.check(fold.request_id)
    left = shortest(deadline.left(), pause.left())
    if left is None:
        return poll_request(fold), None
    return poll_request(fold, wait=min(left, POLL_SECONDS)), left + ANSWER_SECONDS


class ResultWait:
    """Waits for a request without a stream to end: which calls to make, and when to give up.

    A large result comes in several answers. An answer before the last one is therefore ambiguous.
    It may be a chunk of a finished result, which is read to its end even after the timeout. Or it
    may be the current output of a running request, which grows with each call. Their sizes tell
    them apart: a result is split only when it is too large, so of two consecutive chunks at least
    one is large.
    """

    def __init__(self, request_id: str, timeout: float | None) -> None:
        self._fold = Fold(request_id, n=0)
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._last_bytes = _SMALL_BYTES  # of the last answer that came after the end of the time

    def request(self) -> GetResultRequest:
        """Returns the next message to send."""
        left = POLL_SECONDS if self._end is None else self._end - time.monotonic()
        return poll_request(self._fold, until_done=True, wait=min(left, POLL_SECONDS))

    def left(self) -> float | None:
        """How long to wait for the next answer; None means the default timeout of calls.

        The default applies without a timeout, with a timeout of 0, and after the timeout has
        passed.
        """
        if self._end is None or not self._timeout or time.monotonic() > self._end:
            return None
        return self._end - time.monotonic() + ANSWER_SECONDS

    def take(self, response: GetResultResponse) -> Result | None:
        """Adds an answer. Returns the whole result, or None if another call is needed.

        Raises:
            DeadlineExceededError: the timeout has passed and the request has not ended.
            HeadraceError: the request failed.
        """
        fold = self._fold
        for event in response.events:
            fold.add(event)
        if response.done or fold.done:
            return fold.result()
        if self._end is None or time.monotonic() < self._end:
            return None
        size = response.ByteSize()
        if not response.events or max(size, self._last_bytes) < _SMALL_BYTES:
            raise DeadlineExceededError(
                f"request {fold.request_id} has not ended within {self._timeout} s",
                request_id=fold.request_id,
                partial=fold.partial(),
            )
        self._last_bytes = size
        return None


def tokenize_request(
    prompt: str | Conversation | GenerationSpec,
    *,
    token_details: bool,
    add_special_tokens: bool | None,
    chat_options: Mapping[str, Any],
) -> model_service_pb2.TokenizeRequest:
    """Returns the message that tokenizes a text or a conversation."""
    request = model_service_pb2.TokenizeRequest(token_details=token_details)
    if isinstance(prompt, GenerationSpec):
        kind = prompt.WhichOneof("input")
        if kind not in ("text", "chat"):
            raise invalid_argument("prompt", "token ids are tokenized already")
        getattr(request, kind).CopyFrom(getattr(prompt, kind))
    else:
        set_input(request, prompt)
    chosen = {name: value for name, value in chat_options.items() if value is not None}
    if chosen and not request.HasField("chat"):
        raise invalid_argument(next(iter(chosen)), "belongs to a prompt of messages")
    if add_special_tokens is not None:
        if not request.HasField("text"):
            raise invalid_argument("add_special_tokens", "belongs to a text prompt")
        request.text.add_special_tokens = add_special_tokens
    for name, value in chosen.items():
        set_chat_option(request.chat, name, value)
    return with_capabilities(request)


def tokenization(response: model_service_pb2.TokenizeResponse) -> Tokenization:
    """Converts the answer to a `Tokenization`."""
    return Tokenization(tuple(response.token_ids), tokens_from_proto(response.tokens))


def detokenize_request(
    token_ids: Iterable[int], skip_special_tokens: bool | None
) -> model_service_pb2.DetokenizeRequest:
    """Returns the message that converts token ids to text."""
    request = model_service_pb2.DetokenizeRequest(token_ids=token_ids)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return request


def health_status(response: Any) -> HealthStatus:
    """Returns the status in a health response."""
    return _HEALTH.get(response.status, HealthStatus.UNKNOWN)
