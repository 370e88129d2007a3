"""A request as the servicers pass it to the registry."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.contract.request import GenerationRequest
from engine.text import TextStream
from service.admission.accounts import Account
from service.admission.footprint import Footprint
from service.delivery.events import DeliveryOptions
from service.replies.reply_text import ReplyText

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class LivesBy(enum.Enum):
    """What a request needs in order not to be cancelled before its end."""

    STREAM = "the stream that receives its results, or that stream's lease"
    CALLS = "a call that waits for its whole result (Generate), or a stream that attached to it"
    ITSELF = "nothing (AddRequest)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked request, ready for the engine.

    Attributes:
        account: the account that is charged. Its identity owns the request.
        request_id: the request's id, as its owner knows it.
        request: the request for the engine, with a name from `Registry.new_name`.
        reserved_tokens: the number of tokens of its prompt and of the longest output of each
            choice.
        footprint: the approximate number of bytes that it takes.
        options: how its results are delivered.
        texts: the text streams of the choices, or None for each if no text is wanted.
        replies: the reply parsers of the choices; empty if the replies are plain text.
        stop_strings, include_stop, max_reasoning_tokens: as requested.
        lives_by: what it needs in order not to be cancelled.
        labels: the caller's labels.
        digest: the hash of its call's content. A repeated call gets the same request. Empty if the
            call cannot be retried.
    """

    account: Account
    request_id: str
    request: GenerationRequest
    reserved_tokens: int
    footprint: Footprint
    options: DeliveryOptions
    texts: list[TextStream | None]
    replies: list[ReplyText]
    stop_strings: tuple[str, ...]
    include_stop: bool
    max_reasoning_tokens: int | None
    lives_by: LivesBy
    labels: Mapping[str, str]
    digest: bytes
