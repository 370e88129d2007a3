"""Returns the memory of tensors to the system before their owner does.

A checkpoint's weights are in one mapping of its file, which remains until the last weight is freed.
Code that copies them one by one would end up with both copies in memory. So the pages of each
weight are returned as soon as it is no longer needed.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch


class Pages:
    """Tracks the addresses of tensors and returns their pages to the system."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the addresses of the tensors.

        Args:
            tensors: all tensors that may be needed later. Those on other devices are ignored.
        """
        places = [
            (tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes())
            if not tensor.is_contiguous()
            else (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.numel()
        ]
        self._starts = sorted(start for start, _ in places)
        self._ends = sorted(end for _, end in places)

    def give_back(self, tensor: torch.Tensor) -> int:
        """Return the whole pages of a tensor whose elements are no longer read.

        Args:
            tensor: one of the constructor's tensors. Nothing happens if another one shares its
                memory, or if it is not contiguous.

        Returns:
            The number of bytes given back.
        """
        if sys.platform != "linux":  # elsewhere MADV_DONTNEED means something else
            return 0
        if not tensor.is_contiguous():
            return 0
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        # Find the tensors that overlap it: they begin before its end and do not end before its
        # beginning.
        sharing = bisect.bisect_left(self._starts, end) - bisect.bisect_right(self._ends, start)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if sharing != 1 or length <= 0:
            return 0
        result = ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED
        )
        return 0 if result else length


def trim() -> None:
    """Return freed memory that the C library still holds to the system."""
    if sys.platform != "linux":
        return
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if give is not None:
        give(0)
