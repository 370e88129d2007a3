"""A request as the servicers hand it to the registry."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.request import GenerationRequest
from engine.text import TextStream
from service.accounts import Account
from service.delivery.events import DeliveryOptions
from service.footprint import Footprint

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class LivesBy(enum.Enum):
    """What a request needs, so that it is not cancelled before its end."""

    STREAM = "the stream that receives its results, or that stream's lease"
    CALLS = "a call that waits for its whole result (Generate), or a stream that attached to it"
    ITSELF = "nothing (AddRequest)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked request, ready for the engine.

    Attributes:
        account, request_id: for whom it counts and whose it is, and its name there.
        request: what the engine gets, under a name that `Registry.new_name` made.
        reserved_tokens: its prompt and the longest output of all its choices.
        footprint: about how many bytes it holds.
        options: how its results are delivered.
        texts: of each choice, where its text is made; None: none is wanted.
        stop_strings, include_stop: as asked for.
        lives_by: what keeps it from being cancelled.
        labels: as the caller gave them.
        digest: of what its call has said; the same call again gets the same request. Empty: it is
            not to be had again.
    """

    account: Account
    request_id: str
    request: GenerationRequest
    reserved_tokens: int
    footprint: Footprint
    options: DeliveryOptions
    texts: list[TextStream | None]
    stop_strings: tuple[str, ...]
    include_stop: bool
    lives_by: LivesBy
    labels: Mapping[str, str]
    digest: bytes
