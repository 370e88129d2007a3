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
from engine.native.library import NativeLibrary, NativeUnavailableError, load_library

logger = logging.getLogger(__name__)

ATTENTION_NAME = "headrace_paged"
CONTEXT_KEYWORD = "headrace_context"


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
        ConfigError: "native" is wanted, and cannot be had.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cpu"):
        return TorchAttentionBackend()
    try:
        return NativeAttentionBackend(_native_library(device, dtype))
    except NativeUnavailableError as error:
        if wanted == "native":
            raise ConfigError("attention", f"is native, but {error}") from error
        logger.warning("attention runs in torch, more slowly than it could: %s", error)
        return TorchAttentionBackend()


def _native_library(device: torch.device, dtype: torch.dtype) -> NativeLibrary:
    """Raises NativeUnavailableError."""
    if device.type != "cpu":
        raise NativeUnavailableError(f"the native kernels are for CPUs, and the device is {device}")
    if dtype not in DTYPES:
        raise NativeUnavailableError(f"the native kernels do not compute in {dtype}")
    return load_library()
