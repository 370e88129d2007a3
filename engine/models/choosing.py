"""Chooses what computes a model's steps: our decoder, on the native kernels or in torch, or the
transformers model itself.

describe_steps ─▶ (the unmodified model is recorded, weights are packed) ─▶ make_decoder, compare
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from engine.attention.interface import AttentionBackend
from engine.attention.native_backend import NativeAttentionBackend
from engine.attention.registry import choose_backend
from engine.contract.errors import ConfigError
from engine.models.comparison import DiffersError, compare
from engine.models.describing import NotDescribedError, describe
from engine.models.description import Decoder
from engine.models.formats.native import DTYPES
from engine.models.layer_parts import UnboundError
from engine.models.native_decoder import NativeDecoder
from engine.models.operations import Operations, TorchOperations
from engine.models.recording import Observation
from engine.models.torch_decoder import TORCH_DTYPES, TorchDecoder

logger = logging.getLogger(__name__)

CausalDecoder = NativeDecoder | TorchDecoder
TORCH_DEVICES = frozenset({"cuda"})
"""The device types on which our decoder runs in torch. On a CPU it uses the native kernels."""
Plan = Decoder | str
"""The description of our decoder, or the reason why it cannot compute the model."""
_REDUCTIONS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)
NOT_ASKED: Plan = "our own is not asked for"


def describe_steps(
    model: PreTrainedModel,
    device: torch.device,
    backend: AttentionBackend | None,
    *,
    is_packed: bool,
) -> Plan:
    """Describe what our decoder has to compute.

    Args:
        model: in evaluation mode, and not packed yet, unless that changes results. It may be on the
            meta device.
        device: the device that it runs on.
        backend: the backend that will compute attention; None if it is not chosen yet.
        is_packed: whether the linear layers are, or will be, packed for our kernels.
    """
    in_torch = device.type in TORCH_DEVICES
    if not in_torch:
        if not is_packed:
            return "oneDNN or torch computes its linear layers, not our kernels"
        if not isinstance(backend, NativeAttentionBackend | None):
            return "attention does not run on our kernels"
    if model.dtype not in (TORCH_DTYPES if in_torch else DTYPES):
        return f"there are no kernels for {model.dtype}"
    try:
        return describe(model)
    except NotDescribedError as error:
        return str(error)


def make_decoder(
    model: PreTrainedModel,
    plan: Plan,
    backend: AttentionBackend,
    found: Observation | None,
    progress: Callable[[str], None],
) -> CausalDecoder | None:
    """Make our decoder for a model and compare the two. Return None if our decoder cannot be used.

    Args:
        model: packed if it is on a CPU. On other devices, its products are joined here.
        plan, backend: see `describe_steps`.
        found: the unmodified model, recorded if there is a description. None to compare nothing,
            because the weights are made up.
        progress: receives a line that says what computes the steps, and why.

    Raises:
        ModelRefusedError: the weights are not what they were when the model computed.
    """
    reason = plan if isinstance(plan, str) else ""
    if not isinstance(plan, str):
        try:
            decoder = bind(model, plan, backend)
            if found is not None:
                with exact_sums():
                    compare(decoder, found)
        except (UnboundError, DiffersError) as error:
            reason = str(error)
        else:
            progress(f"decoder: our own, for {plan.family}")
            return decoder
    progress(f"decoder: transformers', because {reason}")
    return None


def bind(model: PreTrainedModel, described: Decoder, backend: AttentionBackend) -> CausalDecoder:
    """Make our decoder for a described model, without comparing them.

    Raises:
        UnboundError: the model's tensors are not packed, or not in the kernels' format.
    """
    if model.device.type in TORCH_DEVICES:
        operations = operations_for(model.device, model.dtype)
        return TorchDecoder(model, described, operations, backend)
    return NativeDecoder(model, described)


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """Return what computes small operations on a device: Triton kernels, if Triton works there."""
    if device.type != "cuda":
        return TorchOperations()
    try:
        choose_backend(device, dtype, "triton")
    except ConfigError as error:
        logger.warning("our decoder runs more slowly than it could: %s", error.__cause__)
        return TorchOperations()
    from engine.models.triton_operations import TritonOperations  # Triton need not be there

    return TritonOperations()


@contextmanager
def exact_sums() -> Iterator[None]:
    """Compute products on CUDA exactly inside the `with` block.

    Products of 16-bit types are summed in float32 throughout, and products of float32 do not use
    TF32, whatever the process has set. Otherwise equal products may be rounded differently, and the
    load gate might mistake the accumulated difference for a fault.
    """
    settings = torch.backends.cuda.matmul
    exact: dict[str, object] = {**dict.fromkeys(_REDUCTIONS, False), "allow_tf32": False}
    try:
        before = {name: getattr(settings, name) for name in exact}
    except RuntimeError:
        # The process has used torch's newer setting, which forbids reading this one.
        exact["fp32_precision"] = exact.pop("allow_tf32") or "ieee"
        before = {name: getattr(settings, name) for name in exact}
    try:
        for name, value in exact.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
