"""Finds out what a model's masks hide, from the masks' own rules.

A model creates its masks through transformers' mask interface, which receives a rule. This is a
function of (batch, head, query position, key position) that says whether the key is visible. The
mask itself covers only the few positions of the current prompt, but the rule covers any position.
So a window or chunk that is longer than the prompt is found without a computation of that length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import eager_mask

MaskRule = Callable[..., torch.Tensor]


class UnknownMaskError(ValueError):
    """A mask hides something other than the future and positions before a window."""


@dataclass(slots=True)
class MaskWatch:
    """Replaces transformers' eager mask function. It creates the same masks and keeps their rules.

    Attributes:
        context: the longest request that the model allows, in tokens. Rules are evaluated for
            positions below it.
    """

    context: int
    _made: dict[int, tuple[torch.Tensor, MaskRule]] = field(default_factory=dict)
    """Masks and their rules, by the mask's storage. Slices of a mask share its storage. On the meta
    device, storage has no address.
    """
    _windows: dict[int, int | None] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Record the rule that a layer requests, and create its mask as transformers does."""
        mask: torch.Tensor | None = eager_mask(*args, **kwargs)
        if mask is not None and "mask_function" in kwargs:
            storage = mask.untyped_storage()._cdata
            self._made[storage] = (mask, kwargs["mask_function"])
            self._windows.pop(storage, None)
        return mask

    def window(self, mask: torch.Tensor | None) -> int | None:
        """Return how many tokens a token attends to with this mask, including itself.

        Returns None if it attends to all tokens up to itself.

        Raises:
            UnknownMaskError: the mask was not created here, or its rule is neither causal nor
                causal with a window.
        """
        if mask is None:
            raise UnknownMaskError("attention has no mask, so tokens see those after them")
        storage = mask.untyped_storage()._cdata
        if storage not in self._made:
            raise UnknownMaskError(
                "the model makes or changes the attention mask itself, so what it hides in longer "
                "prompts is not known"
            )
        if storage not in self._windows:
            self._windows[storage] = _window_of(self._made[storage][1], self.context)
        return self._windows[storage]


def _window_of(rule: MaskRule, context: int) -> int | None:
    """Return the window of a causal rule; see `MaskWatch.window`."""
    last = context - 1
    visible = _ask(rule, last, context)
    first = int(visible.int().argmax())  # the first position that the last token attends to
    window = context - first
    # At the window's two ends, in the middle of the context, and at odd places.
    for query in {0, 1, window - 1, window, context // 3, context // 2, 3 * context // 4, last}:
        if query > last:
            continue
        expected = torch.zeros(context, dtype=torch.bool)
        expected[max(query - window + 1, 0) : query + 1] = True
        if not torch.equal(_ask(rule, query, context), expected):
            raise UnknownMaskError(
                f"the mask of the token at position {query} is neither causal nor a sliding window"
            )
    return None if first == 0 else window


def _ask(rule: MaskRule, query: int, context: int) -> torch.Tensor:
    """Return which keys at positions 0 … context − 1 a query attends to, as bool [context]."""
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
    keys = torch.arange(context).view(1, 1, 1, context)
    try:
        answer = rule(zero, zero, torch.full_like(zero, query), keys)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownMaskError(
            "the mask depends on more than positions, so what it hides in longer prompts is not "
            f"known ({error})"
        ) from error
    return answer.expand(1, 1, 1, context).reshape(context).bool().cpu()
