"""Flow control: what becomes of a request whose output is not read.

    untaken tokens ── at the bound ──────▶ the engine holds the request
                   ── half of it taken ──▶ it goes on
    nothing taken for max_hold ──────────▶ the request ends: RESULTS_NOT_READ

A request may have so many tokens of output that its stream has not taken: until then they merge,
and generation goes on. At the bound it is held (or ended at once, where the policy says so). What
counts is the writer's progress: it stands still while gRPC's flow control blocks it, and for a
request that is out of credit.

Not held are requests whose output is to be kept whatever their readers do: those of AddRequest, and
those that are delivered in one piece at their end. Their own length bounds them. A request whose
stream is lost, on a lease, is held as any other; while it has no stream, it waits for the lease's
end instead of max_hold, and GetResult reads in the stream's place.

A request that has ended, but whose stream is out of credit for it, is not kept waiting for ever
either: after max_hold the rest is sent without credit.

Here is how much that is; `request.ServedRequest` does it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from service.delivery.events import DeliveryOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    """How much of a request may be unread, and what then.

    Attributes:
        max_unread_tokens, max_unread_bytes: the bound, of all choices together; whichever comes
            first. Bytes are estimated from what the request wants to be told of a token.
        ends: whether a request ends when it reaches the bound, instead of being held.
        max_hold_s: how long a request may be held while its stream takes nothing.
    """

    max_unread_tokens: int
    max_unread_bytes: int
    ends: bool
    max_hold_s: float

    def bounds(self, delivery: DeliveryOptions, n: int, *, is_kept: bool) -> tuple[int, int]:
        """With how many untaken tokens a request of n choices is held, and with how many it goes on
        again. `is_kept`: it came by AddRequest.
        """
        if is_kept or delivery.final:
            return sys.maxsize, 0
        limit = min(
            self.max_unread_tokens, max(1, self.max_unread_bytes // delivery.bytes_per_token)
        )
        # What its own min_tokens_per_delta holds back is not unread.
        held_back = n * (delivery.min_tokens_per_delta - 1)
        return limit + held_back, limit // 2 + held_back
