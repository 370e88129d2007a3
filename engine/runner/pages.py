"""Gives memory back before its owner does.

A checkpoint's weights lie in one mapping of its file, which holds all of them until the last one
goes: whoever copies them one by one would have both in memory in the end. So the pages of each are
given back as soon as nobody needs it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch


class Pages:
    """Knows where tensors lie."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """See the module.

        Args:
            tensors: all that may be needed later. Those on other devices do not count.
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
        """Let go of the whole pages of a tensor whose elements nobody reads any more.

        Args:
            tensor: one of those that were given. If another one shares its memory, or it does not
                lie in one piece, nothing happens.

        Returns:
            How many bytes were given back.
        """
        if sys.platform != "linux":  # elsewhere MADV_DONTNEED means something else
            return 0
        if not tensor.is_contiguous():
            return 0
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        # Of all tensors, those that begin before its end and do not end before its beginning.
        sharing = bisect.bisect_left(self._starts, end) - bisect.bisect_right(self._ends, start)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if sharing != 1 or length <= 0:
            return 0
        result = ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED
        )
        return 0 if result else length
