"""The C library's arenas are few, however many threads there are; what was freed is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from service.admission.freed_memory import ARENAS

_COUNT = """
import ctypes, threading
from service.admission.freed_memory import bound_arenas

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


_FREE = """
import asyncio, os, psutil
from concurrent.futures import ThreadPoolExecutor
from service.admission import freed_memory as memory

def taken():
    return psutil.Process().memory_info().rss >> 20

async def main():
    memory.DELAY_S = 0.0
    giving = memory.GivingBack(ThreadPoolExecutor(1))
    before = taken()
    blocks = [os.urandom(1000) for _ in range(100_000)]
    kept = blocks[::100]  # what stays in between keeps the heap from shrinking by itself
    del blocks
    giving.freed(memory.ENOUGH_BYTES - 1)
    await asyncio.sleep(0.1)
    assert taken() - before > 64, "too little: nothing was given back"
    giving.freed(1)
    async with asyncio.timeout(20):
        while taken() - before > 32:
            await asyncio.sleep(0.01)
    assert len(kept) == 1000

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries give back otherwise")
def test_once_enough_was_freed_it_is_given_back() -> None:
    subprocess.run([sys.executable, "-c", _FREE], check=True, timeout=60)
