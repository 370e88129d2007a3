"""Estimates what a step costs, from measured steps.

    seconds = step + prefill·[there are prompt tokens] + prompt token·n + attended pair·p
              + decoding request·d + attended token·k

A step has n prompt tokens, which attend to p tokens in all (each to itself and those before it),
and d decoding requests, which attend to k tokens. So a late chunk of a long prompt costs more than
its first one. No coefficient is below zero.

The most recent steps with and without prompt tokens are remembered separately, so the cost of
prompts is not forgotten during long stretches of decoding. Newer steps weigh more. The fit uses
relative errors, and errors above a tenth count linearly instead of squared. So one step that was
delayed by something else hardly changes the estimate, while a lasting change is learned within a
handful of steps.

If the steps were too similar to tell two costs apart, the measured time is divided between these
costs. The estimate is then right only for similar steps, so callers should increase the size of
steps gradually from `most_measured`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_REMEMBERED = 32
"""How many steps of each kind are remembered."""
_FADING = 0.9
"""The weight of a step relative to the next one of its kind."""
_RECENT = 8
"""How many steps with prompt tokens count for `most_measured`."""
_TOLERANCE = 0.1
"""Errors (of the logarithm) above this count linearly instead of squared."""
_KEPT = 8
"""For how many steps a fit is reused if it agrees with them, because fitting takes time."""
_PASSES = 3
"""How often a fit recomputes its weights."""
_SHARING = 1e-4
"""How strongly the measured time is divided between costs that cannot be told apart."""
_NUM_COSTS = 6
_Numbers = npt.NDArray[np.float64]


class StepShape(NamedTuple):
    """What the cost of a step depends on.

    Attributes:
        num_prompt_tokens: the tokens of requests with more than one token in the step.
        prompt_pairs: the sum of how many tokens each of these attends to, including itself.
        num_decodes: the number of requests with one token in the step.
        decode_context: the sum of how many tokens these attend to.
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
        """The cost of prompt tokens from a given position on, without the fixed costs of a step."""
        return self.prompt_token * num_tokens + self.prompt_pair * pairs(start, num_tokens)

    def of_step(self, shape: StepShape) -> float:
        """The cost of a whole step."""
        return (
            self.step
            + (self.prefill if shape.num_prompt_tokens else 0.0)
            + self.prompt_token * shape.num_prompt_tokens
            + self.prompt_pair * shape.prompt_pairs
            + self.decode * shape.num_decodes
            + self.decode_token * shape.decode_context
        )

    def most_tokens(self, start: int, seconds: float) -> float:
        """Return how many prompt tokens from a position on fit into the given seconds, by the cost
        that `of_chunk` gives. Infinite if they cost nothing.
        """
        if seconds <= 0:
            return 0.0
        half = self.prompt_pair / 2
        linear = self.prompt_token + self.prompt_pair * (start + 0.5)
        # The larger root of half·n² + linear·n = seconds, in the numerically stable form.
        below = linear + math.sqrt(linear * linear + 4 * half * seconds)
        return 2 * seconds / below if below > 0 else math.inf


def pairs(start: int, num_tokens: int) -> int:
    """Return how many tokens the tokens from `start` on attend to in all, each to itself and those
    before it.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepCost:
    """The remembered steps, and the estimate from them."""

    def __init__(self) -> None:
        self._prefills: deque[tuple[StepShape, float]] = deque(maxlen=_REMEMBERED)
        self._decodes: deque[tuple[StepShape, float]] = deque(maxlen=_REMEMBERED)
        self._costs: StepCosts | None = None  # to be fitted anew
        self._num_new = 0  # steps since the last fit

    def add(self, shape: StepShape, seconds: float) -> None:
        """Remember a step. It is ignored if a coarse clock measures no time for it."""
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
        """The most prompt tokens in any of the last few steps that had some, or 0 if none had."""
        last = list(self._prefills)[-_RECENT:]
        return max((shape.num_prompt_tokens for shape, _ in last), default=0)

    def costs(self) -> StepCosts | None:
        """Return the costs that best fit the remembered steps, or None if no step had prompt
        tokens.
        """
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
        # The first pass weighs errors by the measured times, so that long steps do not count more;
        # later passes by the estimates of the pass before.
        weight = fading / measured_s**2
        costs = _least_squares(features, measured_s, weight)
        for _ in range(_PASSES):
            estimate = np.maximum(features @ costs, 1e-12)
            ratio = measured_s / estimate
            ratio[np.abs(ratio - 1) < 1e-6] = 1 + 1e-6
            # With this weight, a squared error acts like the bounded error of the logarithm.
            pull = np.minimum(np.abs(np.log(ratio)), _TOLERANCE) / np.abs(ratio - 1)
            weight = fading * pull / estimate**2
            costs = _least_squares(features, measured_s, weight)
        return StepCosts(*costs.tolist())


def _least_squares(features: _Numbers, seconds: _Numbers, weight: _Numbers) -> _Numbers:
    """Return the non-negative coefficients with the least weighted sum of squared errors.

    Negative coefficients are set to zero, lowest first, until none are left.
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
