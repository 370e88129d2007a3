"""The messages of the unary calls: what the sync and the asyncio client send, and how they read
the answers.
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
_CANCELS_PER_CALL = 1024  # the contract's limit
_SMALL_BYTES = 64 * 1024  # far less than what a server cuts a result into

_HEALTH = {
    health_pb2.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}


def name_request(spec: GenerationSpec) -> None:
    """Gives a request an unguessable id if it has none, so that it can be cancelled by its id from
    the start, and that a unary call with it can be tried again without harm.
    """
    if not spec.request_id:
        spec.request_id = uuid.uuid4().hex


def cancel_requests(ids: str | Iterable[str]) -> Iterator[CancelRequest]:
    """The calls that cancel these requests."""
    wanted = [ids] if isinstance(ids, str) else list(dict.fromkeys(ids))
    for start in range(0, len(wanted), _CANCELS_PER_CALL):
        yield CancelRequest(request_ids=wanted[start : start + _CANCELS_PER_CALL])


def cancel_statuses(response: CancelResponse) -> dict[str, CancelStatus]:
    """The result for each request."""
    return {one.request_id: cancel_status_from_proto(one.status) for one in response.results}


def poll_request(
    fold: Fold, *, until_done: bool = False, wait: float = POLL_SECONDS
) -> GetResultRequest:
    """The call that reads a request's next events, waiting for them at most `wait` seconds."""
    request = GetResultRequest(
        request_id=fold.request_id, from_seq=fold.next_seq, until_done=until_done
    )
    request.wait.FromNanoseconds(int(max(wait, 0.0) * 1e9))
    return request


def next_poll(
    fold: Fold, deadline: Deadline, pause: Deadline
) -> tuple[GetResultRequest, float | None]:
    """The call that reads a request's next events within these times, and how long to wait for its
    answer; None: as long as for any.

    Raises:
        DeadlineExceededError: one of them is over.
    """
    deadline.check(fold.request_id)
    pause.check(fold.request_id)
    left = shortest(deadline.left(), pause.left())
    if left is None:
        return poll_request(fold), None
    return poll_request(fold, wait=min(left, POLL_SECONDS)), left + ANSWER_SECONDS


class ResultWait:
    """A wait for the end of a request that runs without a stream: which calls to make, and when to
    give up.

    A large result comes in several answers. So an answer before the last one may be part of a
    finished result, which is read to its end even after the timeout; or it is the present output of
    a running request, which grows with each call. They differ in size: of two consecutive parts,
    split because together they would be too large, one is large.
    """

    def __init__(self, request_id: str, timeout: float | None) -> None:
        self._fold = Fold(request_id, n=0)
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._last_bytes = _SMALL_BYTES  # of the last answer that came after the end of the time

    def request(self) -> GetResultRequest:
        """The next call."""
        left = POLL_SECONDS if self._end is None else self._end - time.monotonic()
        return poll_request(self._fold, until_done=True, wait=min(left, POLL_SECONDS))

    def left(self) -> float | None:
        """How long to wait for the answer to it; None: as long as for any. What only asks, and what
        is read behind the end, has the time of any call.
        """
        if self._end is None or not self._timeout or time.monotonic() > self._end:
            return None
        return self._end - time.monotonic() + ANSWER_SECONDS

    def take(self, response: GetResultResponse) -> Result | None:
        """Takes in an answer; returns the whole result, or None: call again.

        Raises:
            DeadlineExceededError: the timeout passed, and the request has not ended.
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
    """The call that tokenizes a text or a conversation."""
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
    """The tokens of an answer."""
    return Tokenization(tuple(response.token_ids), tokens_from_proto(response.tokens))


def detokenize_request(
    token_ids: Iterable[int], skip_special_tokens: bool | None
) -> model_service_pb2.DetokenizeRequest:
    """The call that turns token ids into text."""
    request = model_service_pb2.DetokenizeRequest(token_ids=token_ids)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return request


def health_status(response: Any) -> HealthStatus:
    """The status of a health answer."""
    return _HEALTH.get(response.status, HealthStatus.UNKNOWN)
