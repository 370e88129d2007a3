"""A model's outline: its modules and the size of what they store, without the weights.

    path ─▶ read_checkpoint ─▶ the model on the meta device ─▶ one watched forward ─▶ Outline
            (as for a server)                                  (see `engine.loading.watching`)

On the meta device, tensors have shapes and types but no elements, so a model of any size takes
seconds and a few megabytes. The shapes of the KV cache, the layer groups and the effects of packing
are computed by the same code that a server runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.interface import LayerShape
from engine.attention.step_states import Recurrence
from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.contract.types import TokenId
from engine.kv_cache.groups import LayerGroup
from engine.loading.checkpoint import Checkpoint, read_checkpoint
from engine.loading.eager import ForwardFailedError
from engine.loading.gate import num_embeddings
from engine.loading.kv_memory import make_groups
from engine.loading.memory import HostLimits
from engine.loading.model_defaults import context_length
from engine.loading.packing import choose_dtype, choose_packing, held_bytes
from engine.loading.quantised.stored_linear import StoredLinear, StoredModule, count_parameters
from engine.loading.recurrent_kernels import why_no_kernels
from engine.loading.rotary import read_rope
from engine.loading.stored_packing import check_stored
from engine.loading.watching import observe
from engine.loading.weights import model_without_weights
from engine.models.choosing import NOT_ASKED, describe_steps
from engine.models.formats.registry import Format
from engine.models.recording import Observation
from engine.planning.adapter_plan import (
    Shapes,
    adaptable_layers,
    called_with_all_rows,
    linear_shapes,
)
from engine.planning.operation_count import OperationCount

CALLED_WITH = 16
"""The number of tokens in the watched forward."""
FAILURES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""The exceptions that modules raise if they need the elements of a tensor on the meta device."""
FUSED_OPERATIONS = 8
"""The parallel regions of a layer that our kernels compute in one call."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Some of a model's matrices.

    Attributes:
        elements: the number of elements.
        held: their size in bytes, as the engine stores them.
        count: the number of matrices.
    """

    elements: int = 0
    held: int = 0
    count: int = 0

    def __add__(self, other: Matrices) -> Matrices:
        return Matrices(
            self.elements + other.elements, self.held + other.held, self.count + other.count
        )


@dataclass(frozen=True, slots=True)
class OutlineExperts:
    """A module of experts.

    Attributes:
        weights: the weights of all its experts.
        total: the number of experts.
        chosen: the number of experts that compute each token.
    """

    weights: Matrices
    total: int
    chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model without its weights.

    Attributes:
        checkpoint: the checkpoint that was read.
        name: the name of the model's class.
        device, dtype: the device that it would run on, and its dtype there.
        packing: how its layers would be packed; see `engine.loading.packing`.
        own_decoder: whether our decoder would compute its layers; see `engine.models`.
        parameters: the number of parameters.
        shapes: the shapes of the KV cache, by layer that attends.
        heads: the number of query heads, by layer.
        recurrence: the layers that carry states.
        kv_dtype: the dtype of the KV cache.
        groups: its layer groups.
        context_length: the length of the longest request that it allows.
        vocab_size: the number of token ids.
        linear: the matrices of the layers, without experts.
        head: the matrix that computes the logits. If the embedding shares this matrix, it is
            counted only here.
        embedding: tables of embeddings that are not shared with the head.
        experts: the modules of experts.
        other: norms, biases and everything else.
        widest: the largest number of outputs of a matrix in the layers.
        hidden: the width of the embeddings.
        operations: the small tensor operations of a step, excluding matrix products and attention.
        token_bytes: the number of bytes that these write for each token.
        adaptable: the linear layers that adapters may change, by path: inputs and outputs.
    """

    checkpoint: Checkpoint
    name: str
    device: torch.device
    dtype: torch.dtype
    packing: Format | None
    own_decoder: bool
    parameters: int
    shapes: Mapping[int, LayerShape]
    heads: Mapping[int, int]
    recurrence: Recurrence
    kv_dtype: torch.dtype
    groups: tuple[LayerGroup, ...]
    context_length: int
    vocab_size: int
    linear: Matrices
    head: Matrices
    embedding: Matrices
    experts: tuple[OutlineExperts, ...]
    other: Matrices
    widest: int
    hidden: int
    operations: int
    token_bytes: int
    adaptable: Shapes

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes, as the engine stores them."""
        parts = (self.linear, self.head, self.embedding, self.other)
        return sum(part.held for part in parts) + sum(one.weights.held for one in self.experts)

    @property
    def experts_bytes(self) -> int:
        """The size of the weights of all experts in bytes."""
        return sum(one.weights.held for one in self.experts)


def device_of(load_config: LoadConfig) -> torch.device:
    """Return the device to plan for, which need not exist on this machine."""
    if load_config.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device(load_config.device)


def read_outline(path: Path, load_config: LoadConfig) -> Outline:
    """Read a model's outline.

    Args:
        path: the model's directory, which need not contain the weights.
        load_config: how the model would be loaded.

    Raises:
        ModelRefusedError: a server would refuse the model, or its forward cannot be watched without
            weights.
        ConfigError: load_config asks for something that is not available here, or cannot be
            planned.
    """
    if load_config.tensor_parallel != "none":
        raise ConfigError(
            "tensor_parallel",
            "is auto, and a plan is for a model in one process; leave it out, and see what a "
            "server says when it starts",
        )
    checkpoint = read_checkpoint(path, needs_weights=False)
    device = device_of(load_config)
    check_stored(checkpoint, load_config, device)
    if checkpoint.stored is not None and not checkpoint.stored.layers:
        raise ModelRefusedError(
            f"{path}: which weights are quantized is read from their files, which are not here; "
            "download them first, with headrace-server pull"
        )
    available = HostLimits.read().memory_available
    dtype = choose_dtype(checkpoint, load_config, device, available).dtype
    packing = choose_packing(device, dtype, load_config.pack_weights, load_config.quantization)
    model = model_without_weights(checkpoint, dtype)
    plan = NOT_ASKED
    if load_config.decoder == "own":
        is_packed = packing is not None and packing.is_ours
        plan = describe_steps(model, device, None, is_packed=is_packed)
    ours = []
    if not isinstance(plan, str):
        paths = [*(layer.module for layer in plan.layers), plan.norm.module]
        ours = [model.get_submodule(path) for path in paths]
    shapes = linear_shapes(model)
    with called_with_all_rows(model, shapes, CALLED_WITH) as called:
        found, work, chosen = _observe(model, ours)
    apart = [
        path
        for path in found.recurrence.modules
        if why_no_kernels(model.get_submodule(path), found.recurrence, device, dtype)
    ]
    text_config = model.config.get_text_config()
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    sorted_out = _Sorted(model, held_bytes(model, packing), chosen)
    return Outline(
        checkpoint=checkpoint,
        name=type(model).__name__,
        device=device,
        dtype=dtype,
        packing=packing,
        own_decoder=bool(ours),
        parameters=count_parameters(model),
        shapes=found.shapes,
        heads=found.heads,
        kv_dtype=found.dtype,
        recurrence=found.recurrence,
        groups=make_groups(found.shapes, found.dtype, found.recurrence),
        context_length=context_length(text_config, read_rope(model)),
        vocab_size=min(num_embeddings(model), head.out_features),
        linear=sorted_out.linear,
        head=sorted_out.head,
        embedding=sorted_out.embedding,
        experts=tuple(sorted_out.experts),
        other=sorted_out.other,
        widest=sorted_out.widest,
        hidden=embeddings.embedding_dim,
        operations=work.operations,
        token_bytes=work.nbytes // CALLED_WITH,
        adaptable=adaptable_layers(shapes, None if isinstance(plan, str) else plan, called, apart),
    )


class _Sorted:
    """A model's parameters by kind."""

    def __init__(
        self, model: PreTrainedModel, held: dict[str, int], chosen: dict[torch.nn.Module, int]
    ) -> None:
        self.linear = self.head = self.embedding = self.other = Matrices()
        self.experts: list[OutlineExperts] = []
        self.widest = 0
        output = model.get_output_embeddings()
        head = output._parameters.get("weight")
        self.other = Matrices()
        seen: set[int] = set()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if isinstance(module, StoredModule):
                # The weight of an embedding that is the output layer's is counted there.
                stored = Matrices(math.prod(module.shape), held.get(f"{name}.weight", 0), 1)
                if module is output:
                    self.head += stored
                elif isinstance(module, StoredLinear):
                    self.linear += stored
                    self.widest = max(self.widest, module.out_features)
                elif f"{name}.weight" in held:
                    self.embedding += stored
            else:
                buffers = sum(one.nbytes for one in module.buffers(recurse=False))
                self.other += Matrices(held=buffers)
            own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
            seen.update(map(id, own))
            found = {id(one): Matrices(one.numel(), held[names[id(one)]], 1) for one in own}
            if module in chosen:
                weights = sum(found.values(), Matrices())
                total = max(len(one) for one in own if one.dim() > 2)
                self.experts.append(OutlineExperts(weights, total, chosen[module]))
                continue
            for one in own:
                if one is head:
                    self.head += found[id(one)]
                elif isinstance(module, torch.nn.Embedding):
                    self.embedding += found[id(one)]
                elif one.dim() == 2:
                    self.linear += found[id(one)]
                    self.widest = max(self.widest, len(one))
                else:
                    self.other += found[id(one)]


def _observe(
    model: PreTrainedModel, ours: Sequence[torch.nn.Module]
) -> tuple[Observation, OperationCount, dict[torch.nn.Module, int]]:
    """Watch one forward pass. ours: the modules that our decoder would compute.

    Returns:
        What was observed, the operations (for CALLED_WITH tokens), and the number of experts that
        compute each token, by module.
    """
    experts = [one for one in model.modules() if _has_experts(one)]
    chosen: dict[torch.nn.Module, int] = {}
    own_experts = model.get_experts_implementation()
    if experts:
        # The one implementation that does not look at which experts were chosen.
        model.set_experts_implementation("batched_mm")
    work, replaced = OperationCount(), [*experts, *ours]
    try:
        with (
            _noting_choices(experts, chosen),
            torch.inference_mode(False),
            work.of(model, replaced),
        ):
            found = observe(model, [[TokenId(0)] * CALLED_WITH])
    except (ForwardFailedError, *FAILURES) as error:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be planned: what its layers keep cannot be found out "
            "without its weights"
        ) from error
    if experts:
        model.set_experts_implementation(own_experts)
    for module in replaced:
        if module not in chosen:
            work.operations += FUSED_OPERATIONS if module._modules else 1
    return found, work, chosen


def _has_experts(module: torch.nn.Module) -> bool:
    return any(one.dim() > 2 for one in module.parameters(recurse=False))


def _count_experts(module: torch.nn.Module) -> int:
    return max(len(one) for one in module.parameters(recurse=False) if one.dim() > 2)


@contextmanager
def _noting_choices(
    experts: Sequence[torch.nn.Module], chosen: dict[torch.nn.Module, int]
) -> Iterator[None]:
    """Record how many experts compute each token, inside the `with` block.

    This is the width of the expert indices that are passed to a module of experts.
    """

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        widths = [
            one.shape[-1]
            for one in (*args, *kwargs.values())
            if isinstance(one, torch.Tensor) and not one.is_floating_point() and one.dim() == 2
        ]
        chosen[module] = widths[0] if widths else _count_experts(module)

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in experts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
