"""Copies a step's numbers to the device without waiting for it.

A copy from pageable memory waits until the device has reached it in its queue, that is, for the
step that is being computed. Steps could then not overlap. A copy from pinned memory is only queued,
and torch does not reuse that memory before the copy is done. `to_device` copies whatever a step
needs from the host's arrays. `engine.runner.device` has the buffers that are filled repeatedly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    values: npt.ArrayLike, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Queue a copy of an array to a device, without waiting for it.

    Args:
        values: an array, or anything that numpy converts to one. On a CPU the tensor may share its
            memory.
        device: the device of the tensor.
        dtype: the dtype of the tensor, or None for the array's. The conversion runs on the device.
    """
    array: npt.NDArray[Any] = np.ascontiguousarray(values)
    host = torch.from_numpy(array)
    if device.type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
    return host if dtype is None else host.to(dtype)
