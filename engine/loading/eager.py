"""The model's own eager forward and attention, which the load gate compares ours with.

    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(…, eager_attention_forward)

A forward in transformers hands the function of that name in its own file to the interface. A class
of the user's own may inherit its forward, or write one that calls the inherited one: then the
function is found in the file of a class that it derives from. Its own forward may also hand over
another function. So the logits that the gate gets with the function that was found are then
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
    """The eager attention function that a layer uses: the one in the file of its class's forward,
    or of the first of its base classes whose file has one.

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
    """Whether a layer's forward is written outside transformers."""
    return not inspect.unwrap(type(layer).forward).__module__.startswith(_LIBRARY)


def eager_forward(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    """A prompt's forward pass without a cache: ids [1, T]. Its `logits` are those of the last
    token.

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
    """Check that attention classes of the user's own compute with the functions that
    `eager_attention` found: then the model's own eager forward gives the same logits, bit by bit.
    Leaves the model with eager attention.

    Args:
        model: the model.
        classes: the names of these classes.
        found: prompts, with the logits [V] after each that were computed with these functions.

    Raises:
        ModelRefusedError: it gives others.
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
