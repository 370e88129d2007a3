"""Checks whether a model does nothing between its decoder layers, so that one call may compute all
of them.

The model's own decoder is run, layer by layer, in a small step over a small paged cache. Each layer
must be called once, in order, with exactly the tensor that the layer before it returned and the
same embeddings, and without any operation in between. Then all layers in one call must give the
same values, bit for bit, and write the same into the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.base import AttentionContext
from engine.attention.registry import ATTENTION_NAME, CONTEXT_KEYWORD
from engine.runner.fused import PLAN
from engine.runner.fused_layer import LayerPlace, LayerPlan, LayerRun
from engine.runner.fusing_layers import small_context, small_step
from engine.runner.likeness import Operations, has_hooks


def chain_layers(model: PreTrainedModel) -> int:
    """Let one call compute all layers of a decoder, if nothing comes between them.

    Args:
        model: the forwards of its layers have already been replaced.

    Returns:
        how many layers are computed together with others.
    """
    chained = 0
    for decoder in model.modules():
        for children in decoder.children():
            layers = list(children) if isinstance(children, torch.nn.ModuleList) else []
            places = [vars(layer).get(PLAN) for layer in layers]
            found = [place for place in places if isinstance(place, LayerPlace)]
            if len(layers) < 2 or len(found) < len(layers) or any(map(has_hooks, layers)):
                continue
            if found[0].chain is None:
                _chain(model, decoder, layers, found)
            chained += sum(place.chain is not None for place in found)
    return chained


def _chain(
    model: PreTrainedModel,
    decoder: torch.nn.Module,
    layers: list[torch.nn.Module],
    places: list[LayerPlace],
) -> None:
    """Let the first layer compute all, if that is equivalent to the decoder."""
    plans = [place.alone.plans[0] for place in places]
    if len({plan.rotary_dim for plan in plans} - {0}) > 1:
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        watch = _Watch()
        with Operations() as operations, watch.of(layers, operations):
            expected, theirs = _run(decoder, plans)
        if watch.is_straight(layers):
            _tie(places, LayerRun(plans, places[0].alone.scratch, layers))
            actual, ours = _run(decoder, plans)
            if not (torch.equal(actual, expected) and _caches_equal(plans, theirs, ours)):
                _tie(places, None)
    except Exception:  # a decoder may raise anything for ids and a cache that it does not expect
        _tie(places, None)
    finally:
        model.set_attn_implementation(before)


def _tie(places: list[LayerPlace], chain: LayerRun | None) -> None:
    for place in places:
        place.chain = chain


def _run(decoder: torch.nn.Module, plans: list[LayerPlan]) -> tuple[torch.Tensor, AttentionContext]:
    """Run a decoder on a small step. Returns its output, and the step with its caches."""
    context, positions = small_context(plans), small_step().positions
    output: Any = decoder(
        input_ids=torch.arange(1, len(positions) + 1).unsqueeze(0),
        position_ids=torch.from_numpy(positions).unsqueeze(0),
        use_cache=False,
        **{CONTEXT_KEYWORD: context},
    )
    return output.last_hidden_state.view(torch.int16), context


def _caches_equal(plans: list[LayerPlan], left: AttentionContext, right: AttentionContext) -> bool:
    return all(
        torch.equal(one.view(torch.int16), other.view(torch.int16))
        for mine, others in ((left.caches[plan.index], right.caches[plan.index]) for plan in plans)
        for one, other in ((mine.keys, others.keys), (mine.values, others.values))
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer.

    Attributes:
        layer: which layer.
        given, embeddings, returned: its input, its cosines and sines, its output.
        before, after: how many operations had been counted when it began, and when it returned.
    """

    layer: torch.nn.Module
    given: object
    embeddings: object
    returned: object
    before: int
    after: int


class _Watch:
    """Records the calls of layers."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @contextmanager
    def of(self, layers: list[torch.nn.Module], operations: Operations) -> Iterator[None]:
        """Record calls of these layers during the block."""
        begun: list[int] = []

        def begin(*_: object) -> None:
            begun.append(operations.seen.total())

        def end(
            layer: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], returned: object
        ) -> None:
            (hidden_states,) = given  # a layer with more arguments is not called as ours expects
            embeddings, after = named.get("position_embeddings"), operations.seen.total()
            call = _Call(layer, hidden_states, embeddings, returned, begun.pop(), after)
            self._calls.append(call)

        hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
        hooks += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def is_straight(self, layers: list[torch.nn.Module]) -> bool:
        """Whether each layer was called once, in order, with nothing in between."""
        called = [call.layer for call in self._calls]
        return called == layers and all(
            call.given is last.returned
            and call.embeddings is last.embeddings
            and call.before == last.after
            for last, call in itertools.pairwise(self._calls)
        )
