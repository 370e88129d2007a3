"""Loads adapters for a verified model.

directory ─▶ config, tensors ─▶ every layer that the config adapts has its A and B, and no other
          ─▶ shapes, types, finite ─▶ digest, tables ─▶ Adapter ─▶ LoadedAdapters
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.adapters import Adapter, AdapterLoad, AdapterLoaded, at_start
from engine.contract.config import LoadConfig
from engine.contract.errors import AdapterRefusedError
from engine.contract.loaded_adapters import AdapterBounds
from engine.contract.startup import ADAPTERS, enter
from engine.loading.adapters.adapted_modules import AdaptedModules
from engine.loading.adapters.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterFolder,
    check_text,
    no_room,
    read_config,
    read_tensors,
    resolved,
)
from engine.loading.adapters.peft_config import LoraConfig, parse_config
from engine.loading.kv_memory import zeros_on_demand
from engine.models.formats.native import DTYPES, why_missing
from engine.models.low_rank import AdapterWeights, LowRankPart, Matrix, pack_a, pack_b

if TYPE_CHECKING:
    from engine.loading.verified import VerifiedModel

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_EXPONENT = 0x7F80
"""The exponent's bits in bfloat16. All of them are set in NaN and infinity alone."""
_NAMED = 3
"""The maximum number of names in an error message."""
_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdapterLoader:
    """Loads adapters for a verified model; `read` may run beside steps, on any thread."""

    def __init__(self, verified: VerifiedModel, config: LoadConfig) -> None:
        """Prepare the model for adapters. No step may be running.

        Args:
            verified: the model.
            config: its adapter_root, and the bounds. Without a root all adapters must be read
                before an engine is built.

        Raises:
            AdapterRefusedError: adapters cannot be served with this model, or there is no such
                root.
        """
        reason = why_no_adapters(verified)
        if reason is not None or verified.adapted is None:
            raise AdapterRefusedError(f"adapters cannot be served here: {reason}").naming(
                "adapters", "adapter_root"
            )
        self.adapters = verified.adapters
        self._modules = verified.adapted
        self._base = verified.path
        self._max_rank = config.max_adapter_rank
        self._bounds = AdapterBounds(config.max_adapter_bytes, config.max_adapters)
        self.adapters.bounds = self._bounds
        self._root: Path | None = None
        if config.adapter_root is not None:
            try:
                self._root = resolved(Path(config.adapter_root))
            except AdapterRefusedError as error:
                told = f"adapter_root ({config.adapter_root}): {error}"
                raise AdapterRefusedError(told).naming("adapter_root") from error
            self._modules.stand_in_all()
            self.adapters.expected_bytes = config.max_adapter_bytes
        self.adapters.are_served = True

    def read(self, load: AdapterLoad) -> Adapter:
        """Read an adapter, check it and pack it.

        Raises:
            AdapterRefusedError: it cannot be served.
            AdapterRoomError: there is no room for it, also not without those that may go.
        """
        if load.is_of_start:
            folder = AdapterFolder.at(Path(load.source))
        elif self._root is not None:
            folder = AdapterFolder.below(self._root, load.source)
        else:
            raise AdapterRefusedError("there is no adapter_root").naming("adapter_root")
        check_text(folder, self._base)
        room = self.adapters.room(load.name, self._bounds)
        found = read_adapter(
            load.name, folder, self._modules, max_rank=self._max_rank, max_bytes=room
        )
        if load.digest not in ("", found.digest.hex()):
            raise AdapterRefusedError(
                f"its files are others than those that were loaded (digest {load.digest[:16]}, "
                f"now {found.digest.hex()[:16]}): load it again to serve them"
            )
        return found

    def put(self, adapter: Adapter, load: AdapterLoad) -> AdapterLoaded:
        """Let requests name an adapter.

        Raises:
            AdapterRoomError: there is no room.
        """
        told, evicted = self.adapters.put(adapter, self._bounds, is_pinned=load.is_pinned)
        return AdapterLoaded(told, evicted)


def load_adapters(
    verified: VerifiedModel,
    config: LoadConfig,
    progress: Callable[[str], None],
    loads: Sequence[AdapterLoad] | None = None,
) -> None:
    """Load adapters before an engine is built.

    Args:
        verified: the model.
        config: how they are loaded.
        progress: receives a line for each.
        loads: those that an engine had before this one. One that cannot be loaded again is left
            out, with an error in the log. If None, those of the config are loaded.

    Raises:
        AdapterRefusedError: one of the config cannot be served.
    """
    loads = at_start(config.adapters) if loads is None else loads
    if not loads and config.adapter_root is None:
        return
    enter(progress, ADAPTERS)
    loader = AdapterLoader(verified, config)
    for load in loads:
        try:
            one = loader.put(loader.read(load), load).adapter
        except AdapterRefusedError as error:
            told = f"adapter {load.name!r} ({load.source}): {error}"
            if load.digest:
                logger.error("%s; requests that name it are refused", told)
                continue
            raise AdapterRefusedError(told).naming(*error.mentions) from error
        progress(
            f"adapter {one.name}: {one.modules} linear layers, rank {one.rank}, "
            f"{one.nbytes / 2**20:.1f} MiB, digest {one.digest[:16]}"
        )


def why_no_adapters(verified: VerifiedModel) -> str | None:
    """Return why adapters cannot be served with a model, or None if they can."""
    if verified.ranks is not None:
        return "the model is divided among processes; leave tensor_parallel out"
    reason = why_not_computed(verified.device, verified.dtype)
    if reason is None and verified.adapted is None:
        return "the model has no view"
    return reason


def why_not_computed(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why adapters cannot be computed for models on a device and of a type, or None if they
    can.
    """
    if device.type != "cpu":
        return f"the model is on {device}, and they are computed on a CPU alone"
    missing = why_missing()
    if missing is not None:
        return missing
    if dtype not in DTYPES:
        return f"the model is {dtype}; choose bfloat16 or float32"
    return None


def part_bytes(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the memory that an adapter takes for one linear layer.

    Args:
        rank: of A and B.
        shape: the layer's inputs and outputs.
        dtype: the type in which A and B are held.
    """
    return sum(_Memory.taken(rank * size, dtype) for size in shape)


def read_adapter(
    name: str, folder: AdapterFolder, modules: AdaptedModules, *, max_rank: int, max_bytes: int
) -> Adapter:
    """Read an adapter, and let its layers be computed. A step may be running if they are computed
    already.

    Raises:
        AdapterRefusedError: it cannot be served.
    """
    config = parse_config(read_config(folder), max_rank)
    adapted = _adapted(config, modules)
    tensors = read_tensors(folder, max_bytes)
    expected = {f"{_PREFIX}{path}.{last}" for path in adapted for last in (_A, _B)}
    _check_names(expected, set(tensors))
    # Of all layers first, before anything is converted.
    for path in adapted:
        _check_tensors(path, config.rank_of(path), modules.shapes[path], tensors)
    nbytes = sum(
        part_bytes(config.rank_of(path), modules.shapes[path], _held_type(path, tensors))
        for path in adapted
    )
    if nbytes > max_bytes:
        raise no_room(nbytes, max_bytes)
    memory = _Memory(nbytes)
    parts, digest = {}, blake2b(digest_size=32, person=b"adapter")
    for path in sorted(adapted):
        dtype = _held_type(path, tensors)
        a, b = (tensors.pop(f"{_PREFIX}{path}.{last}") for last in (_A, _B))
        scale = config.scale_of(path)
        head = f"{path}\0{a.dtype} {b.dtype} {list(a.shape)} {list(b.shape)}\0"
        digest.update(head.encode() + struct.pack("<d", scale))
        for one in (a, b):
            digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
        parts[path] = LowRankPart(
            memory.take(a, dtype, pack_a), memory.take(b.t(), dtype, pack_b), scale
        )
    weights = AdapterWeights(parts, modules.places, modules.num_layers)
    modules.stand_in(adapted)
    return Adapter(
        name=name,
        digest=digest.digest(),
        rank=max(len(one.a) for one in parts.values()),
        nbytes=nbytes,
        modules=len(parts),
        base_model=config.base_model,
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
        if not _is_finite(one):
            raise AdapterRefusedError(f"{path}.{last} has elements that are NaN or infinite")


def _held_type(path: str, tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the type in which a layer's A and B are held."""
    types = {tensors[f"{_PREFIX}{path}.{last}"].dtype for last in (_A, _B)}
    return torch.bfloat16 if types == {torch.bfloat16} else torch.float32


def _is_finite(one: torch.Tensor) -> bool:
    if one.dtype is torch.bfloat16:
        return not bool(((_bits(one) & _EXPONENT) == _EXPONENT).any())
    return bool(np.isfinite(one.numpy()).all())


def _bits(one: torch.Tensor) -> npt.NDArray[np.int16]:
    """Return the bits of a tensor in bfloat16, which numpy does not know."""
    found: npt.NDArray[np.int16] = one.view(torch.int16).numpy()
    return found


class _Memory:
    """An adapter's memory. It goes back to the system as a whole, with the last of its tensors: of
    many small ones, the C library would keep the pages.

    Tensors are checked and copied by numpy, on one thread: torch would take more threads for each,
    and let them wait for those of a running step.
    """

    def __init__(self, nbytes: int) -> None:
        self._all = zeros_on_demand((nbytes,), torch.uint8).numpy()
        self._used = 0

    @staticmethod
    def taken(count: int, dtype: torch.dtype) -> int:
        """Return how many bytes a tensor of `count` elements takes."""
        return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def take(
        self, one: torch.Tensor, dtype: torch.dtype, pack: Callable[[Matrix, Matrix], None]
    ) -> torch.Tensor:
        """Return a tensor in this memory, as bfloat16 or float32, as `pack` orders it."""
        size, first = one.numel() * dtype.itemsize, self._used
        place = self._all[first : first + size]
        self._used += self.taken(one.numel(), dtype)
        if dtype is torch.bfloat16:
            halves = place.view(np.int16).reshape(one.shape)
            pack(_bits(one), halves)
            return torch.from_numpy(halves).view(torch.bfloat16)
        floats = place.view(np.float32).reshape(one.shape)
        if one.dtype is torch.bfloat16:
            pack((_bits(one).astype(np.uint32) << 16).view(np.float32), floats)
        else:
            pack(one.numpy(), floats)
        return torch.from_numpy(floats)
