"""What following the forms of outputs may cost a step, and a request.

Masks, and the steps of the matchers behind them, are computed on the engine's thread: whoever is in
the step waits for them. An ordinary form costs a tenth of a millisecond a token. An ambiguous
grammar may cost a hundred times that, and one request may have 16 choices. So:

    before a step   choices whose last tokens were costly share STEP_S; those for which nothing is
                    left wait for a later step, with all that they have. Who costs least for
                    each step that it has waited goes first (`choose_resting`).
    after a token   what a request's tokens cost beyond TOKEN_S each adds up. Above BURST_S it ends:
                    it would slow all others as long as it lives (`charge`).

A mask that is being computed cannot be interrupted; the limits that a grammar is compiled with
bound each. Costs are processor time of the engine's thread, so that a machine that is busy, or a
pause of the interpreter, ends nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import Request
from engine.types import RequestKey

STEP_S = 0.005
"""What the costly choices of one step may cost together, in seconds, as far as it is known."""
CHEAP_S = 0.0005
"""A choice whose tokens cost no more is in every step."""
TOKEN_S = 0.002
"""What a token may cost for as long as one likes."""
BURST_S = 0.2
"""What a request's tokens may cost beyond that, of all its choices together."""
TOO_SLOW = (
    f"takes too long to follow: for too long its tokens have cost more than {TOKEN_S * 1e3:g} ms "
    "each; make it smaller or less ambiguous: give each text one way to be read, and repeat "
    "terminals of several characters rather than of one; or ask for fewer choices"
)
"""What is told to a request that ends on that account."""


def begin(request: Request) -> None:
    """Take in a choice that has got its matcher."""
    if request.matcher is not None:
        request.form_cost_s = request.matcher.expected_s


def choose_resting(running: Iterable[Request]) -> frozenset[RequestKey]:
    """The running choices whose turn the next step is not. If there are any, others of the costly
    ones are in it.
    """
    costly = [request for request in running if request.form_cost_s > CHEAP_S]
    if not costly:
        return frozenset()
    costly.sort(key=lambda request: request.form_cost_s / (1 + request.form_waits))
    left, resting = STEP_S, set()
    for index, request in enumerate(costly):
        if index > 0 and request.form_cost_s > left:
            request.form_waits += 1
            resting.add(request.key)
        else:
            request.form_waits = 0
            left -= request.form_cost_s
    return frozenset(resting)


def charge(request: Request, siblings: Iterable[Request]) -> bool:
    """Count what a choice's last token has cost.

    Args:
        request: a choice that went on with a token.
        siblings: the choices of its request that live, itself among them.

    Returns:
        Whether the request may go on; True where it has no form.
    """
    matcher = request.matcher
    if matcher is None:
        return True
    cost = matcher.spent_s - request.form_spent_s
    request.form_spent_s += cost
    known = request.form_cost_s or cost
    request.form_cost_s = (known + cost) / 2  # a single slow mask is no rule
    request.form_debt_s = max(0.0, request.form_debt_s + cost - TOKEN_S)
    if request.form_debt_s == 0:
        return True
    return sum(sibling.form_debt_s for sibling in siblings) <= BURST_S
