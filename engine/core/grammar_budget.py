"""Limits what structured output may cost a step, and a request.

Masks and matcher updates are computed on the engine's thread, so all requests in the step wait for
them. An ordinary grammar costs a tenth of a millisecond per token. An ambiguous one may cost a
hundred times that, and one request may have 16 choices. So:

    before a step   choices whose last tokens were costly share STEP_S; those for which nothing is
                    left wait for a later step, with all that they have. Who costs least for
                    each step that it has waited goes first (`choose_resting`).
    after a token   what a request's tokens cost beyond TOKEN_S each adds up. Above BURST_S it ends:
                    it would slow all others as long as it lives (`charge`).

The computation of a mask cannot be interrupted; limits set when the grammar is compiled bound its
cost. Costs are CPU time of the engine's thread, so that a busy machine or a pause of the
interpreter ends no request.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.request import Request
from engine.contract.types import RequestKey

STEP_S = 0.005
"""The expected cost, in seconds, that the costly choices of one step may have together."""
CHEAP_S = 0.0005
"""Choices whose tokens cost at most this many seconds are in every step."""
TOKEN_S = 0.002
"""What each token may cost, in seconds, without any limit on the number of tokens."""
BURST_S = 0.2
"""What the tokens of all of a request's choices may cost beyond that, in seconds."""
TOO_SLOW = (
    f"takes too long to follow: for too long its tokens have cost more than {TOKEN_S * 1e3:g} ms "
    "each; make it smaller or less ambiguous: give each text one way to be read, and repeat "
    "terminals of several characters rather than of one; or ask for fewer choices"
)
"""The error message of a request that ends for this reason."""


def begin(request: Request) -> None:
    """Add a choice that has its matcher."""
    if request.matcher is not None:
        request.grammar_cost_s = request.matcher.expected_s


def release(request: Request) -> None:
    """Take the matcher from a choice that needs it no longer, so that it costs nothing more."""
    if request.matcher is not None and request.matcher.is_free:
        request.matcher = None
        request.sampling_steps = None  # they were those of a choice with a matcher
        request.grammar_cost_s = 0.0


def choose_resting(running: Iterable[Request]) -> frozenset[RequestKey]:
    """The running choices that the next step leaves out. If there are any, the step has other
    costly choices in it.
    """
    costly = [request for request in running if request.grammar_cost_s > CHEAP_S]
    if not costly:
        return frozenset()
    costly.sort(key=lambda request: request.grammar_cost_s / (1 + request.grammar_waits))
    left, resting = STEP_S, set()
    for index, request in enumerate(costly):
        if index > 0 and request.grammar_cost_s > left:
            request.grammar_waits += 1
            resting.add(request.key)
        else:
            request.grammar_waits = 0
            left -= request.grammar_cost_s
    return frozenset(resting)


def charge(request: Request, siblings: Iterable[Request]) -> bool:
    """Add the cost of a choice's last token.

    Args:
        request: a choice that was just given a token.
        siblings: the live choices of its request, itself included.

    Returns:
        Whether the request may go on; True if it has no grammar.
    """
    matcher = request.matcher
    if matcher is None:
        return True
    cost = matcher.spent_s - request.grammar_spent_s
    request.grammar_spent_s += cost
    known = request.grammar_cost_s or cost
    request.grammar_cost_s = (known + cost) / 2  # a single slow mask says little
    request.grammar_debt_s = max(0.0, request.grammar_debt_s + cost - TOKEN_S)
    if request.grammar_debt_s == 0:
        return True
    return sum(sibling.grammar_debt_s for sibling in siblings) <= BURST_S
