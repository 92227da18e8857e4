from __future__ import annotations

import gc

import numpy as np

from llamaq.worker.engine.pinned_memory import allocate_pinned
from llamaq.worker.offload.host_arena import HostArena

N_BYTES = 2**20


def test_memory_can_be_written_and_stays_valid_as_long_as_a_view_of_it() -> None:
    view = allocate_pinned(N_BYTES).reshape(16, -1)[3]
    gc.collect()
    view[:] = 7
    others = [allocate_pinned(N_BYTES) for _ in range(4)]
    for one in others:
        one.fill(1)
    assert np.all(view == 7)


def test_an_arena_of_such_memory_grows_and_shrinks() -> None:
    arena = HostArena(4 * N_BYTES, 64, allocate_pinned)
    while arena.n_bytes == 0:
        arena.allocate(N_BYTES // 64, 64)
    buffers: list[memoryview] = []
    while len(buffers) < 4:
        if (buffer := arena.allocate(N_BYTES // 64, 64)) is not None:
            buffer[:] = bytes(len(buffer))
            buffers.append(buffer)
    arena.close()
