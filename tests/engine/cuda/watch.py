"""Watches what a computation asks of a CUDA device, where there is none.

What is on the device has a shape and no contents (torch's FakeTensorMode, with "cuda" for a
device); what is on the host is real.

    operation ─▶ Watch ─┬─ it waits for the device, or copies in its way ─▶ DeviceFault
                        ├─ an operation of ours ─▶ its own code, whose Triton launches are counted
                        ├─ the host's alone ─▶ computed
                        └─ the device's ─▶ counted if it launches something, then its shape

Views and metadata launch nothing. An operation of torch counts as one launch, though some (a sort)
launch several kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.native.torch_library import FUNCTIONS

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Properties:
    """A device's properties, by torch's names for them."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    total_memory: int


HOPPER = Properties(
    name="a stand-in for an H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 << 10,
    total_memory=80 << 30,
)
AMPERE = Properties(
    name="a stand-in for an A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    shared_memory_per_block_optin=163 << 10,
    total_memory=80 << 30,
)
ADA = Properties(
    name="a stand-in for an L40S or an RTX 4090",
    major=8,
    minor=9,
    multi_processor_count=128,
    shared_memory_per_block_optin=99 << 10,
    total_memory=24 << 30,
)

Launched = Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any]], None]
"""Gets a Triton kernel, its grid, and what it is launched with."""

_WAITS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "transformers::grouped_mm_fallback",
    }
)
"""Operations that read what is on the device: `.item()`, `.tolist()`, `bool(tensor)`, and shapes
that depend on contents.
"""
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy"})
_INDEXING = frozenset(
    {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_"}
    | {"aten::_index_put_impl_", "aten::_unsafe_index_put"}
)
_FILLS = frozenset(
    {"aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_"}
)
_NO_KERNEL = frozenset(
    {
        "aten::_reshape_alias",
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::lift_fresh",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::set_",
    }
)
"""Besides views."""
_OURS = "headrace::"
_INSIDE = (__file__, str(Path(torch.__file__).parent))
"""Where the functions are that nobody asks about."""


class DeviceFault(RuntimeError):
    """Something that a step must not do. A RuntimeError, as that of torch's own sync debug mode."""


class Watch(TorchDispatchMode):
    """See the module. Use it through `fake_cuda`.

    Attributes:
        launches: what was launched, by name: torch's operations, and Triton kernels.
        guards: in how many blocks that make a tensor's device the current one this is.
        copies: how many pinned copies went to the device.
        faults: what was raised as DeviceFault, in case somebody catches it.
        is_on: whether faults are raised; setting things up may copy as it likes.
        allows_copies: whether pinned copies from the host are fine: around a step they are, in a
            captured forward pass they are not.
        downloads: fills the host's side of a pinned copy from the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.guards = 0
        self.copies = 0
        self.faults: list[str] = []
        self.is_on = False
        self.allows_copies = True
        self.downloads: Callable[[torch.Tensor], None] = lambda host: None
        self._pinned: dict[int, torch.Tensor] = {}

    @contextmanager
    def watching(self, *, allows_copies: bool = True) -> Iterator[None]:
        """A block in which faults are raised."""
        before = self.is_on, self.allows_copies
        self.is_on, self.allows_copies = True, allows_copies
        try:
            yield
        finally:
            self.is_on, self.allows_copies = before

    @contextmanager
    def guarding(self, tensor: torch.Tensor) -> Iterator[None]:
        """Stands for `torch.cuda.device_of`."""
        self.guards += 1
        try:
            yield
        finally:
            self.guards -= 1

    def fault(self, what: str) -> None:
        """Raises DeviceFault if faults are raised."""
        if self.is_on:
            self.faults.append(f"{what}, in {_caller()}")
            raise DeviceFault(self.faults[-1])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name.startswith("prim::"):  # a tensor's device
            return func(*args, **kwargs)
        if name in ("aten::is_pinned", "aten::pin_memory", "aten::_pin_memory"):
            return self._is_pinned(args[0]) if name == "aten::is_pinned" else self._pin(args[0])
        if kwargs.get("pin_memory"):
            with unset_fake_temporarily():
                return self._keep(func(*args, **{**kwargs, "pin_memory": False}))
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if _is_of_host(tensors, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name.startswith(_OURS):
            with self:
                return FUNCTIONS[name.removeprefix(_OURS)](*args, **kwargs)
        if name not in _WAITS:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._check(name, args, tensors)
        if name in _COPIES and len({_place(one) for one in _ends(name, args, kwargs)}) > 1:
            return self._copy(name, args, kwargs)
        if not func.is_view and name not in _NO_KERNEL:
            self.launches.append(name.partition("::")[2])
        return func(*args, **kwargs)

    # ---- copies --------------------------------------------------------------------------------

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and _memory(tensor) in self._pinned

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            return self._keep(tensor.clone())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember memory as pinned. It is kept, so that its address stays its own."""
        self._pinned[_memory(tensor)] = tensor
        return tensor

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A copy between the host and the device."""
        is_new = name == "aten::_to_copy"
        source = args[0] if is_new else args[1]
        target = None if is_new else args[0]
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if source.device.type == "cuda":
            if waits or target is None or not self._is_pinned(target):
                self.fault(f"a copy to the host waits: {tuple(source.shape)}")
            if target is None:
                with unset_fake_temporarily():
                    return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            with unset_fake_temporarily():
                self.downloads(target)
            return target
        if waits or not self._is_pinned(source):
            self.fault(f"a copy from pageable memory waits: {tuple(source.shape)}")
        if not self.allows_copies:
            self.fault(f"a copy from the host: {tuple(source.shape)}")
        self.copies += 1
        if target is not None:
            return target
        dtype = kwargs.get("dtype") or source.dtype
        return torch.empty(source.shape, dtype=dtype, device=CUDA)

    # ---- faults --------------------------------------------------------------------------------

    def _check(self, name: str, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> None:
        """Raises DeviceFault for what waits, apart from copies."""
        if name in _WAITS:
            self.fault(f"{name} waits for the device")
        elif name in _INDEXING:
            indices = [one for one in args[1] if one is not None]
            if any(one.device.type == "cpu" and one.dim() for one in indices):
                self.fault(f"{name}: its indices are on the host")
            of_host = len(args) > 2 and args[2].device.type == "cpu"
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                # Only with a number of the host's is it a masked_fill.
                is_fill = of_host and args[2].numel() == 1 and not any(args[3:])
                if not is_fill:
                    self.fault(f"{name} by a mask waits for the device")
            elif of_host:
                self.fault(f"{name}: its value is in pageable memory on the host")
        elif name == "aten::where" and any(one.device.type == "cpu" for one in tensors):
            self.fault(f"{name}: a number is in pageable memory on the host")
        elif name in _FILLS and tensors[-1].dim() == 0 and tensors[-1].device.type == "cuda":
            self.fault(f"{name} reads its value and waits for the device")
        elif name == "aten::repeat_interleave" and len(tensors) == 1:
            self.fault(f"{name} by counts waits for the device")
        elif name == "aten::_grouped_mm":
            types = {one.dtype for one in tensors if one.is_floating_point()}
            has_kernel = torch.cuda.get_device_capability()[0] in (9, 10)
            if types != {torch.bfloat16} or not has_kernel:
                self.fault(f"{name} in {types} waits for the device")


def _place(where: torch.device | str | None) -> str:
    return "cpu" if where is None else torch.device(where).type


def _ends(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.device, torch.device]:
    """Where a copy comes from, and where it goes to."""
    if name == "aten::_to_copy":
        return args[0].device, torch.device(kwargs.get("device") or args[0].device)
    return args[1].device, args[0].device


def _is_of_host(
    tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether neither arguments nor results are on the device."""
    wanted = [kwargs.get("device"), *(one for one in args if isinstance(one, torch.device))]
    return all(_place(one) == "cpu" for one in wanted) and not any(
        isinstance(one, FakeTensor) for one in tensors
    )


def _caller() -> str:
    """The function outside of torch that asked for the operation at hand."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_qualname


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Event:
    """A point in the queue of a device that computes nothing."""

    def record(self, stream: object = None) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


@contextmanager
def fake_cuda(
    watch: Watch, launched: Launched | None = None, properties: Properties = HOPPER
) -> Iterator[None]:
    """A block in which there is a CUDA device without contents.

    Args:
        watch: watches it.
        launched: is told of every launch of a Triton kernel, besides the watch.
        properties: the device's, as torch tells them.
    """

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        watch.launches.append(kernel.fn.__name__)
        if not watch.guards:
            watch.fault(f"{kernel.fn.__name__} goes to the current device, whichever that is")
        if launched is not None:
            launched(kernel, grid, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton") is not None:
            patch.setattr("triton.runtime.jit.JITFunction.run", run)
        patch.setattr(torch.cuda, "device_of", watch.guarding)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        capability = (properties.major, properties.minor)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        patch.setattr(torch.cuda, "Event", _Event)
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            yield


def to_fake_cuda(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Move a model as `model.to("cuda", dtype)` does: parameters and buffers, in place. Call it
    within `fake_cuda`.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            wanted = dtype if tensor.is_floating_point() else None
            moved[id(tensor)] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=wanted or tensor.dtype, device=CUDA
            )
        return moved[id(tensor)]

    kept = []  # so that no id is reused
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                kept.append(parameter)
                module._parameters[name] = torch.nn.Parameter(move(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                kept.append(buffer)
                module._buffers[name] = move(buffer)
