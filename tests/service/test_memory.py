"""The C library's arenas are few, however many threads there are."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from service.memory import ARENAS

_COUNT = """
import ctypes, threading
from service.memory import bound_arenas

assert bound_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(16)

def allocate():
    together.wait()
    assert libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = libc.fopen(b"/dev/stdout", b"w")
assert libc.malloc_info(0, ctypes.c_void_p(out)) == 0
libc.fclose(ctypes.c_void_p(out))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no arenas")
def test_many_threads_share_few_arenas() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True
    )
    assert 1 <= told.stdout.count("<heap nr=") <= ARENAS
