"""A longer block replaces the block whose tokens are its beginning, if there is room for it."""

from __future__ import annotations

from tests.support.block_stores import (
    ROOMY,
    A,
    file_bytes,
    insert_all,
    insert_blocks,
    is_in_host,
    n_matched,
    pack,
    room_for,
)

from llamaq.worker.kv_cache.blocks.block_store import BlockStore


def test_a_longer_last_block_replaces_a_block_whose_tokens_are_its_beginning() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = insert_all(store, [1, 2])
    insert_all(store, [1, 9])
    (longer,) = insert_all(store, [1, 2, 3])
    assert shorter is not None
    assert longer is not None
    assert shorter not in store
    assert longer in store
    assert len(store) == 2, "the block with another token inside is kept"
    assert store.missing_spans(pack([1, 2]), A) == [], "the tokens are stored as a part of a longer block"
    store.check_integrity()


def test_a_pinned_block_is_not_replaced_by_a_longer_one() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = insert_all(store, [1, 2])
    prefix = store.match(pack([1, 2]), A)
    store.pin(prefix)
    insert_all(store, [1, 2, 3])
    assert shorter is not None
    assert shorter in store
    assert shorter.data is not None
    store.check_integrity()


def test_a_longer_block_that_cannot_be_stored_replaces_and_evicts_nothing() -> None:
    store = BlockStore(64, room_for(3), can_cut=True)
    insert_blocks(store, [9])
    store.pin(store.match(pack([9]), A))
    insert_blocks(store, range(10))
    insert_blocks(store, [7])
    assert insert_blocks(store, range(64), room_for(2)) is None, "the pinned block leaves no room"
    assert [n_matched(store, query) for query in (range(10), [7], [9])] == [10, 1, 1]
    store.check_integrity()


def test_a_longer_block_that_cannot_be_stored_on_disk_replaces_and_evicts_nothing() -> None:
    store = BlockStore(64, 0, 3 * file_bytes(1), can_cut=True)
    insert_blocks(store, [9])
    store.pin(store.match(pack([9]), A))
    insert_blocks(store, [1])
    insert_blocks(store, [7])
    assert insert_blocks(store, [1, 2], 2 * file_bytes(1)) is None, "the pinned file leaves no room"
    assert [n_matched(store, query) for query in ([1], [7], [9])] == [1, 1, 1]
    store.check_integrity()


def test_a_longer_block_takes_the_room_of_the_block_that_it_replaces() -> None:
    store = BlockStore(64, room_for(2), can_cut=True)
    insert_blocks(store, [9])
    insert_blocks(store, range(10))
    assert insert_blocks(store, range(64)) is not None
    assert [n_matched(store, query) for query in (range(64), [9])] == [64, 1]
    store.check_integrity()


def test_a_longer_block_on_disk_takes_the_room_of_the_block_that_it_replaces() -> None:
    store = BlockStore(64, 0, file_bytes(1) + file_bytes(2), can_cut=True)
    insert_blocks(store, [9])
    insert_blocks(store, [1])
    assert insert_blocks(store, [1, 2]) is not None
    assert [n_matched(store, query) for query in ([1, 2], [9])] == [2, 1]
    store.check_integrity()


def test_a_block_beside_pinned_ones_that_leave_no_room_in_host_memory_is_stored_on_disk() -> None:
    store = BlockStore(64, room_for(2), ROOMY, can_cut=True)
    insert_blocks(store, [9])
    store.pin(store.match(pack([9]), A))
    insert_blocks(store, [7])
    block = insert_blocks(store, [1], room_for(1))
    assert block is not None
    assert (block.data, block.on_disk) == (None, True)
    store.store_in_host(block, bytes(room_for(1)))
    assert block.data is None
    assert is_in_host(store, [7])
    store.check_integrity()
