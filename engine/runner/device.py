"""The device operations that a runner needs in addition to computing: asynchronous copies, and
events that tell when queued work is done.
"""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override


class DeviceEvent(Protocol):
    """A point in the queue of a device's work."""

    def wait(self) -> None:
        """Wait until all work that was queued before this point is done."""
        ...


class StepDevice(Protocol):
    """Queues copies and events on a device. All work of one device is queued in order."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """Allocate zeros on the host, int64 [size]. `upload` can copy from them without waiting."""
        ...

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy to the device. `host` may change only after waiting for a later event."""
        ...

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy to the host, which is complete after waiting for a later event."""
        ...

    def record(self) -> DeviceEvent:
        """Record an event at this point of the queue."""
        ...


class _Past:
    """An event of a device that computes synchronously."""

    def wait(self) -> None:
        """Return immediately."""


class SynchronousDevice(StepDevice):
    """A CPU, where work is done when its call returns."""

    @override
    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    @override
    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)

    @override
    def download(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    @override
    def record(self) -> DeviceEvent:
        return _Past()


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Wait for the event, but not for work that was queued after it."""
        self._event.synchronize()


class CudaDevice(StepDevice):
    """A CUDA device, through its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    @override
    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host, non_blocking=True)

    @override
    def download(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return host.copy_(source, non_blocking=True)

    @override
    def record(self) -> DeviceEvent:
        return _CudaEvent(torch.cuda.current_stream(self._device))


def step_device(device: torch.device) -> StepDevice:
    """Return the step device for a torch device."""
    return CudaDevice(device) if device.type == "cuda" else SynchronousDevice()
