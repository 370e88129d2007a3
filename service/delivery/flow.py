"""Flow control: limits the unread output of a request.

    untaken tokens ── at the bound ──────▶ the engine holds the request
                   ── half of it taken ──▶ it continues
    nothing taken for max_hold ──────────▶ the request ends: RESULTS_NOT_READ

A request may have a limited number of output tokens that its stream has not taken. Up to the limit
they are merged, and generation continues. At the limit the request is held (or ended immediately,
if the policy says so). A token counts as taken when the writer takes it. The writer stops while
gRPC's flow control blocks it, and for a request that is out of credit.

A request is also held, regardless of its untaken tokens, while the unread results of all callers
leave no room (`admission.has_room`).

Requests whose output is kept in any case are never held: those of AddRequest, and those that are
delivered in one delta at their end. `WholeLimits` bounds their length before they start. They end
if the results of others leave no room. A leased request that has lost its stream is held like any
other. While it has no stream, the lease's end applies instead of max_hold, and GetResult reads
instead of the stream.

If a request has ended and its stream is out of credit for it, the rest is sent without credit after
max_hold.

This module has the limits; `ServedRequest` applies them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from service.delivery.events import DeliveryOptions
from service.delivery.submission import LivesBy
from service.errors.call_errors import FieldError

EVENTS_BYTES = 16 << 10
"""The approximate size of a result without its tokens: its acceptance, and the ends of its choices.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    """How much output of a request may be unread, and what happens beyond that.

    Attributes:
        max_unread_tokens, max_unread_bytes: the limits for all choices together. The first one
            reached applies. Bytes are estimated from the details that the request asks for.
        ends: whether a request at the limit ends instead of being held.
        max_hold_s: how long a request may be held while its stream takes nothing.
    """

    max_unread_tokens: int
    max_unread_bytes: int
    ends: bool
    max_hold_s: float

    def bounds(self, delivery: DeliveryOptions, n: int, *, is_kept: bool) -> tuple[int, int]:
        """Return the number of untaken tokens at which a request of n choices is held, and the
        number at which it continues. `is_kept`: whether it came from AddRequest.
        """
        if is_kept or delivery.final:
            return sys.maxsize, 0
        limit = min(
            self.max_unread_tokens, max(1, self.max_unread_bytes // delivery.bytes_per_token)
        )
        # Tokens that wait because of its own min_tokens_per_delta do not count as unread.
        held_back = n * (delivery.min_tokens_per_delta - 1)
        return limit + held_back, limit // 2 + held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLimit:
    """The maximum output length, over all choices, of a request whose whole result must fit in
    memory.

    Attributes:
        tokens: the most tokens.
        option: the name of the limit in bytes that `tokens` is derived from.
        bytes, bytes_per_token: the value of that limit, and how many bytes of it each token
        takes.
    """

    tokens: int
    option: str
    bytes: int
    bytes_per_token: int

    def fitting(self, output_tokens: int, n: int, *, is_given: bool) -> int:
        """Return how many of the output tokens of each of n choices fit. `is_given`: whether the
        caller has asked for this number.

        Raises:
            FieldError: fewer fit than the caller has asked for, or none.
        """
        fit = self.tokens // n
        if output_tokens <= fit or (fit and not is_given):
            return min(output_tokens, fit)
        size = self.bytes_per_token * n * output_tokens
        raise FieldError(
            "stop.max_tokens",
            f"comes to {output_tokens} tokens for each of {n} choices, whose whole result takes "
            f"about {size} bytes; it may take {self.bytes} here ({self.option}), enough for {fit}: "
            "ask for that many, for fewer choices or candidates, or for a stream (GenerateStream, "
            "a session) of deltas",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLimits:
    """The limits on a result that is kept, or sent in one message, in bytes; see the module.

    Attributes:
        max_undelivered_bytes, max_kept_bytes: the limits of unread and of kept results in memory.
            The first may be None for no limit.
        max_send_bytes: the limit of a message.
    """

    max_undelivered_bytes: int | None
    max_kept_bytes: int
    max_send_bytes: int

    def limit(self, delivery: DeliveryOptions, lives_by: LivesBy) -> WholeLimit | None:
        """Return the limit for a request, or None if its output is read as it is generated."""
        held, sent = delivery.unread_per_token, delivery.sent_per_token
        limits = []
        if self.max_undelivered_bytes is not None:
            limits.append(("max_undelivered_bytes", self.max_undelivered_bytes, held))
        if lives_by is LivesBy.ITSELF:
            limits.append(("max_kept_bytes", self.max_kept_bytes, held))
        elif lives_by is LivesBy.CALLS:
            limits.append(("max_send_bytes", self.max_send_bytes, sent))
        elif not delivery.final:
            return None
        found = [
            WholeLimit(
                tokens=max(most - EVENTS_BYTES, 0) // each,
                option=option,
                bytes=most,
                bytes_per_token=each,
            )
            for option, most, each in limits
        ]
        return min(found, key=lambda limit: limit.tokens, default=None)
