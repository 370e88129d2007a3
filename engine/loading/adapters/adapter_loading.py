"""Loads adapters for a verified model.

directory ─▶ config, tensors ─▶ every layer that the config adapts has its A and B, and no other
          ─▶ shapes, types, finite ─▶ digest, tables ─▶ Adapter
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.contract.adapters import Adapter
from engine.contract.errors import AdapterRefusedError
from engine.loading.adapters.adapted_modules import AdaptedModules
from engine.loading.adapters.adapter_files import (
    CONFIG,
    WEIGHTS,
    check_text,
    read_config,
    read_tensors,
)
from engine.loading.adapters.peft_config import LoraConfig, parse_config
from engine.models.formats.native import DTYPES, why_missing
from engine.models.low_rank import AdapterWeights, LowRankPart

if TYPE_CHECKING:
    from engine.loading.verified import VerifiedModel

_NAMED = 3
"""The maximum number of names in an error message."""
_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_adapters(
    verified: VerifiedModel,
    base: Path,
    directories: Mapping[str, str],
    *,
    max_rank: int,
    max_bytes: int,
    progress: Callable[[str], None],
) -> None:
    """Load adapters, and let requests name them. No step may be running.

    Args:
        verified: the model.
        base: its directory.
        directories: by name.
        max_rank: the highest rank that is allowed.
        max_bytes: how many bytes all of them may take.
        progress: receives a line for each.

    Raises:
        AdapterRefusedError: one cannot be served. None is loaded then.
    """
    if not directories:
        return
    reason = why_no_adapters(verified)
    if reason is not None:
        raise AdapterRefusedError(f"adapters cannot be served here: {reason}").naming("adapters")
    modules, loaded, left = verified.adapted, [], max_bytes
    if modules is None:
        raise RuntimeError("why_no_adapters has found none")
    for name, directory in directories.items():
        try:
            check_text(Path(directory), base)
            one = read_adapter(name, Path(directory), modules, max_rank=max_rank, max_bytes=left)
        except AdapterRefusedError as error:
            refused = AdapterRefusedError(f"adapter {name!r} ({directory}): {error}")
            raise refused.naming(*error.mentions) from error
        left -= one.nbytes
        loaded.append(one)
        progress(
            f"adapter {name}: {one.modules} linear layers, rank {one.rank}, "
            f"{one.nbytes / 2**20:.1f} MiB, digest {one.digest.hex()[:16]}"
        )
    verified.adapters.replace(loaded)


def why_no_adapters(verified: VerifiedModel) -> str | None:
    """Return why adapters cannot be served with a model, or None if they can."""
    if verified.ranks is not None:
        return "the model is divided among processes; leave tensor_parallel out"
    if verified.device.type != "cpu":
        return f"the model is on {verified.device}, and they are computed on a CPU alone"
    missing = why_missing()
    if missing is not None:
        return missing
    if verified.dtype not in DTYPES:
        return f"the model is {verified.dtype}; choose bfloat16 or float32"
    if verified.adapted is None:
        return "the model has no view"
    return None


def read_adapter(
    name: str, root: Path, modules: AdaptedModules, *, max_rank: int, max_bytes: int
) -> Adapter:
    """Read an adapter, and let its layers be computed.

    Raises:
        AdapterRefusedError: it cannot be served.
    """
    if not root.is_dir():
        raise AdapterRefusedError("there is no such directory")
    config = parse_config(read_config(root), max_rank)
    adapted = _adapted(config, modules)
    tensors = read_tensors(root, max_bytes)
    expected = {f"{_PREFIX}{path}.{last}" for path in adapted for last in (_A, _B)}
    _check_names(expected, set(tensors))
    # Of all layers first, before anything is converted.
    for path in adapted:
        _check_tensors(path, config.rank_of(path), modules.shapes[path], tensors)
    parts, digest = {}, blake2b(digest_size=32, person=b"adapter")
    for path in sorted(adapted):
        a, b = (tensors.pop(f"{_PREFIX}{path}.{last}") for last in (_A, _B))
        scale = config.scale_of(path)
        head = f"{path}\0{a.dtype} {b.dtype} {list(a.shape)} {list(b.shape)}\0"
        digest.update(head.encode() + struct.pack("<d", scale))
        for one in (a, b):
            digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
        parts[path] = _part(path, a, b, scale)
    nbytes = sum(one.a.nbytes + one.b.nbytes for one in parts.values())
    if nbytes > max_bytes:
        raise AdapterRefusedError(
            f"it takes {nbytes:,} bytes, and {max(0, max_bytes):,} are free of max_adapter_bytes: "
            "raise it, or load fewer adapters"
        ).naming("max_adapter_bytes")
    weights = AdapterWeights(parts, modules.places, modules.num_layers)
    modules.stand_in(adapted)
    return Adapter(
        name=name,
        digest=digest.digest(),
        rank=max(len(one.a) for one in parts.values()),
        nbytes=nbytes,
        modules=len(parts),
        weights=weights,
    )


def _adapted(config: LoraConfig, modules: AdaptedModules) -> list[str]:
    """Return the paths of the layers that a config adapts."""
    adapted = [path for path in modules.shapes if config.adapts(path, is_linear=True)]
    for path, what in modules.others.items():
        if path and config.adapts(path, is_linear=False):
            raise AdapterRefusedError(
                f"{CONFIG}: target_modules include {path}, which {what}; only linear layers before "
                "it are served"
            )
    if not adapted:
        raise AdapterRefusedError(f"{CONFIG}: target_modules name no module that the model has")
    for path in adapted:
        reason = modules.why_not(path)
        if reason is not None:
            raise AdapterRefusedError(
                f"{CONFIG}: target_modules include {path}, which {reason}; that is not served"
            )
    return adapted


def _check_names(expected: set[str], found: set[str]) -> None:
    for what, names in (("lacks", expected - found), ("has", found - expected)):
        if names:
            some = ", ".join(one[:120] for one in sorted(names)[:_NAMED])
            raise AdapterRefusedError(
                f"{WEIGHTS} {what} {len(names)} tensors that {CONFIG} and the model "
                f"{'need' if what == 'lacks' else 'do not have'}: {some}"
            )


def _check_tensors(
    path: str, rank: int, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> None:
    inputs, outputs = shape
    for last, wanted in ((_A, (rank, inputs)), (_B, (outputs, rank))):
        one = tensors[f"{_PREFIX}{path}.{last}"]
        if tuple(one.shape) != wanted:
            raise AdapterRefusedError(
                f"{path}.{last} has shape {list(one.shape)}, and here it must be {list(wanted)}: "
                "it was made for another base model, or its config has another rank"
            )
        if one.dtype not in _TYPES:
            raise AdapterRefusedError(
                f"{path}.{last} is {one.dtype}; float32, bfloat16 and float16 are served"
            )
        if not bool(one.isfinite().all()):
            raise AdapterRefusedError(f"{path}.{last} has elements that are NaN or infinite")


def _part(path: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> LowRankPart:
    is_half = a.dtype is b.dtype is torch.bfloat16
    dtype = torch.bfloat16 if is_half else torch.float32
    # Memory of its own: the file's bytes are not kept.
    return LowRankPart(
        a.to(dtype, copy=True).contiguous(), b.t().to(dtype, copy=True).contiguous(), scale
    )
