"""A step's inputs at fixed addresses, as a captured step needs them.

    InputBatch ──fill──▶ host[set], one int64 array ──one copy──▶ one int64 tensor on the device:
                                                     the numbers of the choice, the model's inputs
                                                     and the fields of the attention's metadata

What depends on the lengths of contexts comes last, for all groups one after another. The copy ends
where a step's own content ends.

The tokens of the last step come before that tensor, where captured steps write them. A step gathers
its own tokens from both by index. So captured work itself carries over tokens that are not on the
host yet.

All shapes share these arrays, and divide them differently. On CUDA the host's arrays are pinned.
There is one array for each set of input buffers, because a copy may still be in progress when the
next step is filled in. One tensor on the device is enough, because copies and computation are
queued in order on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import (
    ENTRIES,
    AttentionBackend,
    AttentionMetadata,
    StaticShape,
)
from engine.kv_cache.groups import LayerGroup
from engine.runner.device import StepDevice
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import KVTensors
from engine.sampling.plain import COLUMNS, GREEDY_ROW, PlainChoice, PlainKind

_Array = TypeVar("_Array", npt.NDArray[np.int64], torch.Tensor)


class InputMemory:
    """The arrays that all shapes share.

    Attributes:
        host: one int64 array for each set of input buffers.
        tokens: int64 [R] on the device, the tokens of the last step.
        whole: one tensor with `tokens`, followed by `target`.
        target: the copy of a host array on the device.
        device: queues copies.
    """

    def __init__(
        self,
        shapes: Iterable[StaticShape],
        backend: AttentionBackend,
        kv: KVTensors,
        device: StepDevice,
        num_input_buffers: int,
        most_requests: int,
    ) -> None:
        size = max(sum(_sizes(shape, backend, kv).values()) for shape in shapes)
        self.device = device
        self.host = tuple(device.host_buffer(size) for _ in range(num_input_buffers))
        self.whole = torch.zeros(most_requests + size, dtype=torch.int64, device=kv.device)
        self.tokens, self.target = self.whole[:most_requests], self.whole[most_requests:]

    def numbers(self, rows: int) -> torch.Tensor:
        """Return the numbers of a step's choice on the device, at the same address for every shape.

        They are float64 [R, COLUMNS]; see `engine.sampling.plain`.
        """
        return self.target[: rows * COLUMNS].view(torch.float64).view(rows, COLUMNS)


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
        sizes = _sizes(shape, backend, kv)
        self._fixed = sum(sizes.values()) - sizes[ENTRIES]
        self._arrays = tuple(_split(host.numpy(), sizes) for host in memory.host)
        self._tensors = _split(memory.target, sizes)
        first = len(memory.tokens) + shape.requests * COLUMNS
        self._own = np.arange(first, first + shape.tokens)

    def clear(self) -> None:
        """Set the inputs to those of a step without requests, which writes only to the null
        block.
        """
        self._memory.whole.zero_()

    def fill(
        self,
        inputs: InputBatch,
        buffers: int,
        carried: tuple[Sequence[int], Sequence[int]],
        choice: PlainChoice | None,
    ) -> None:
        """Write a step, which must fit the shape, and queue its copy to the device.

        Args:
            inputs: the step.
            buffers: the index of the set of buffers.
            carried: the step's tokens that are not on the host yet, as their indices in this step
                and in the last step's tokens.
            choice: how captured work chooses the tokens, or None if it does not.
        """
        arrays, shape, count = self._arrays[buffers], self.shape, inputs.num_tokens
        if choice is not None and choice.kind is not PlainKind.GREEDY:
            numbers = arrays["numbers"].view(np.float64).reshape(-1, COLUMNS)
            numbers[: len(choice.numbers)] = choice.numbers
            numbers[len(choice.numbers) :] = GREEDY_ROW
        arrays["sources"][:] = self._own
        targets, sources = carried
        arrays["sources"][targets] = sources
        for name, values in (("token_ids", inputs.token_ids), ("positions", inputs.positions)):
            arrays[name][:count] = values[:count]
            arrays[name][count:] = 0
        if not shape.is_decode:
            rows = inputs.logit_rows
            arrays["logit_rows"][: len(rows)] = rows
            arrays["logit_rows"][len(rows) :] = 0
        used = 0
        for group, layout in zip(self._kv.groups, inputs.layouts, strict=True):
            fields, like = _of_group(arrays, group), _keys(self._kv, group)
            used = self._backend.fill_static(layout, group.window, like, fields, used)
        memory, total = self._memory, self._fixed + used
        memory.device.upload(memory.host[buffers][:total], memory.target[:total])

    def token_ids(self) -> torch.Tensor:
        """Gather the token ids [T] on the device. This is part of the captured work."""
        known = self._memory.whole.index_select(0, self._tensors["sources"])
        # A request without a valid token fails when its step is collected; this step must not fail.
        return known.clamp_(min=0)

    @property
    def positions(self) -> torch.Tensor:
        """The positions, [T]."""
        return self._tensors["positions"]

    @property
    def logit_rows(self) -> torch.Tensor | None:
        """The rows of the logits, [R], padded with 0. None if the logits of all tokens are
        needed.
        """
        return self._tensors.get("logit_rows")

    def metadata(self) -> list[AttentionMetadata]:
        """Compute the groups' metadata on the device. This is part of the captured work."""
        return [
            self._backend.static_metadata(
                self.shape,
                group.window,
                _of_group(self._tensors, group),
                _keys(self._kv, group),
            )
            for group in self._kv.groups
        ]


def _sizes(shape: StaticShape, backend: AttentionBackend, kv: KVTensors) -> dict[str, int]:
    # The numbers come first, so that they have one place in all shapes.
    sizes = {"numbers": shape.requests * COLUMNS, "token_ids": shape.tokens}
    sizes |= {"sources": shape.tokens, "positions": shape.tokens}
    if not shape.is_decode:
        sizes["logit_rows"] = shape.requests
    entries = 0
    for group in kv.groups:
        fields = backend.static_fields(shape, group.window, _keys(kv, group))
        entries += fields.get(ENTRIES, 0)
        fixed = {name: size for name, size in fields.items() if name != ENTRIES}
        sizes.update({f"{group.group_id}.{name}": size for name, size in fixed.items()})
    return {**sizes, ENTRIES: entries}


def _split(array: _Array, sizes: Mapping[str, int]) -> dict[str, _Array]:
    parts, end = {}, 0
    for name, size in sizes.items():
        parts[name] = array[end : end + size]
        end += size
    return parts


def _of_group(parts: Mapping[str, _Array], group: LayerGroup) -> dict[str, _Array]:
    """Return one group's fields, by the backend's names for them."""
    prefix = f"{group.group_id}."
    own = {
        name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)
    }
    return {**own, ENTRIES: parts[ENTRIES]}


def _keys(kv: KVTensors, group: LayerGroup) -> torch.Tensor:
    return kv.caches[group.layers[0]].keys
