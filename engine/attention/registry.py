"""The seam to transformers: our attention under a name of its own, and the backends by name.

A model whose attention implementation is ATTENTION_NAME calls `paged_attention` in every layer. No
mask function is registered under that name, so the models build no mask: causality and windows are
the backend's affair. The step's AttentionContext reaches us as the keyword CONTEXT_KEYWORD of the
model's forward, which hands it through unchanged.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention.base import AttentionBackend, AttentionContext, AttentionParams
from engine.attention.native_backend import DTYPES, NativeAttentionBackend
from engine.attention.opaque import attend_by_number
from engine.attention.torch_backend import TorchAttentionBackend
from engine.config import AttentionName
from engine.errors import ConfigError
from engine.native.library import NativeUnavailableError, load_library

logger = logging.getLogger(__name__)

ATTENTION_NAME = "headrace_paged"
CONTEXT_KEYWORD = "headrace_context"
_LEAST_CAPABILITY = (8, 0)
"""Of a CUDA device: the first with bfloat16, and what Triton itself asks for."""


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
    """The attention function that the models call.

    Args:
        module: the attention layer; `layer_idx` tells which.
        query: [1, Hq, T, D]. key: [1, Hkv, T, D]. value: [1, Hkv, T, Dv], after rotary embedding.
        attention_mask: None.
        scaling, softcap, s_aux: see AttentionParams. The window is known from the load gate.
        kwargs: CONTEXT_KEYWORD, and others that are not needed. A number stands for the context
            where the model is compiled.

    Returns:
        [1, T, Hq, Dv], and no weights.
    """
    context: AttentionContext | int = kwargs[CONTEXT_KEYWORD]
    layer: Any = module.layer_idx  # an int on every attention layer; the load gate saw to that
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if isinstance(context, int):
        output = attend_by_number(
            query[0], key[0], value[0], s_aux, context, layer, scaling, softcap
        )
        return output.unsqueeze(0), None
    cache = context.caches[layer]
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=s_aux)
    metadata = context.metadata[cache.group]
    output = context.backend.forward(query[0], key[0], value[0], cache, metadata, params)
    return output.unsqueeze(0), None


def register() -> None:
    """Make ATTENTION_NAME known to transformers. May be called any number of times."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def choose_backend(
    device: torch.device, dtype: torch.dtype, wanted: AttentionName = "auto"
) -> AttentionBackend:
    """The attention that is wanted; with "auto", the fastest that there is for a device and dtype.

    Raises:
        ConfigError: "native" or "triton" is wanted, and cannot be had.
    """
    own = {"cpu": _native, "cuda": _triton}
    make = {"native": _native, "triton": _triton, "auto": own.get(device.type)}.get(wanted)
    if make is None:
        return TorchAttentionBackend()
    try:
        return make(device, dtype)
    except (NativeUnavailableError, TritonUnavailableError) as error:
        if wanted != "auto":
            raise ConfigError("attention", f"is {wanted}, but {error}") from error
        logger.warning("attention runs in torch, more slowly than it could: %s", error)
        return TorchAttentionBackend()


def _native(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Raises NativeUnavailableError."""
    if device.type != "cpu":
        raise NativeUnavailableError(f"the native kernels are for CPUs, and the device is {device}")
    if dtype not in DTYPES:
        raise NativeUnavailableError(f"the native kernels do not compute in {dtype}")
    return NativeAttentionBackend(load_library())


class TritonUnavailableError(Exception):
    """The Triton kernels cannot be used here; the message says why."""


def _triton(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Raises TritonUnavailableError."""
    if device.type != "cuda":
        raise TritonUnavailableError(
            f"the Triton kernels are for CUDA devices, and the device is {device}"
        )
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise TritonUnavailableError("torch finds no CUDA device of NVIDIA's here")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise TritonUnavailableError(
            "the Triton kernels need a device of compute capability 8.0 or more, and this one has "
            f"{capability[0]}.{capability[1]}"
        )
    try:
        # Triton takes its time to import, and is not there where torch is built for CPUs.
        from engine.attention import triton_backend, triton_launch
    except ImportError as error:
        raise TritonUnavailableError(f"Triton cannot be imported ({error})") from error
    if dtype not in triton_backend.DTYPES:
        raise TritonUnavailableError(f"the Triton kernels do not compute in {dtype}")
    try:
        triton_launch.try_out(device)
    except Exception as error:  # compilers raise anything
        cause = str(error).strip().partition("\n")[0]
        raise TritonUnavailableError(
            f"Triton does not work here ({type(error).__name__}: {cause}); it needs a C compiler"
        ) from error
    return triton_backend.TritonAttentionBackend()
