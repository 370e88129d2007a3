"""Limits what structured output may cost per step and per request.

Masks and matcher updates are computed on the engine's thread, so all requests in the step wait for
them. An ordinary grammar costs a tenth of a millisecond per token. An ambiguous one may cost a
hundred times that, and one request may have 16 choices. There are two limits:

    before a step   Choices whose last tokens were costly share STEP_S. Those that exceed it wait
                    for a later step and keep all their state. The choice with the lowest cost
                    relative to the steps it has waited goes first (`choose_resting`).
    after a token   The cost of each of a request's tokens beyond TOKEN_S adds up. Above BURST_S
                    the request ends, because it would slow down all others (`charge`).

The computation of a mask cannot be interrupted. Limits set when the grammar is compiled bound its
cost. Costs are CPU time of the engine's thread, so a busy machine or an interpreter pause never
ends a request.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.request import Request
from engine.contract.types import RequestKey

STEP_S = 0.005
"""The maximum total expected cost of the costly choices in one step, in seconds."""
CHEAP_S = 0.0005
"""The token cost, in seconds, up to which a choice takes part in every step."""
TOKEN_S = 0.002
"""The cost, in seconds, that every token may have without being counted."""
BURST_S = 0.2
"""The maximum total cost beyond TOKEN_S of all tokens of all of a request's choices, in seconds."""
TOO_SLOW = (
    f"takes too long to follow: for too long its tokens have cost more than {TOKEN_S * 1e3:g} ms "
    "each; make it smaller or less ambiguous: give each text one way to be read, and repeat "
    "terminals of several characters rather than of one; or ask for fewer choices"
)
"""The error message of a request that exceeds BURST_S."""


def begin(request: Request) -> None:
    """Set the initial token cost of a choice that has a matcher."""
    if request.matcher is not None:
        request.grammar_cost_s = request.matcher.expected_s


def release(request: Request) -> None:
    """Remove the matcher from a choice that no longer needs it, so that it costs nothing more."""
    if request.matcher is not None and request.matcher.is_free:
        request.matcher = None
        request.sampling_steps = None  # they were those of a choice with a matcher
        request.grammar_cost_s = 0.0


def choose_resting(running: Iterable[Request]) -> frozenset[RequestKey]:
    """Return the running choices that the next step leaves out. If there are any, the step contains
    other costly choices.
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
        request: a choice that has just received a token.
        siblings: the live choices of the same request, including this one.

    Returns:
        Whether the request may continue; True if it has no grammar.
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
