"""Replaces the forward of attention layers, as `engine.runner.fusing` does for smaller modules.

The model is run once, to record what its layers pass to their attention; then each layer is run
alone, on random input. Its own forward and ours must call the attention function with the same
values, the same mask and exactly the same keyword arguments, and return the same. Each layer is
checked separately, because layers differ (a window, no rotary embedding, a softcap, sinks).
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.runner.fused import (
    PLAN,
    AttentionPlan,
    NormPlan,
    attention_forward,
    exchange,
    is_exchanged,
    join,
    restore,
)
from engine.runner.likeness import (
    FAILURES,
    LINEARS,
    Likeness,
    Operations,
    agree,
    has_hooks,
    random_numbers,
)

_NAME = "headrace_fusing"
_TOKENS = 7
"""Tokens in the prompt on which the model is run."""
_LONGEST_CONTEXT = 1 << 20
"""The context assumed for a model without a limit."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_PARAMETERS = ["hidden_states", "position_embeddings", "attention_mask", "past_key_values"]
_ROTARY = {"mul": 4, "neg": 2, "cat": 2, "add": 2}
_PARTLY_ROTARY = {**_ROTARY, "cat": 4}
"""Operations that rotate queries and keys by halves: a whole head, or its first part."""


@dataclass(slots=True)
class _Call:
    """The arguments of a call of an attention function."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    arguments: tuple[object, ...]
    options: dict[str, Any]


class _Attention:
    """Replaces the attention function during the check.

    Attributes:
        calls: the calls that it got.
        output: what it returns: bfloat16 [T, Hq * Dv]; None: the values.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.output: torch.Tensor | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *arguments: object,
        **options: Any,
    ) -> tuple[torch.Tensor, object]:
        call = _Call(query.clone(), key.clone(), value.clone(), (module, *arguments), options)
        self.calls.append(call)
        batch, heads, tokens, _ = query.shape
        if self.output is None:
            groups = heads // key.shape[1]
            return value.repeat_interleave(groups, dim=1).transpose(1, 2), self
        return self.output.view(batch, tokens, heads, -1), self


def fuse_attention(model: PreTrainedModel, likeness: Likeness) -> tuple[int, set[str]]:
    """Replace the forward of each attention layer for which ours is equivalent.

    Args:
        model: its norms have already been replaced.
        likeness: the kinds that were found to be equivalent.

    Returns:
        how many were replaced, and classes of which some modules were not changed.
    """
    layers = [one for one in model.modules() if set(_PROJECTIONS[:3]) <= one._modules.keys()]
    candidates = [one for one in layers if not is_exchanged(one) and _is_plain(one)]
    if candidates:
        _exchange(model, candidates, likeness)
    left = {type(one).__name__ for one in layers if not is_exchanged(one)}
    return sum(is_exchanged(one) for one in layers), left


def _exchange(
    model: PreTrainedModel, candidates: list[torch.nn.Module], likeness: Likeness
) -> None:
    attention = _Attention()
    AttentionInterface.register(_NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        for layer, given in _watch(model, candidates).items():
            _fuse(layer, given, attention, likeness)
    finally:
        model.set_attn_implementation(before)
        attention.calls.clear()  # transformers keeps registered functions, and they the model


def _is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer has only parts that we know."""
    names = layer._modules.keys()
    if names not in (set(_PROJECTIONS), {*_PROJECTIONS, *_NORMS}):
        return False
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    *named, rest = parameters
    return (
        [one.name for one in named] == _PARAMETERS
        and all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in named)
        and rest.kind is inspect.Parameter.VAR_KEYWORD
        and all(type(layer._modules[name]) in LINEARS for name in _PROJECTIONS)
        and not any(has_hooks(one) for one in layer.children())
        and not layer._buffers
        and not layer.training
        and callable(_eager(layer))
    )


def _eager(layer: torch.nn.Module) -> Any:
    """The attention function in the source file of a layer's class."""
    forward = inspect.unwrap(type(layer).forward)
    return getattr(forward, "__globals__", {}).get("eager_attention_forward")


@dataclass(frozen=True, slots=True)
class _Given:
    """What the model passes to a layer's attention.

    Attributes:
        embeddings: cosines and sines, or what the model passes instead.
        others: keyword arguments other than those in _PARAMETERS.
    """

    embeddings: Any
    others: dict[str, Any]

    def embeddings_of(self, tokens: int) -> Any:
        """The embeddings for the last `tokens` tokens."""
        if not isinstance(self.embeddings, tuple):
            return self.embeddings
        return tuple(one[:, -tokens:].contiguous() for one in self.embeddings)


def _watch(model: PreTrainedModel, layers: list[torch.nn.Module]) -> dict[torch.nn.Module, _Given]:
    """Record what the model passes to its layers, for positions from the first to the last; empty
    if the model cannot be run.
    """
    found: dict[torch.nn.Module, _Given] = {}

    def note(layer: torch.nn.Module, _: object, named: dict[str, Any]) -> None:
        others = {name: value for name, value in named.items() if name not in _PARAMETERS}
        found[layer] = _Given(named.get("position_embeddings"), others)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    text_config = model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or _LONGEST_CONTEXT
    ids = torch.arange(_TOKENS).unsqueeze(0)
    positions = torch.linspace(0, context - 1, _TOKENS).long().unsqueeze(0)
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    except FAILURES:
        return {}  # if it is the model's fault, the load gate reports it
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _fuse(layer: torch.nn.Module, given: _Given, attention: _Attention, likeness: Likeness) -> None:
    """Replace one layer's forward if ours is equivalent."""
    kind = _kind(layer)
    for magnitude, alone in likeness.probes(kind):
        try:
            is_equal = _compare(layer, given, attention, 1 if alone else _TOKENS, magnitude)
        except FAILURES:
            is_equal = False
        if not is_equal:
            if is_exchanged(layer):
                restore(layer)
            return
    likeness.passed(kind)


def _kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers of the same kind."""
    shapes = [layer.get_submodule(name) for name in _PROJECTIONS]
    norms = [vars(layer._modules[name]).get(PLAN) for name in _NORMS if name in layer._modules]
    return (
        type(layer),
        *((type(one), one.in_features, one.out_features) for one in shapes),
        *norms,
    )


def _compare(
    layer: torch.nn.Module, given: _Given, attention: _Attention, tokens: int, magnitude: float
) -> bool:
    """Whether our forward and the layer's own give the same for one random input. The first call
    replaces the layer's forward.
    """
    inputs: Any = layer.get_submodule("q_proj").in_features
    embeddings = given.embeddings_of(tokens)
    arguments = {
        "hidden_states": (random_numbers(1, tokens, inputs) * magnitude).bfloat16(),
        "position_embeddings": embeddings,
        "attention_mask": torch.zeros(1, 1, tokens, tokens),
        "past_key_values": None,
    }
    # Other arguments of the model reach attention unchanged.
    passed = {**given.others, "headrace_fusing": object()}
    attention.calls.clear()
    outputs: Any = layer.get_submodule("o_proj").in_features
    attention.output = random_numbers(tokens, outputs, seed=2).bfloat16()
    with Operations() as operations, operations.without(list(layer.children())):
        expected = type(layer).forward(layer, **arguments, **passed)
    (theirs,) = attention.calls
    if any(theirs.options.get(name) is not value for name, value in passed.items()):
        return False
    if not is_exchanged(layer):
        plan = _plan(layer, theirs, operations.computing, embeddings, passed)
        if plan is None:
            return False
        exchange(layer, attention_forward, plan)
    elif not _rotates(operations.computing, vars(layer)[PLAN]):
        return False
    actual = layer.forward(**arguments, **passed)
    _, ours = attention.calls
    return (
        len(ours.arguments) == len(theirs.arguments) == 2
        and ours.arguments[0] is theirs.arguments[0] is layer
        and ours.arguments[1] is theirs.arguments[1] is arguments["attention_mask"]
        and ours.options.keys() == theirs.options.keys()
        and all(_is_same(ours.options[name], value) for name, value in theirs.options.items())
        and agree(ours.query, theirs.query, mixed=True)
        and agree(ours.key, theirs.key, mixed=True)
        and torch.equal(ours.value, theirs.value)
        and len(actual) == len(expected) == 2
        and torch.equal(actual[0], expected[0])
        and actual[1] is expected[1] is attention
    )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and one == other


def _plan(
    layer: torch.nn.Module,
    call: _Call,
    computing: Counter[str],
    embeddings: Any,
    passed: dict[str, Any],
) -> AttentionPlan | None:
    """The plan for our forward; None: it cannot compute this layer."""
    (_, heads, _, width), kv_heads = call.query.shape, call.key.shape[1]
    if not call.key.shape == call.value.shape == (*call.key.shape[:-1], width):
        return None
    own = {name: value for name, value in call.options.items() if name not in passed}
    parameters = {id(one) for one in layer._parameters.values()}
    if any(isinstance(one, torch.Tensor) and id(one) not in parameters for one in own.values()):
        return None
    form, eps = None, (0.0, 0.0)
    if _NORMS[0] in layer._modules:
        norms = [vars(layer._modules[name]).get(PLAN) for name in _NORMS]
        query, key = (one if isinstance(one, NormPlan) else None for one in norms)
        if query is None or key is None or query.form != key.form:
            return None
        if not query.width == key.width == width:
            return None
        form, eps = query.form, (query.eps, key.eps)
    plan = AttentionPlan(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rotary_dim=embeddings[0].shape[-1] if computing else 0,
        joined=join([layer.get_submodule(name) for name in _PROJECTIONS[:3]]),
        form=form,
        eps=eps,
        options=own,
        eager=_eager(layer),
    )
    return plan if _rotates(computing, plan) else None


def _rotates(computing: Counter[str], plan: AttentionPlan) -> bool:
    """Whether these operations, without those of the layer's modules, are the rotation in the
    plan.
    """
    rotary, width = plan.rotary_dim, plan.head_dim
    if not rotary:
        return not computing
    return rotary % 2 == 0 and computing == (
        _ROTARY if rotary == width else _PARTLY_ROTARY if rotary < width else None
    )
