"""Memory that is laid out before saved cells need it: lent, given back, lent again, and never more than allowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.kv_data import footprint
from llamaq.worker.core.tokens import pack
from llamaq.worker.kv_cache.blocks.block import BLOCK_BYTES
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload.host_arena import PAGE_BYTES, SLAB_BYTES, HostArena

SLOT_TOKENS = 64
CELL_BYTES = 1000
SLOT_BYTES = (SLOT_TOKENS * CELL_BYTES // PAGE_BYTES + 2) * PAGE_BYTES
N_SLOTS = 20


@pytest.fixture
def memory() -> Iterator[HostArena]:
    made = HostArena(N_SLOTS * SLOT_BYTES, SLOT_TOKENS)
    yield made
    made.close()


def take(memory: HostArena, n_tokens: int = SLOT_TOKENS) -> memoryview | None:
    return memory.allocate(n_tokens * CELL_BYTES, n_tokens)


def wait_for(come: Callable[[], object]) -> None:
    ends_s = time.monotonic() + 30
    while not come():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def lay_out(memory: HostArena, n_slots: int = N_SLOTS) -> None:
    """Say how large cells are, and wait until the slots are there."""
    take(memory)
    wait_for(lambda: n_free(memory) == n_slots)


def n_free(memory: HostArena) -> int:
    return int(repr(memory).split()[-2])


def test_none_is_ready_before_it_is_known_how_large_cells_are(memory: HostArena) -> None:
    assert take(memory) is None


def test_slots_are_lent_once_and_no_more_than_there_may_be(memory: HostArena) -> None:
    lay_out(memory)
    lent = [take(memory) for _ in range(N_SLOTS + 5)]
    assert [each is None for each in lent] == [False] * N_SLOTS + [True] * 5
    for number, each in enumerate(lent[:N_SLOTS]):
        assert each is not None
        assert len(each) == SLOT_TOKENS * CELL_BYTES
        each[:] = bytes([number]) * len(each)
    for number, each in enumerate(lent[:N_SLOTS]):
        assert each is not None
        assert set(each) == {number}


@pytest.mark.parametrize(
    "hold", [lambda lent: lent, lambda lent: lent[5:9], lambda lent: np.frombuffer(lent, np.uint8)]
)
def test_a_slot_comes_back_when_nobody_refers_to_it(memory: HostArena, hold: Callable[[memoryview], object]) -> None:
    lay_out(memory)
    lent = [take(memory) for _ in range(N_SLOTS)]
    first = lent[0]
    assert first is not None
    held = hold(first)
    del first
    lent.clear()
    again = [take(memory) for _ in range(N_SLOTS)]
    assert [each is None for each in again] == [False] * (N_SLOTS - 1) + [True]
    del held
    assert take(memory) is not None


def test_no_slot_is_left_half_empty_and_none_is_too_small(memory: HostArena) -> None:
    lay_out(memory)
    assert take(memory, SLOT_TOKENS // 2) is None
    assert take(memory, SLOT_TOKENS - 10) is not None
    assert take(memory, SLOT_TOKENS + 10) is None


def test_the_next_slab_is_there_before_the_last_one_is_used_up() -> None:
    memory = HostArena(10 * SLAB_BYTES, SLOT_TOKENS)
    n_slab = SLAB_BYTES // SLOT_BYTES
    lay_out(memory, n_slab)
    lent = []
    for _ in range(n_slab + 8):
        lent.append(take(memory))
        if len(lent) == n_slab - 4:
            wait_for(lambda: n_free(memory) > n_slab)
    assert all(each is not None for each in lent)
    memory.close()


def test_a_block_counts_all_of_the_slot_that_it_lies_in(memory: HostArena) -> None:
    lay_out(memory)
    store = BlockStore(SLOT_TOKENS, 10 * SLOT_BYTES, can_cut=True)
    tokens, scope = pack(range(SLOT_TOKENS - 10)), Scope()
    lent = take(memory, SLOT_TOKENS - 10)
    assert lent is not None
    assert footprint(lent) == footprint(lent[3:]) == SLOT_BYTES
    assert footprint(b"four") == 4
    store.insert(tokens, scope, store.missing_spans(tokens, scope)[0], lent)
    assert store.host_bytes == SLOT_BYTES + BLOCK_BYTES
    store.check_integrity()
