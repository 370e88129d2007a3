"""A request as the servicers hand it to the registry."""

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
        account, request_id: whom it is charged to and who owns it, and its id there.
        request: the request for the engine, with a name from `Registry.new_name`.
        reserved_tokens: the tokens of its prompt and of the longest output of each choice.
        footprint: about how many bytes it holds.
        options: how its results are delivered.
        texts: makes the text of each choice; None: no text is wanted.
        replies: takes the reply of each choice apart; empty: replies are text.
        stop_strings, include_stop, max_reasoning_tokens: as requested.
        lives_by: what it needs in order not to be cancelled.
        labels: as the caller gave them.
        digest: the hash of its call's content; the same call again gets the same request. Empty: it
            cannot be retried.
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
