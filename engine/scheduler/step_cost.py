"""What a step costs, learned from the steps that were measured.

    seconds = step + prefill·[there are prompt tokens] + prompt token·n + attended pair·p
              + decoding request·d + attended token·k

Of a step, n prompt tokens attend to p tokens in all, each to those before it and itself; d requests
decode, and attend to k tokens. A deep chunk of a long prompt therefore costs more than its first
one. No coefficient is below zero.

The last steps of each kind, with prompt tokens and without, are remembered: however long nothing
but decoding goes on, what prompts cost is not forgotten. Newer ones weigh more. What counts is how
many times a step's estimate is off, and from a tenth on it counts no more than in proportion: one
step that was delayed by something else hardly moves the estimate, and of a change that stays it
takes a handful of steps to be believed.

Where the steps do not tell two costs apart, since they were all alike, the costs share what was
measured. The estimate is then right for steps like those, and only for those: whoever asks for
larger ones grows by `most_measured`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_REMEMBERED = 32
"""Steps of each kind."""
_FADING = 0.9
"""What a step weighs beside the one of its kind that came behind it."""
_RECENT = 8
"""Steps with prompt tokens whose sizes count for `most_measured`."""
_TOLERANCE = 0.1
"""An estimate that is off by more (as a logarithm) counts in proportion, no more as its square."""
_KEPT = 8
"""For so many steps a fit is kept, if none of them says that it is off: it takes a while."""
_PASSES = 3
"""How often the weights are made anew for a fit."""
_SHARING = 1e-4
"""How strongly costs that the steps do not tell apart are drawn to share what was measured."""
_NUM_COSTS = 6
_Numbers = npt.NDArray[np.float64]


class StepShape(NamedTuple):
    """What the cost of a step depends on.

    Attributes:
        num_prompt_tokens: tokens in parts of more than one.
        prompt_pairs: how many tokens each of them attends to, itself included, summed.
        num_decodes: parts of one token.
        decode_context: how many tokens these attend to, summed.
    """

    num_prompt_tokens: int
    prompt_pairs: int
    num_decodes: int
    decode_context: int


class StepCosts(NamedTuple):
    """The coefficients, in seconds; see the module."""

    step: float
    prefill: float
    prompt_token: float
    prompt_pair: float
    decode: float
    decode_token: float

    def of_chunk(self, start: int, num_tokens: int) -> float:
        """Of prompt tokens from a position on, without what the step costs anyway."""
        return self.prompt_token * num_tokens + self.prompt_pair * pairs(start, num_tokens)

    def of_step(self, shape: StepShape) -> float:
        """Of a whole step."""
        return (
            self.step
            + (self.prefill if shape.num_prompt_tokens else 0.0)
            + self.prompt_token * shape.num_prompt_tokens
            + self.prompt_pair * shape.prompt_pairs
            + self.decode * shape.num_decodes
            + self.decode_token * shape.decode_context
        )

    def most_tokens(self, start: int, seconds: float) -> float:
        """How many prompt tokens from a position on `of_chunk` lets in these seconds; infinite
        where they cost nothing.
        """
        if seconds <= 0:
            return 0.0
        half = self.prompt_pair / 2
        linear = self.prompt_token + self.prompt_pair * (start + 0.5)
        # The larger root of half·n² + linear·n = seconds, in the form that loses no digits.
        below = linear + math.sqrt(linear * linear + 4 * half * seconds)
        return 2 * seconds / below if below > 0 else math.inf


def pairs(start: int, num_tokens: int) -> int:
    """To how many tokens those from `start` on attend, each to those before it and itself."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepCost:
    """The steps that are remembered, and what follows from them."""

    def __init__(self) -> None:
        self._prefills: deque[tuple[StepShape, float]] = deque(maxlen=_REMEMBERED)
        self._decodes: deque[tuple[StepShape, float]] = deque(maxlen=_REMEMBERED)
        self._costs: StepCosts | None = None  # to be fitted anew
        self._num_new = 0  # since they were fitted

    def add(self, shape: StepShape, seconds: float) -> None:
        """Remember a step. One that took no time, by a coarse clock, says nothing."""
        if seconds <= 0:
            return
        kind = self._prefills if shape.num_prompt_tokens else self._decodes
        kind.append((shape, seconds))
        self._num_new += 1
        if self._costs is not None and (
            self._num_new >= _KEPT
            or abs(math.log(seconds / max(self._costs.of_step(shape), 1e-12))) > _TOLERANCE
        ):
            self._costs = None

    @property
    def most_measured(self) -> int:
        """The most prompt tokens of a step among the last few that had any; 0: none had."""
        last = list(self._prefills)[-_RECENT:]
        return max((shape.num_prompt_tokens for shape, _ in last), default=0)

    def costs(self) -> StepCosts | None:
        """What fits the steps that are remembered; None: there is none with prompt tokens."""
        if self._costs is None and self._prefills:
            self._costs, self._num_new = self._fit(), 0
        return self._costs

    def _fit(self) -> StepCosts:
        rows, seconds, weights = [], [], []
        for kind in (self._prefills, self._decodes):
            for age, (shape, measured) in enumerate(reversed(kind)):
                rows.append((1, shape.num_prompt_tokens > 0, *shape))
                seconds.append(measured)
                weights.append(_FADING**age)
        features = np.array(rows, dtype=np.float64)
        measured_s, fading = np.array(seconds), np.array(weights)
        # The first pass weighs steps as if what was measured were right, so that none counts for
        # being long; the others by what the pass before made of them.
        weight = fading / measured_s**2
        costs = _least_squares(features, measured_s, weight)
        for _ in range(_PASSES):
            estimate = np.maximum(features @ costs, 1e-12)
            ratio = measured_s / estimate
            ratio[np.abs(ratio - 1) < 1e-6] = 1 + 1e-6
            # The square of an error that is weighted by this pulls as its logarithm does, bounded.
            pull = np.minimum(np.abs(np.log(ratio)), _TOLERANCE) / np.abs(ratio - 1)
            weight = fading * pull / estimate**2
            costs = _least_squares(features, measured_s, weight)
        return StepCosts(*costs.tolist())


def _least_squares(features: _Numbers, seconds: _Numbers, weight: _Numbers) -> _Numbers:
    """The coefficients, none below zero, with the least weighted squares of errors.

    What comes out negative is set to zero, the worst first, until nothing does.
    """
    scale = np.sqrt((weight[:, None] * features**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = features / scale
    weighted = scaled * weight[:, None]
    matrix = weighted.T @ scaled + _SHARING * np.eye(_NUM_COSTS)
    right = weighted.T @ seconds
    kept = np.arange(_NUM_COSTS)
    while True:
        found = np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept])
        worst = int(found.argmin())
        if found[worst] >= 0 or len(kept) == 1:
            break
        kept = np.delete(kept, worst)
    costs = np.zeros(_NUM_COSTS)
    costs[kept] = np.maximum(found, 0.0) / scale[kept]
    return costs
