"""How likely drafts are to be kept, learned from those that were computed.

The draft at position j is judged only if all before it were kept. So what is learned is the rate at
each position among the drafts that were judged there; newer ones weigh more. A request's own rates
begin at those of all requests.
"""

from __future__ import annotations

MOST_DRAFTS = 31
"""The most drafts of a request in a step."""
_UNKNOWN = 0.5
"""The rate that is assumed before anything is known."""
_ASSUMED = 0.5
"""How many judged drafts an assumed rate weighs as much as."""


class Acceptance:
    """The rates by position, of one kind of guesses."""

    __slots__ = ("_decay", "_judged", "_kept", "_prior", "_rates")

    def __init__(self, decay: float, prior: Acceptance | None = None) -> None:
        """`decay`: how much a judged draft still weighs at the next one. `prior`: the rates to
        begin with.
        """
        self._decay = decay
        self._prior = prior
        self._judged: list[float] = []
        self._kept: list[float] = []
        self._rates: list[float] = []

    def judge(self, num_drafts: int, num_kept: int) -> None:
        """Record drafts of a step: all before the first wrong one were kept."""
        judged, kept, decay = self._judged, self._kept, self._decay
        count = min(num_drafts, num_kept + 1)
        if count > len(judged):  # what is assumed counts as part of a draft, and fades like one
            kept.extend(_ASSUMED * rate for rate in self.rates(count)[len(judged) : count])
            judged.extend([_ASSUMED] * (count - len(judged)))
        for position in range(count):
            judged[position] = decay * judged[position] + 1
            kept[position] = decay * kept[position] + (position < num_kept)
        self._rates.clear()

    def rates(self, most: int) -> list[float]:
        """Return the probability that the draft at each of the first positions is kept if those
        before it are; `most` or more of them.
        """
        if len(self._rates) < most:
            self._rates = self._estimate(most)
        return self._rates

    def _estimate(self, most: int) -> list[float]:
        begun = None if self._prior is None else self._prior.rates(most)
        rates = [kept / judged for kept, judged in zip(self._kept, self._judged, strict=True)]
        for position in range(len(rates), most):
            assumed = begun[position] if begun else _UNKNOWN
            # A position that was never reached is like the one before, too.
            rates.append((assumed + rates[-1]) / 2 if rates else assumed)
        return rates
