"""Joins the products that a module computes from the same input: queries, keys and values, and the
two halves of a gated layer.

    join_products ─▶ watch what the modules are given ─▶ each: compare, join its weights, exchange

`engine.loading.joined` describes how a step is then computed. This is for devices with
ordinary weight tensors, mainly CUDA: there are fewer and larger products of the same elements. Sums
may be computed in another order, so the last bits may differ. A class's name does not tell what its
forward does with its input, so each module is run on random input. It is not changed if anything
but its projections uses the input, or if giving it the product instead changes a result.

Weights are joined module by module: [Wq Wk Wv] is made, the three parameters become views of it,
and the three originals are freed before the next module's are made. So only one module's weights
are held twice at a time.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import PreTrainedModel

from engine.errors import ModelRefusedError
from engine.loading.joined import (
    BIAS,
    WEIGHT,
    ColumnsPlan,
    JoinedPlan,
    columns_forward,
    exchange,
    is_exchanged,
    joined_forward,
    product,
    restore,
)
from engine.loading.pages import Pages

FAILURES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What a module may raise for unsuitable input; it is then not changed."""
VIEWS = frozenset(
    (
        *("alias", "detach", "view", "_unsafe_view", "reshape", "clone", "contiguous", "unsqueeze"),
        *("squeeze", "transpose", "permute", "slice", "select", "split", "split_with_sizes"),
        "expand",
    )
)
"""Operations that compute nothing."""
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")
_TOKENS = 7
"""Tokens in the prompt on which the model is run."""
_MAGNITUDES = (1e-3, 1.0, 100.0)
"""Magnitudes of the random input."""
_ROUNDINGS = 8
"""The allowed difference of a result, relative to its largest element, in units of its type's
precision, if the same operations read elements from other addresses.
"""
_REORDERED = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The allowed relative difference of a product if its sums are computed in another order."""
_REORDERED_SHORT = 2e-2
"""The same for other types."""


@dataclass(frozen=True, slots=True)
class JoiningReport:
    """What was joined.

    Attributes:
        attentions, gates: how many modules of each.
        left: similar classes of which some modules were not changed.
    """

    attentions: int
    gates: int
    left: tuple[str, ...]

    def __str__(self) -> str:
        """A line for the log."""
        text = (
            f"joined: queries, keys and values of {self.attentions} attentions and both halves of "
            f"{self.gates} gated layers are one product each"
        )
        return f"{text}; left as they are: {', '.join(self.left)}" if self.left else text


@dataclass(frozen=True, slots=True)
class _Call:
    """The other arguments of a module besides its input."""

    shape: tuple[int, ...]
    arguments: tuple[Any, ...]
    named: dict[str, Any]


def join_products(model: PreTrainedModel) -> JoiningReport:
    """Join every product that can be joined. Earlier ones stay.

    Args:
        model: in evaluation mode, on its device, not in use.

    Raises:
        ModelRefusedError: a joined product differs from its parts.
    """
    found = [(one, names) for one in model.modules() if (names := _names(one))]
    pages = Pages(itertools.chain(model.parameters(), model.buffers()))
    # Not in inference mode, in which operations are recorded before they are decomposed.
    with torch.inference_mode(False), torch.no_grad():
        holders = _holders(model)
        plain = [
            (one, names)
            for one, names in found
            if not is_exchanged(one) and _is_plain(one, names, holders)
        ]
        calls = _watch(model, [one for one, _ in plain]) if plain else {}
        for module, names in plain:
            if module in calls and _is_alike(module, names, calls[module]):
                _join(module, names, pages)
    joined = Counter(names for one, names in found if is_exchanged(one))
    left = {type(one).__name__ for one, _ in found if not is_exchanged(one)}
    return JoiningReport(joined[_ATTENTION], joined[_GATED], tuple(sorted(left)))


def _names(module: torch.nn.Module) -> tuple[str, ...]:
    """The projections of a module that may be joined, by name."""
    for names in (_ATTENTION, _GATED):
        if set(names) <= module._modules.keys():
            return names
    return ()


def _projections(module: torch.nn.Module, names: Sequence[str]) -> list[Any]:
    return [module.get_submodule(name) for name in names]


def _holders(model: torch.nn.Module) -> Counter[int]:
    """How many modules hold a parameter."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def _is_plain(module: torch.nn.Module, names: Sequence[str], holders: Counter[int]) -> bool:
    """Whether a module's projections are ordinary layers with one input, which no other module
    shares.
    """
    layers = _projections(module, names)
    if any(
        type(one) is not torch.nn.Linear
        or is_exchanged(one)
        or has_hooks(one)
        or any(holders[id(parameter)] != 1 for parameter in one.parameters())
        or not one._parameters.keys() <= {"weight", "bias"}
        or torch.nn.utils.parametrize.is_parametrized(one)
        for one in layers
    ):
        return False
    weights = [one.weight for one in layers]
    biases = [one.bias for one in layers if one.bias is not None]
    width = sum(len(one) for one in weights)
    return (
        len({id(one) for one in layers}) == len(layers)
        and len({(one.dtype, one.device) for one in (*weights, *biases)}) == 1
        and weights[0].is_floating_point()
        and not weights[0].is_meta
        and {one.shape[1] for one in weights} == {weights[0].shape[1]}
        and weights[0].shape[1] != width  # which tells a projection's input from the product
        and not module.training
        and bool(_argument(module))
    )


def _argument(module: torch.nn.Module) -> str:
    """The name of a module's input; empty if it has none."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return ""
    return parameters[0].name


def _watch(model: PreTrainedModel, modules: list[torch.nn.Module]) -> dict[torch.nn.Module, _Call]:
    """Record the arguments of modules; empty if the model cannot be run."""
    calls: dict[torch.nn.Module, _Call] = {}

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        if arguments:
            x, arguments = arguments[0], arguments[1:]
        else:
            x = named.pop(_argument(module), None)
        if isinstance(x, torch.Tensor):
            calls[module] = _Call(tuple(x.shape), arguments, named)

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in modules]
    try:
        ids = torch.arange(_TOKENS, device=model.device).unsqueeze(0)
        model(input_ids=ids, use_cache=False)
    except FAILURES:
        return {}  # if it is the model's fault, the load gate reports it
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _is_alike(module: torch.nn.Module, names: Sequence[str], call: _Call) -> bool:
    """Whether a module may be given the product instead of its input. If so, its projections'
    forwards are replaced.
    """
    layers = _projections(module, names)
    width = sum(len(one.weight) for one in layers)
    first = 0
    for one in layers:
        count = len(one.weight)
        exchange(one, columns_forward, ColumnsPlan(first, count, width))
        first += count
    try:
        alike = all(_compare(module, layers, call, magnitude) for magnitude in _MAGNITUDES)
    except FAILURES:
        alike = False
    if not alike:
        for one in layers:
            restore(one)
    return alike


def _compare(module: torch.nn.Module, layers: list[Any], call: _Call, magnitude: float) -> bool:
    """Whether a class's own forward gives the same for the input and for its projections'
    results.
    """
    weight = layers[0].weight
    x = (random_numbers(*call.shape) * magnitude).to(weight)
    expected, operations, is_handed_on = _run(module, layers, x, call)
    # Columns are views of the product, so reading them says nothing about the product itself.
    if not is_handed_on or operations.reads:
        return False
    joint = torch.cat([one(x) for one in layers], dim=-1)
    actual, others, is_handed_on = _run(module, layers, joint, call)
    if not is_handed_on or operations.computing != others.computing:
        return False
    precision = _ROUNDINGS * torch.finfo(weight.dtype).eps
    (theirs, form), (ours, other_form) = tree_flatten(expected), tree_flatten(actual)
    return form == other_form and all(
        _is_near(one, other, precision) if isinstance(one, torch.Tensor) else one is other
        for one, other in zip(ours, theirs, strict=True)
    )


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensor operations, except those of excluded modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self._paused = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._paused:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def without(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Do not count the operations of these modules during the block."""

        def pause(*_: object) -> None:
            self._paused += 1

        def resume(*_: object) -> None:
            self._paused -= 1

        hooks = [module.register_forward_pre_hook(pause) for module in modules]
        hooks += [module.register_forward_hook(resume) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def computing(self) -> Counter[str]:
        """The operations that compute something."""
        return Counter({name: count for name, count in self.seen.items() if name not in VIEWS})


class _Reading(Operations):  # type: ignore[no-untyped-call]
    """Also counts the operations that get a tensor's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.reads = 0
        self._place = tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._paused:
            self.reads += any(
                isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() == self._place
                for one in tree_leaves((args, kwargs))
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def _run(
    module: torch.nn.Module, layers: list[Any], x: torch.Tensor, call: _Call
) -> tuple[Any, _Reading, bool]:
    """Run a class's own forward. Returns its result, the operations that it makes outside the
    module's children, and whether it passes its input to each projection once, unchanged.
    """
    given: list[tuple[torch.nn.Module, torch.Tensor]] = []
    hooks = [
        one.register_forward_pre_hook(lambda layer, seen: given.append((layer, seen[0])))
        for one in layers
    ]
    try:
        with _Reading(x) as operations, operations.without(list(module.children())):
            result = type(module).forward(module, x, *call.arguments, **call.named)
    finally:
        for hook in hooks:
            hook.remove()
    is_handed_on = Counter(id(layer) for layer, _ in given) == Counter(id(one) for one in layers)
    return result, operations, is_handed_on and all(one is x for _, one in given)


def _is_near(actual: object, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether elements differ by at most this fraction of the largest."""
    if not isinstance(actual, torch.Tensor):
        return False
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.numel():
        return True
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(
        actual.double(), expected.double(), rtol=0.0, atol=tolerance * largest, equal_nan=True
    )


def _join(module: torch.nn.Module, names: Sequence[str], pages: Pages) -> None:
    """Join the weights of a module's projections, and replace its forward."""
    layers = _projections(module, names)
    weights = [one.weight for one in layers]
    x = random_numbers(_TOKENS, weights[0].shape[1]).to(weights[0])
    expected = torch.cat([one(x) for one in layers], dim=-1)
    width = sum(len(one) for one in weights)
    weight = weights[0].new_empty((width, weights[0].shape[1]))
    bias = None
    if any(one.bias is not None for one in layers):
        bias = weight.new_zeros(width)
    parts, first = [], 0
    for name, one in zip(names, layers, strict=True):
        parts.append((name, first))
        rows = slice(first, first + len(one.weight))
        first = rows.stop
        _move(one.weight, weight[rows], pages)
        if one.bias is not None and bias is not None:
            _move(one.bias, bias[rows], pages)
    module.register_buffer(WEIGHT, weight, persistent=False)
    module.register_buffer(BIAS, bias, persistent=False)
    exchange(module, joined_forward, JoinedPlan(_argument(module), tuple(parts)))
    if not _is_near(product(module, x), expected, _REORDERED.get(weight.dtype, _REORDERED_SHORT)):
        raise ModelRefusedError(
            f"{type(module).__name__}: the product of {', '.join(names)} together is not what they "
            "compute one by one; report it, and start with decoder set to transformers meanwhile"
        ).naming("decoder")
    if weight.is_cuda:
        # Free the originals' memory, which neither the next joined weight nor the KV cache could
        # reuse.
        torch.cuda.empty_cache()


def _move(parameter: torch.nn.Parameter, place: torch.Tensor, pages: Pages) -> None:
    """Move a parameter's elements to another tensor."""
    place.copy_(parameter)
    pages.give_back(parameter)
    parameter.data = place


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed around 0.5, the same for the same seed: float32 [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    # Not around 0: then the subtraction of a mean would not show.
    return torch.randn(shape, generator=generator).add_(0.5)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
