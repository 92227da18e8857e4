from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import pytest

from llamaq.worker.process.free_heap import return_free_heap

N_BLOCKS, BLOCK_BYTES = 400, 64 * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_blocks_between_used_blocks_leave_the_memory() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last block keeps the end of the heap in use
        library.free(block)
    before = resident_bytes()
    return_free_heap()
    assert before - resident_bytes() > N_BLOCKS * BLOCK_BYTES / 2
    library.free(blocks[-1])
