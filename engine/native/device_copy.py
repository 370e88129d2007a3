"""How a step's numbers reach the device: without waiting for it.

A copy from pageable memory waits until the device has reached it, that is for the step that is
computed meanwhile: then no step overlaps the next. Memory that torch has pinned is copied in the
queue's order, and torch gives it to nobody else before that has happened. Whatever a step needs of
the host's arrays is copied by `to_device`; `engine.runner.device` has the buffers that are filled
again and again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    values: npt.ArrayLike, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy an array to a device, in the order of its work and without waiting for it.

    Args:
        values: an array, or what numpy makes one of. On a CPU the tensor may share its memory.
        device: where the tensor is wanted.
        dtype: of the tensor; None: the array's. It is converted on the device.
    """
    array: npt.NDArray[Any] = np.ascontiguousarray(values)
    host = torch.from_numpy(array)
    if device.type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
    return host if dtype is None else host.to(dtype)
