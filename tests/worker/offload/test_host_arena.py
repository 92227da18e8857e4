"""The host arena: buffers are allocated in advance, have one owner at a time, and are reused up to the limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.core.saved_cells import footprint
from llamaq.worker.kv_cache.blocks.block import BLOCK_BYTES
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload import host_arena
from llamaq.worker.offload.host_arena import PAGE_BYTES, SLAB_BYTES, HostArena

BUFFER_TOKENS = 64
CELL_BYTES = 1000
BUFFER_BYTES = (BUFFER_TOKENS * CELL_BYTES // PAGE_BYTES + 2) * PAGE_BYTES
N_BUFFERS = 20


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(N_BUFFERS * BUFFER_BYTES, BUFFER_TOKENS)
    yield made
    made.close()


def allocate(arena: HostArena, n_tokens: int = BUFFER_TOKENS) -> memoryview | None:
    return arena.allocate(n_tokens * CELL_BYTES, n_tokens)


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def allocate_slab(arena: HostArena, n_buffers: int = N_BUFFERS) -> None:
    """Set the buffer size by a first allocation, which fails, and wait until the buffers of the slab exist."""
    allocate(arena)
    wait_until(lambda: n_free(arena) == n_buffers)


def n_free(arena: HostArena) -> int:
    return int(repr(arena).split()[-2])


def test_the_first_allocation_fails_because_the_size_of_cells_is_unknown(arena: HostArena) -> None:
    assert allocate(arena) is None


def test_each_buffer_has_one_owner_and_the_arena_stays_within_its_limit(arena: HostArena) -> None:
    allocate_slab(arena)
    buffers = [allocate(arena) for _ in range(N_BUFFERS + 5)]
    assert [buffer is None for buffer in buffers] == [False] * N_BUFFERS + [True] * 5
    for number, buffer in enumerate(buffers[:N_BUFFERS]):
        assert buffer is not None
        assert len(buffer) == BUFFER_TOKENS * CELL_BYTES
        buffer[:] = bytes([number]) * len(buffer)
    for number, buffer in enumerate(buffers[:N_BUFFERS]):
        assert buffer is not None
        assert set(buffer) == {number}


@pytest.mark.parametrize(
    "refer_to", [lambda view: view, lambda view: view[5:9], lambda view: np.frombuffer(view, np.uint8)]
)
def test_a_buffer_becomes_free_when_its_last_reference_is_deleted(
    arena: HostArena, refer_to: Callable[[memoryview], object]
) -> None:
    allocate_slab(arena)
    buffers = [allocate(arena) for _ in range(N_BUFFERS)]
    first = buffers[0]
    assert first is not None
    reference = refer_to(first)
    del first
    buffers.clear()
    again = [allocate(arena) for _ in range(N_BUFFERS)]
    assert [buffer is None for buffer in again] == [False] * (N_BUFFERS - 1) + [True]
    del reference
    assert allocate(arena) is not None


def test_cells_that_do_not_fit_or_fill_less_than_half_of_a_buffer_get_none(arena: HostArena) -> None:
    allocate_slab(arena)
    assert allocate(arena, BUFFER_TOKENS // 2) is None
    assert allocate(arena, BUFFER_TOKENS - 10) is not None
    assert allocate(arena, BUFFER_TOKENS + 10) is None


def test_the_next_slab_is_allocated_before_the_last_one_is_used_up() -> None:
    arena = HostArena(10 * SLAB_BYTES, BUFFER_TOKENS)
    n_slab = SLAB_BYTES // BUFFER_BYTES
    allocate_slab(arena, n_slab)
    buffers = []
    for _ in range(n_slab + 8):
        buffers.append(allocate(arena))
        if len(buffers) == n_slab - 4:
            wait_until(lambda: n_free(arena) > n_slab)
    assert all(buffer is not None for buffer in buffers)
    arena.close()


def test_a_block_counts_the_whole_buffer_of_its_data(arena: HostArena) -> None:
    allocate_slab(arena)
    store = BlockStore(BUFFER_TOKENS, 10 * BUFFER_BYTES, can_cut=True)
    tokens, scope = pack(range(BUFFER_TOKENS - 10)), Scope()
    buffer = allocate(arena, BUFFER_TOKENS - 10)
    assert buffer is not None
    assert footprint(buffer) == footprint(buffer[3:]) == BUFFER_BYTES
    assert footprint(b"four") == 4
    store.insert(tokens, scope, store.missing_spans(tokens, scope)[0], buffer)
    assert store.host_bytes == BUFFER_BYTES + BLOCK_BYTES
    store.check_integrity()


def test_slabs_that_are_not_used_any_more_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "SLAB_BYTES", N_BUFFERS * BUFFER_BYTES)
    arena = HostArena(3 * N_BUFFERS * BUFFER_BYTES, BUFFER_TOKENS)
    buffers: list[memoryview | None] = []
    while arena.n_bytes < 3 * N_BUFFERS * BUFFER_BYTES:
        buffers.append(allocate(arena))
        wait_until(lambda: not arena._is_growing)
    kept = next(buffer for buffer in buffers if buffer is not None)
    kept[:] = b"k" * len(kept)
    buffers.clear()
    for _ in range(5):
        assert allocate(arena, BUFFER_TOKENS // 4) is None, "a short prompt needs no buffer"
    assert arena.n_bytes == N_BUFFERS * BUFFER_BYTES
    assert bytes(kept) == b"k" * len(kept)
    assert allocate(arena) is not None
    arena.close()


def test_an_arena_that_gets_no_memory_says_so_once_and_does_not_try_again(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: list[object] = []

    def refuse(*arguments: object) -> None:
        refusals.append(arguments)
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    assert allocate(arena) is None
    wait_until(lambda: "cache.host_memory_exhausted" in caplog.text)
    assert allocate(arena) is None
    later = threading.Event()
    arena._thread.submit(later.set)  # runs after everything that the second attempt may have started
    assert later.wait(30)
    assert len(refusals) == caplog.text.count("cache.host_memory_exhausted") == 1
