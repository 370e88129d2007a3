"""A step's inputs at fixed addresses, as a captured step needs them.

    InputBatch ──fill──▶ host[set], one int64 array ──one copy──▶ one int64 tensor on the device:
                                                     its parts are the model's inputs and the
                                                     fields of the attention's metadata

All shapes share these arrays, and divide them differently. On CUDA the host's arrays are pinned.
There is one for each set of input buffers, because a copy may still be in progress when the next
step is filled in. One tensor on the device is enough, because copies and computation are queued in
order on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionBackend, AttentionMetadata, StaticShape
from engine.kv_cache.groups import LayerGroup
from engine.runner.device import StepDevice
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import KVTensors

_Array = TypeVar("_Array", npt.NDArray[np.int64], torch.Tensor)


class InputMemory:
    """The arrays that all shapes share.

    Attributes:
        host: one int64 array for each set of input buffers.
        target: their copy on the device.
        device: queues copies.
    """

    def __init__(
        self,
        shapes: Iterable[StaticShape],
        backend: AttentionBackend,
        kv: KVTensors,
        device: StepDevice,
        num_input_buffers: int,
    ) -> None:
        size = max(sum(_sizes(shape, backend, kv.groups).values()) for shape in shapes)
        self.device = device
        self.host = tuple(device.host_buffer(size) for _ in range(num_input_buffers))
        self.target = torch.zeros(size, dtype=torch.int64, device=kv.device)


class StaticInputs:
    """The inputs of all steps of one shape.

    Attributes:
        shape: the shape.
    """

    def __init__(
        self, shape: StaticShape, backend: AttentionBackend, kv: KVTensors, memory: InputMemory
    ) -> None:
        self.shape = shape
        self._backend = backend
        self._kv = kv
        self._memory = memory
        sizes = _sizes(shape, backend, kv.groups)
        self._total = sum(sizes.values())
        self._arrays = tuple(_split(host.numpy(), sizes) for host in memory.host)
        self._tensors = _split(memory.target, sizes)

    def clear(self) -> None:
        """Make them those of a step without requests, of which only the null block is written."""
        self._memory.target.zero_()

    def fill(self, inputs: InputBatch, buffers: int) -> None:
        """Write a step, which must fit the shape, and queue its copy to the device."""
        arrays, shape, count = self._arrays[buffers], self.shape, inputs.num_tokens
        for name, values in (("token_ids", inputs.token_ids), ("positions", inputs.positions)):
            arrays[name][:count] = values[:count]
            arrays[name][count:] = 0
        if not shape.is_decode:
            rows = inputs.logit_rows
            arrays["logit_rows"][: len(rows)] = rows
            arrays["logit_rows"][len(rows) :] = 0
        for group, layout in zip(self._kv.groups, inputs.layouts, strict=True):
            fields = _of_group(arrays, group)
            self._backend.fill_static(layout, group.window, shape, fields)
        memory, total = self._memory, self._total
        memory.device.upload(memory.host[buffers][:total], memory.target[:total])

    @property
    def token_ids(self) -> torch.Tensor:
        """[T]."""
        return self._tensors["token_ids"]

    @property
    def positions(self) -> torch.Tensor:
        """[T]."""
        return self._tensors["positions"]

    @property
    def logit_rows(self) -> torch.Tensor | None:
        """[R], padded with 0; None: the logits of all tokens are needed."""
        return self._tensors.get("logit_rows")

    def metadata(self) -> list[AttentionMetadata]:
        """The groups' metadata, computed on the device; this is part of the captured work."""
        return [
            self._backend.static_metadata(
                self.shape,
                group.window,
                _of_group(self._tensors, group),
                self._kv.caches[group.layers[0]].keys,
            )
            for group in self._kv.groups
        ]


def _sizes(
    shape: StaticShape, backend: AttentionBackend, groups: Iterable[LayerGroup]
) -> dict[str, int]:
    """The number of elements of each input, by name."""
    sizes = {"token_ids": shape.tokens, "positions": shape.tokens}
    if not shape.is_decode:
        sizes["logit_rows"] = shape.requests
    for group in groups:
        fields = backend.static_fields(shape, group.window)
        sizes.update({f"{group.group_id}.{name}": size for name, size in fields.items()})
    return sizes


def _split(array: _Array, sizes: Mapping[str, int]) -> dict[str, _Array]:
    """An array's parts, one after the other."""
    parts, end = {}, 0
    for name, size in sizes.items():
        parts[name] = array[end : end + size]
        end += size
    return parts


def _of_group(parts: Mapping[str, _Array], group: LayerGroup) -> dict[str, _Array]:
    """One group's fields, by the names that the backend gave them."""
    prefix = f"{group.group_id}."
    return {
        name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)
    }
