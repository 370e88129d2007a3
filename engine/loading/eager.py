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
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.contract.errors import ModelRefusedError
from engine.contract.types import TokenId
from engine.models.recording import Observation

_NAME = "eager_attention_forward"
_LIBRARY = "transformers."


class ForwardFailedError(ModelRefusedError):
    """The model's own code fails on a prompt."""


def eager_attention(layer: nn.Module) -> Callable[..., Any]:
    """Return the eager attention function that a layer uses.

    It is defined in the file of the forward of the layer's class, or of the first of its base
    classes for which its forward's file, or its own, has one.

    Raises:
        ModelRefusedError: there is none.
    """
    for cls in type(layer).__mro__:
        forward = inspect.unwrap(vars(cls).get("forward", nn.Module.forward))
        for names in (forward.__globals__, vars(sys.modules[cls.__module__])):
            function: Callable[..., Any] | None = names.get(_NAME)
            if function is not None:
                return function
    raise ModelRefusedError(
        f"{type(layer).__name__} has no eager attention to compare with, so it cannot be "
        f"verified; name that attention {_NAME} in the file of its forward"
    )


def is_users_own(layer: nn.Module) -> bool:
    """Return whether a layer's forward is defined outside transformers."""
    return not inspect.unwrap(type(layer).forward).__module__.startswith(_LIBRARY)


def eager_forward(
    model: PreTrainedModel, ids: torch.Tensor, *, keeps_all: bool = False, **cache: Any
) -> Any:
    """Run a forward pass of a prompt. `ids` is [1, T], and may be on meta. `cache` is the argument
    for an empty cache, if the model needs one.

    The result's `logits` are those of the last token, or of all with `keeps_all`.

    Raises:
        ModelRefusedError: the model fails.
    """
    named: dict[str, Any] = dict(cache)
    if ids.is_meta and not cache:
        # With a mask or a cache given, nothing looks for the ends of packed prompts in positions.
        named["attention_mask"] = torch.ones_like(ids)
    # As `generate` does: some models count otherwise if they are not told.
    elif "position_ids" in inspect.signature(model.forward).parameters:
        named["position_ids"] = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    if not keeps_all:
        # A tensor, as in every step: some models compute fewer tokens if it is an int.
        named["logits_to_keep"] = torch.tensor([ids.shape[1] - 1], device=ids.device)
    try:
        with torch.no_grad() if ids.is_meta else torch.inference_mode():
            return model(input_ids=ids, use_cache=False, **named)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ForwardFailedError(
            f"{type(model).__name__} fails on a prompt of {ids.shape[1]} tokens, "
            f"which every model must be able to process: {error}"
        ) from error


def eager_logits(
    model: PreTrainedModel, prompts: Iterable[Sequence[TokenId]]
) -> tuple[torch.Tensor, ...]:
    """Return the logits after each prompt, [V] each, float32, by the model's own eager attention.

    The model is left with that.
    """
    model.set_attn_implementation("eager")
    ids = (torch.tensor([prompt], device=model.device) for prompt in prompts)
    return tuple(eager_forward(model, one).logits[0, -1].float() for one in ids)


def check_users_own(model: PreTrainedModel, classes: set[str], found: Observation) -> None:
    """Check that user-defined attention classes use the functions that `eager_attention` found.

    If they do, the model's own eager forward gives the same logits, bit for bit. The model is left
    with eager attention.

    Args:
        model: the model.
        classes: the names of these classes.
        found: the model, observed with these functions.

    Raises:
        ModelRefusedError: the model's own eager forward gives different logits.
    """
    if not all(map(torch.equal, eager_logits(model, found.prompts), found.logits)):
        raise ModelRefusedError(
            f"{', '.join(sorted(classes))} computes with another attention than the "
            "eager_attention_forward that was found for it; give its own that name, in the "
            "file of its forward, so that ours can be compared with it"
        )
