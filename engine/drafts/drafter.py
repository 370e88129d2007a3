"""Decides which drafts a step computes.

    sources ──guesses──▶ chance of each draft (Acceptance) ─┐
    rows so far, measured ──▶ time of the step (RowCosts) ──┴─▶ how many drafts, of which requests

Drafts are added, likeliest first, as far as the expected tokens per second of the whole step rise.
A step takes at most 1.05 times as long as without drafts, unless all its requests are one caller's
and all have drafts; and no longer than the target step time because of drafts.

What is not known to pay is tried for a hundredth of the time: asking the sources costs time on the
host, and drafts that will hardly be kept cost rows. Both are taken from an allowance that each step
adds to. A request is asked as a matter of course only if what its drafts have saved so far is
clearly more than what asking costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.contract.request import Request
from engine.contract.types import RequestKey, TokenId
from engine.drafts.acceptance import MOST_DRAFTS, Acceptance
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.forced import Forced
from engine.drafts.own_text import OwnText
from engine.drafts.prediction import Prediction
from engine.drafts.row_costs import DecodeRows, RowCosts, RowTimes
from engine.drafts.suffix_index import SharedIndexes

SOURCES: dict[str, type[DraftSource]] = {one.name: one for one in (OwnText, Prediction, Forced)}
"""The sources by name."""
DEFAULT_DRAFTS = 15
"""The most drafts of a request in a step, if no option says."""

_LONGER = 1.05
"""How much longer drafts may make a step that others wait for, as a factor."""
_PAYS = 1.01
"""The least gain in tokens per second, as a factor, for which drafts are computed."""
_TRIED = 0.01
"""The fraction of the time that may be spent on what is not known to pay."""
_SAVED_STEPS = 2.0
"""The most that the allowance keeps, in steps."""
_CLEARLY = 2.0
"""How much more than asking costs, as a factor, a request must save to be asked always."""
_FORGETS = 0.05
"""How fast what a request's drafts have saved is forgotten."""
_ASKING_S = 1e-3
"""The least time for asking in a step, in seconds."""
_MASKS_S = 5e-4
"""How long a request's masks for its drafts may take in a step, in seconds, as far as is known."""
_LEARNED = 0.98, 0.9
"""How much a judged draft still weighs at the next one: of all requests, and of one."""


@dataclass(slots=True, eq=False)
class _State:
    """What is known of a request.

    Attributes:
        sources: where its guesses come from.
        rates: for each source, of each kind of guess.
        source, kind: whose guess its drafts are, and of which kind; -1: it has none.
        saved: how many drafts were kept each time it was asked, lately; at first, of all requests.
    """

    sources: list[DraftSource]
    rates: list[list[Acceptance]]
    saved: float
    source: int = -1
    kind: int = 0


@dataclass(slots=True)
class _Asked:
    """A request with a guess, while a step's drafts are chosen.

    Attributes:
        chances: the chance of each draft to be kept, falling.
        count: how many of them the step computes.
    """

    request: Request
    state: _State
    guess: Guess
    chances: list[float] = field(default_factory=list)
    count: int = 0


class Drafter:
    """Gives requests their drafts. Called on the engine's thread; counters are read on any.

    Attributes:
        num_drafted, num_kept: how many drafts were computed and kept, by source.
        drafted: the requests to which the last call of `draft` gave some.
    """

    def __init__(
        self,
        times: RowTimes,
        *,
        sources: Sequence[str],
        max_drafts: int = DEFAULT_DRAFTS,
        target_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a drafter.

        Args:
            times: what rows cost.
            sources: names of SOURCES.
            max_drafts: the most drafts of a request in a step, up to MOST_DRAFTS.
            target_s: the target step time in seconds; 0: none.
            clock: returns seconds, for the time that asking takes.
        """
        self.num_drafted = dict.fromkeys(sources, 0)
        self.num_kept = dict.fromkeys(sources, 0)
        self._costs = RowCosts(times)
        self._names = tuple(sources)
        self._max_drafts = min(max_drafts, MOST_DRAFTS)
        self._target_s = target_s
        self._clock = clock
        self._states: dict[RequestKey, _State] = {}
        self._indexes = SharedIndexes()
        self._rates = {
            name: [Acceptance(_LEARNED[0]) for _ in range(SOURCES[name].num_kinds)]
            for name in sources
        }
        self.drafted: dict[RequestKey, Request] = {}
        self._allowance_s = 0.0
        self._asking_s = 2e-5
        self._saved = 0.25
        self._first = 0  # of those that are asked from the allowance, so that all have their turn

    def draft(self, requests: Sequence[Request]) -> None:
        """Give requests their drafts, and take away those of the last call that were not tried.

        Args:
            requests: those of the next step, each with one token to compute, and no other step
                pending. Empty: no drafts are wanted.
        """
        for request in self.drafted.values():
            if request.drafts and (state := self._states.get(request.key)) is not None:
                self._forget(state, 0)  # they were not tried
            request.drafts = ()
        self.drafted.clear()
        if not requests:
            return
        context = sum([len(request.token_ids) for request in requests])
        seconds = self._costs.estimate(DecodeRows(len(requests), 0, context, 0))
        asked = self._ask(requests, seconds)
        if not asked:
            return
        self._choose(requests, asked, context, seconds)
        for one in asked:
            if one.count:
                one.request.drafts = tuple(map(TokenId, one.guess.tokens[: one.count]))
                self.drafted[one.request.key] = one.request
            else:
                one.state.source = -1
                self._forget(one.state, 0)

    def judge(self, request: Request, num_drafts: int, num_kept: int, *, is_over: bool) -> None:
        """Record what became of a request's drafts, and count those of its prediction.

        Args:
            request: may have ended.
            num_drafts: how many were computed.
            num_kept: how many of them were kept, from the first on.
            is_over: whether the request ended with them, so that the others were not judged.
        """
        state = self._states.get(request.key)
        if state is None or state.source < 0:
            return
        name = self._names[state.source]
        self.num_drafted[name] += num_drafts
        self.num_kept[name] += num_kept
        if name == Prediction.name:
            request.num_prediction_draft_tokens += num_drafts
            request.num_accepted_prediction_draft_tokens += num_kept
        judged = num_kept if is_over else num_drafts
        state.rates[state.source][state.kind].judge(judged, num_kept)
        self._rates[name][state.kind].judge(judged, num_kept)
        self._forget(state, num_kept)

    def measured(self, rows: DecodeRows, seconds: float) -> None:
        """Record how long a step took in which all requests decoded."""
        self._costs.learn(rows, seconds)
        most = _SAVED_STEPS * seconds
        self._allowance_s = min(self._allowance_s + _TRIED * seconds, most)

    def forget(self, key: RequestKey) -> None:
        """Drop what is known of a request. Does nothing if nothing is."""
        self._states.pop(key, None)
        self.drafted.pop(key, None)

    # ---- asking --------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[Request], seconds: float) -> list[_Asked]:
        """Ask the sources about the requests for which that pays or may be tried. `seconds`: how
        long the step takes without drafts.
        """
        worth = _CLEARLY * self._asking_s * len(requests) / seconds
        left = max((_LONGER - 1) * seconds, _ASKING_S)  # the turn of the others comes
        asked: list[_Asked] = []
        self._first += 1
        for index in range(len(requests)):
            request = requests[(index + self._first) % len(requests)]
            most = min(self._max_drafts, request.max_drafted_tokens - request.num_tokens - 1)
            if request.matcher is not None:
                most = min(most, int(_MASKS_S / max(request.grammar_cost_s, 1e-6)))
            if most < 1:
                continue
            state = self._states.get(request.key)
            is_known = (self._saved if state is None else state.saved) > worth
            if not is_known and self._allowance_s <= 0:
                continue
            begun = self._clock()
            state = state or self._begin(request)
            guess = self._guess(request, state, most)
            spent = self._clock() - begun
            left -= spent
            self._asking_s += _FORGETS * (min(spent, 1e-3) - self._asking_s)
            if not is_known:
                self._allowance_s -= spent
            if guess is None:
                self._forget(state, 0)
            else:
                asked.append(guess)
            if left <= 0:
                break
        return asked

    def _guess(self, request: Request, state: _State, most: int) -> _Asked | None:
        """Return the guess of the source from which most is expected."""
        best: _Asked | None = None
        most_expected = 0.0
        for index, source in enumerate(state.sources):
            guess = source.guess(request.token_ids, most)
            if guess is None:
                continue
            count = len(guess.tokens)
            if request.matcher is not None:
                count = request.matcher.num_fitting(guess.tokens)
            chance, chances = 1.0, []
            rates = state.rates[index][guess.kind].rates(count)
            for rate in rates[:count]:
                chance *= rate
                chances.append(chance)
            expected = sum(chances)
            if expected > most_expected:
                most_expected = expected
                best = _Asked(request, state, guess, chances)
                state.source, state.kind = index, guess.kind
        return best

    def _begin(self, request: Request) -> _State:
        """Create the state of a request that is asked for the first time."""
        sources: list[DraftSource] = []
        rates: list[list[Acceptance]] = []
        for name in self._names:
            source = SOURCES[name].begin(request, self._indexes)
            if source is not None:
                sources.append(source)
                rates.append([Acceptance(_LEARNED[1], prior) for prior in self._rates[name]])
        state = self._states[request.key] = _State(sources, rates, self._saved)
        return state

    def _forget(self, state: _State, num_kept: int) -> None:
        state.saved += _FORGETS * (num_kept - state.saved)
        self._saved += _FORGETS * (num_kept - self._saved)

    # ---- choosing ------------------------------------------------------------------------------

    def _choose(
        self, requests: Sequence[Request], asked: list[_Asked], context: int, seconds: float
    ) -> None:
        """Set how many drafts of each request the step computes."""
        count, costs = len(requests), self._costs
        is_alone = len({request.spec.caller for request in requests}) == 1
        likeliest = sorted(
            ((chance, one) for one in asked for chance in one.chances),
            key=lambda entry: -entry[0],
        )
        expected, draft_context, num_drafted = float(count), 0, 0
        best, best_rate = 0, _PAYS * count / seconds
        seen: set[RequestKey] = set()
        bound = _LONGER * seconds
        for number, (chance, one) in enumerate(likeliest, 1):
            expected += chance
            draft_context += one.request.num_tokens
            if one.request.key not in seen:
                seen.add(one.request.key)
                num_drafted += 1
            rows = DecodeRows(count, number, context, draft_context)
            time_s = costs.estimate(rows)
            may_last = is_alone and num_drafted == count
            if time_s > bound and not may_last:
                continue
            if self._target_s and time_s > max(self._target_s, bound):
                break
            if expected / time_s > best_rate:
                best, best_rate = number, expected / time_s
        for _, one in likeliest[:best]:
            one.count += 1
        if not best:
            self._try(requests, asked[0], context, seconds)

    def _try(self, requests: Sequence[Request], one: _Asked, context: int, seconds: float) -> None:
        """Compute a request's drafts although they are not expected to pay, if the allowance has
        the time for it: as many as make the step hardly longer, or one.
        """
        length, count = one.request.num_tokens, len(requests)
        for number in range(len(one.chances), 0, -1):
            rows = DecodeRows(count, number, context, number * length)
            more = self._costs.estimate(rows) - seconds
            if more <= (_LONGER - 1) * seconds or (number == 1 and count == 1):
                more = max(more, _TRIED * seconds)
                if more <= self._allowance_s:
                    self._allowance_s -= more
                    one.count = number
                return
