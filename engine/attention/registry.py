"""The interface to transformers: registers Headrace's attention and chooses the backend.

A model whose attention implementation is ATTENTION_NAME calls `paged_attention` in every layer. No
mask function is registered under that name, so the models build no mask; the backend handles
causality and windows. The step's AttentionContext is passed to the model's forward as the keyword
argument CONTEXT_KEYWORD, and the model passes it on unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention.interface import AttentionBackend, AttentionContext, AttentionParams
from engine.attention.native_backend import DTYPES, NativeAttentionBackend
from engine.attention.opaque import attend_by_call_id
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.errors import ConfigError, NoStepError
from engine.contract.plugins import is_outside, outside_class
from engine.native.library import NativeUnavailableError, load_library

logger = logging.getLogger(__name__)

ATTENTION_NAME = "headrace_paged"
CONTEXT_KEYWORD = "headrace_context"
_LEAST_CAPABILITY = (8, 0)
"""The lowest supported compute capability of a CUDA device. It is the first with bfloat16, and
the minimum for Triton and FlashAttention.
"""


class AttentionUnavailableError(Exception):
    """An attention backend is unavailable here, or for this model. The message says why."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a model layer. This is the function registered with transformers.

    Args:
        module: the attention layer, identified by its `layer_idx`, or by the one that it has told
            the cache if it is shared by several layers.
        query: [1, Hq, T, D], after rotary embedding.
        key: [1, Hkv, T, D], after rotary embedding.
        value: [1, Hkv, T, Dv].
        attention_mask: None.
        scaling, softcap, s_aux: see AttentionParams. The window is known from the load gate.
        kwargs: CONTEXT_KEYWORD, and others that are ignored. If the model is compiled, its value is
            an id instead of the context.

    Returns:
        The output, [1, T, Hq, Dv], and None instead of the attention weights.

    Raises:
        NoStepError: there is no context.
    """
    context: AttentionContext | int | None = kwargs.get(CONTEXT_KEYWORD)
    if context is None:
        raise NoStepError(ATTENTION_NAME)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: Any = getattr(module, "layer_idx", None)  # an int, as the load gate checks
    if isinstance(context, int):
        output = attend_by_call_id(
            query[0], key[0], value[0], s_aux, context, layer, scaling, softcap
        )
        return output.unsqueeze(0), None
    if context.states is not None and (layer is None or layer < 0):
        layer = context.states.layer
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=s_aux)
    return context.attend(layer, query[0], key[0], value[0], params).unsqueeze(0), None


def register() -> None:
    """Register ATTENTION_NAME with transformers. May be called any number of times."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    wanted: str = "auto",
) -> AttentionBackend:
    """Choose the attention backend.

    With "auto", choose the fastest for the device: native on a CPU and triton on CUDA, or torch if
    that one is not available.

    Args:
        device, dtype: the model's device and dtype.
        wanted: the requested attention; see LoadConfig.

    Raises:
        ConfigError: the requested attention is not available.
    """
    if is_outside(wanted):
        return _outside(wanted, dtype)
    if wanted == "torch":
        return TorchAttentionBackend()
    names = _BY_DEVICE.get(device.type, ()) if wanted == "auto" else (wanted,)
    reasons = []
    for name in names:
        try:
            backend = _MAKE[name](device, dtype)
        except (NativeUnavailableError, AttentionUnavailableError) as error:
            if wanted != "auto":
                raise ConfigError("attention", f"is {wanted}, but {error}") from error
            reasons.append(str(error))
        else:
            if reasons:
                logger.warning("attention runs by %s: %s", name, "; ".join(reasons))
            return backend
    return _torch_because("; ".join(reasons)) if reasons else TorchAttentionBackend()


def _outside(wanted: str, dtype: torch.dtype) -> AttentionBackend:
    """Load a backend from outside the source tree.

    Raises:
        ConfigError: the backend cannot be loaded.
    """
    cls = outside_class("attention", wanted, AttentionBackend, "`prepare` and `forward`")
    backend: AttentionBackend = cls()
    if backend.dtypes is not None and dtype not in backend.dtypes:
        raise ConfigError("attention", f"is {wanted}, but that does not compute in {dtype}")
    return backend


def fall_back(wanted: str, error: AttentionUnavailableError) -> AttentionBackend:
    """Choose the attention for a model that has a layer the first choice does not support.

    Raises:
        ConfigError: the first choice was requested by name.
    """
    if wanted != "auto":
        raise ConfigError("attention", f"is {wanted}, but {error}") from error
    return _torch_because(str(error))


def check_block_size(backend: AttentionBackend, block_size: int) -> None:
    """Check that a backend supports a block size.

    Raises:
        ConfigError: the backend does not support it.
    """
    if block_size % backend.block_multiple:
        raise ConfigError(
            "block_size",
            f"is {block_size}, and the model was loaded with attention by {backend.name}, which "
            f"takes multiples of {backend.block_multiple}; choose one, or load with another "
            "attention",
        )


def _torch_because(reason: str) -> AttentionBackend:
    logger.warning("attention runs in torch, more slowly than it could: %s", reason)
    return TorchAttentionBackend()


def _native(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cpu":
        raise NativeUnavailableError(f"the native kernels are for CPUs, and the device is {device}")
    if dtype not in DTYPES:
        raise NativeUnavailableError(f"the native kernels do not compute in {dtype}")
    return NativeAttentionBackend(load_library())


def _check_device(device: torch.device, what: str, need: str) -> None:
    """Raise AttentionUnavailableError unless this is an NVIDIA device of sufficient compute
    capability.
    """
    if device.type != "cuda":
        raise AttentionUnavailableError(f"{what} for CUDA devices, and the device is {device}")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise AttentionUnavailableError("torch finds no CUDA device of NVIDIA's here")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise AttentionUnavailableError(
            f"{need} a device of compute capability 8.0 or more, and this one has "
            f"{capability[0]}.{capability[1]}"
        )


def _triton(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    _check_device(device, "the Triton kernels are", "the Triton kernels need")
    try:
        # Triton is slow to import, and missing if torch is built for CPUs.
        from engine.attention import triton_backend, triton_launch
    except ImportError as error:
        raise AttentionUnavailableError(f"Triton cannot be imported ({error})") from error
    if dtype not in triton_backend.DTYPES:
        raise AttentionUnavailableError(f"the Triton kernels do not compute in {dtype}")
    try:
        triton_launch.try_out(device)
    except Exception as error:  # compilers may raise anything
        raise AttentionUnavailableError(
            f"Triton does not work here ({_describe(error)}); it needs a C compiler "
            "and Python's headers"
        ) from error
    return triton_backend.TritonAttentionBackend()


def _describe(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


_BY_DEVICE: dict[str, tuple[str, ...]] = {"cpu": ("native",), "cuda": ("triton",)}
"""The backends that "auto" tries, in order of preference."""
_MAKE: dict[str, Callable[[torch.device, torch.dtype], AttentionBackend]] = {
    "native": _native,
    "triton": _triton,
}
