"""The model's own eager forward and attention, the reference for the load gate.

    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(…, eager_attention_forward)

A forward in transformers passes the `eager_attention_forward` of its own file to the interface. A
user-defined class may inherit its forward, or override it and call the inherited one. In that case,
the function is found in the file of one of its base classes. An overridden forward may also pass a
different function. The logits that the gate computes with the function it found are therefore
compared with those of the model's own eager forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.contract.errors import ModelRefusedError
from engine.contract.types import TokenId

_NAME = "eager_attention_forward"
_LIBRARY = "transformers."


def eager_attention(layer: nn.Module) -> Callable[..., Any]:
    """Return the eager attention function that a layer uses.

    It is defined in the file of the forward of the layer's class, or of the first of its base
    classes whose file has one.

    Raises:
        ModelRefusedError: there is none.
    """
    for cls in type(layer).__mro__:
        forward = inspect.unwrap(vars(cls).get("forward", nn.Module.forward))
        function: Callable[..., Any] | None = forward.__globals__.get(_NAME)
        if function is not None:
            return function
    raise ModelRefusedError(
        f"{type(layer).__name__} has no eager attention to compare with, so it cannot be "
        f"verified; name that attention {_NAME} in the file of its forward"
    )


def is_users_own(layer: nn.Module) -> bool:
    """Return whether a layer's forward is defined outside transformers."""
    return not inspect.unwrap(type(layer).forward).__module__.startswith(_LIBRARY)


def eager_forward(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    """Run a forward pass of a prompt without a cache. `ids` is [1, T].

    The result's `logits` are those of the last token.

    Raises:
        ModelRefusedError: the model fails.
    """
    try:
        with torch.inference_mode():
            # A tensor, as in every step: some models compute fewer tokens if it is an int.
            rows = torch.tensor([ids.shape[1] - 1], device=ids.device)
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            # As `generate` does: some models count otherwise if they are not told.
            told = "position_ids" in inspect.signature(model.forward).parameters
            named = {"position_ids": positions} if told else {}
            return model(input_ids=ids, use_cache=False, logits_to_keep=rows, **named)
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelRefusedError(
            f"{type(model).__name__} fails on a prompt of {ids.shape[1]} tokens, "
            f"which every model must be able to process: {error}"
        ) from error


def check_users_own(
    model: PreTrainedModel,
    classes: set[str],
    found: Iterable[tuple[tuple[TokenId, ...], torch.Tensor]],
) -> None:
    """Check that user-defined attention classes use the functions that `eager_attention` found.

    If they do, the model's own eager forward gives the same logits, bit for bit. The model is left
    with eager attention.

    Args:
        model: the model.
        classes: the names of these classes.
        found: prompts, and the logits [V] after each one, computed with these functions.

    Raises:
        ModelRefusedError: the model's own eager forward gives different logits.
    """
    model.set_attn_implementation("eager")
    for prompt, expected in found:
        ids = torch.tensor([prompt], device=model.device)
        if not torch.equal(eager_forward(model, ids).logits[0, -1].float(), expected):
            raise ModelRefusedError(
                f"{', '.join(sorted(classes))} computes with another attention than the "
                "eager_attention_forward that was found for it; give its own that name, in the "
                "file of its forward, so that ours can be compared with it"
            )
