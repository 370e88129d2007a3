"""A device that is late: what it was given is used until somebody has waited for it."""

from __future__ import annotations

import torch


class LateEvent:
    """A point behind some uploads and downloads."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._uploads, device.uploads = device.uploads, []
        self._downloads, device.downloads = device.downloads, []
        device.pending += 1

    def wait(self) -> None:
        self._device.pending -= 1
        for buffer, content in self._uploads:
            if not torch.equal(buffer, content):
                raise AssertionError(
                    "an input buffer was overwritten before its step was collected"
                )
        with torch.inference_mode():
            for source, target in self._downloads:
                target.copy_(source)


class LateDevice:
    """Computes at once, but touches the host, to read and to write, when an event is waited for.

    Attributes:
        pending: events that nobody has waited for.
        most_pending: how many there were at once.
    """

    def __init__(self) -> None:
        self.uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.downloads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pending = 0
        self.most_pending = 0

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)
        self.uploads.append((host, host.clone()))

    def download(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(source, -7)
        self.downloads.append((source.clone(), target))
        return target

    def record(self) -> LateEvent:
        event = LateEvent(self)
        self.most_pending = max(self.most_pending, self.pending)
        return event
