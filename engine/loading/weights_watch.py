"""Notices that a model's weights have changed: what a KV cache holds was computed with the old
ones.

torch counts how often a tensor was written in place: an optimizer's step, `load_state_dict`, and
`copy_` under `no_grad` count. What is written through `tensor.data` is not counted.
"""

from __future__ import annotations

import weakref

import torch


class WeightsWatch:
    """Watches the parameters of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember the parameters as they are now."""
        self._model = model
        # An address would not do instead of a reference: a new tensor may get a freed one's.
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.changed()

    def changed(self) -> bool:
        """Whether a parameter was written in place or replaced since the last call, or since this
        was made.
        """
        before, parameters = self._seen, list(self._model.parameters())
        self._seen = [(weakref.ref(one), _writes(one)) for one in parameters]
        return len(before) != len(parameters) or any(
            seen() is not one or writes != _writes(one)
            for (seen, writes), one in zip(before, parameters, strict=True)
        )


def _writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; 0 for those that do not count."""
    return 0 if tensor.is_inference() else tensor._version
