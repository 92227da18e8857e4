"""Which blocks are written to disk, which files are evicted, and what a lost file means."""

from __future__ import annotations

from tests.support.block_stores import ROOMY, A, file_bytes, insert_blocks, is_in_host, n_matched, pack, room_for

from llamaq.worker.kv_cache.blocks.block import EraseBlock, WriteBlock
from llamaq.worker.kv_cache.blocks.block_store import BlockStore


def test_a_block_that_host_memory_evicts_is_written_after_its_ancestors() -> None:
    store = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = insert_blocks(store, [1, 1]), insert_blocks(store, [1, 1, 2, 2])
    assert store.drain_disk_operations() == []
    insert_blocks(store, [3, 3])
    operations = store.drain_disk_operations()
    assert [type(operation) for operation in operations] == [WriteBlock, WriteBlock]
    assert [operation.block for operation in operations] == [one, two]
    assert one is not None
    assert two is not None
    assert (one.data, one.on_disk) == (bytes(8), True), (
        "the block is written although it stays in host memory, because the file of its child needs it"
    )
    assert (two.data, two.on_disk) == (None, True)
    assert repr(two) == f"<Block {two.name.hex()[:8]} [2, 4) disk pins=0>"
    assert n_matched(store, [1, 1, 2, 2]) == 4
    assert store.drain_disk_operations() == []
    assert repr(store) == (
        f"<BlockStore 3 blocks, host {room_for(2)}/{room_for(2)} bytes, disk {store.disk_bytes}/{ROOMY} bytes>"
    )
    store.check_integrity()


def test_a_block_read_from_disk_is_stored_in_host_memory_and_not_written_again() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = insert_blocks(store, [1, 1])
    two = insert_blocks(store, [2, 2])
    store.drain_disk_operations()
    assert one is not None
    assert two is not None
    store.store_in_host(one, bytes(8))
    assert (one.data, two.data) == (bytes(8), None)
    assert [operation.block for operation in store.drain_disk_operations()] == [two]
    assert store.drain_disk_operations() == []
    for length in (7, 9):
        store.store_in_host(two, bytes(length))
        assert n_matched(store, [2, 2]) == 2
        assert not is_in_host(store, [2, 2]), "the data had another length"
    store.store_in_host(two, bytes(8))
    assert is_in_host(store, [2, 2])
    assert not is_in_host(store, [1, 1])
    assert store.drain_disk_operations() == []
    store.check_integrity()


def test_a_pinned_block_read_from_disk_stays_in_host_memory() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    insert_blocks(store, [1, 1])
    insert_blocks(store, [2, 2])
    prefix = store.match(pack([1, 1]), A)
    store.pin(prefix)
    store.store_in_host(prefix.blocks[0], bytes(8))
    insert_blocks(store, [3, 3])
    assert is_in_host(store, [1, 1])
    assert not is_in_host(store, [3, 3])
    store.check_integrity()


def test_a_block_that_is_larger_than_the_disk_with_its_ancestors_evicts_no_file() -> None:
    store = BlockStore(2, room_for(2), 2 * file_bytes(2), can_cut=True)
    insert_blocks(store, [8, 8])
    insert_blocks(store, [9, 9])
    insert_blocks(store, [1, 1, 2, 2])
    assert len(store.drain_disk_operations()) == 2
    insert_blocks(store, [1, 1, 2, 2, 3, 3])
    assert store.drain_disk_operations() == []
    assert [n_matched(store, query) for query in ([8, 8], [9, 9], range(1))] == [2, 2, 0]
    store.check_integrity()


def test_the_disk_evicts_other_files_before_those_of_the_ancestors_of_a_new_file() -> None:
    store = BlockStore(2, room_for(1), 2 * file_bytes(2), can_cut=True)
    for tokens in ([1, 1], [9, 9], [1, 1, 2, 2]):
        insert_blocks(store, tokens)
    assert [tokens for tokens in ([1, 1], [9, 9]) if not is_in_host(store, tokens)] == [[1, 1], [9, 9]]
    insert_blocks(store, [3, 3])
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [9, 9], [3, 3])] == [4, 0, 2]
    store.check_integrity()


def test_a_block_is_removed_when_the_disk_has_only_room_for_its_ancestors() -> None:
    store = BlockStore(2, room_for(1, 16), file_bytes(2), can_cut=True)
    insert_blocks(store, [1, 1])
    insert_blocks(store, [9, 9], n_bytes=16)  # too large for the disk
    insert_blocks(store, [1, 1, 2, 2])
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [9, 9])] == [4, 0]
    insert_blocks(store, [3, 3])
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [3, 3])] == [2, 2]
    store.check_integrity()


def test_a_block_is_removed_when_all_files_are_pinned() -> None:
    store = BlockStore(2, room_for(1), file_bytes(2), can_cut=True)
    insert_blocks(store, [1, 1])
    insert_blocks(store, [2, 2])
    store.pin(store.match(pack([1, 1]), A))
    insert_blocks(store, [3, 3])
    assert [n_matched(store, query) for query in ([1, 1], [2, 2], [3, 3])] == [2, 0, 2]
    store.check_integrity()


def test_the_disk_evicts_the_least_recently_used_file() -> None:
    store = BlockStore(2, room_for(1), 2 * file_bytes(2), can_cut=True)
    blocks = [insert_blocks(store, [n, n]) for n in range(4)]
    assert [n_matched(store, [n, n]) for n in range(4)] == [0, 2, 2, 2]
    operations = store.drain_disk_operations()
    assert [type(operation) for operation in operations] == [WriteBlock, WriteBlock, EraseBlock, WriteBlock]
    assert operations[2].block is blocks[0]
    assert store.disk_bytes == 2 * file_bytes(2)
    assert len(store) == 3
    store.check_integrity()


def test_a_lost_file_removes_the_descendants_of_its_block() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    insert_blocks(store, [1, 1, 2, 2, 3, 3])
    insert_blocks(store, [9, 9])
    store.drain_disk_operations()
    prefix = store.match(pack([1, 1, 2, 2, 3, 3]), A)
    store.pin(prefix)
    store.mark_file_lost(prefix.blocks[1])
    assert n_matched(store, [1, 1, 2, 2, 3, 3]) == 2
    assert {operation.block for operation in store.drain_disk_operations()} == set(prefix.blocks[1:])
    store.unpin(prefix)
    store.mark_file_lost(prefix.blocks[1])
    assert store.drain_disk_operations() == []
    store.check_integrity()


def test_a_lost_file_removes_descendants_in_host_memory_too() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = insert_blocks(store, [1, 1])
    insert_blocks(store, [9, 9])
    insert_blocks(store, [1, 1, 2, 2])
    assert one is not None
    store.mark_file_lost(one)
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [9, 9])] == [0, 2]
    assert (len(store), store.host_bytes) == (1, 0)
    store.check_integrity()


def test_a_block_in_host_memory_that_could_not_be_written_stays_in_host_memory() -> None:
    store = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = insert_blocks(store, [1, 1]), insert_blocks(store, [1, 1, 2, 2])
    insert_blocks(store, [3, 3])
    assert one is not None
    assert two is not None
    store.drain_disk_operations()
    store.mark_file_lost(one)
    assert one in store
    assert not one.on_disk
    assert two not in store, "its data was only on disk, and its parent has no file now"
    store.check_integrity()


def test_without_host_memory_blocks_are_written_to_disk_at_once() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    assert n_matched(store, [1, 1, 2, 2]) == 4
    assert (store.host_bytes, len(store.drain_disk_operations())) == (0, 2)
    prefix = store.match(pack([1, 1]), A)
    assert not is_in_host(store, [1, 1])
    store.store_in_host(prefix.blocks[0], bytes(8))
    assert store.host_bytes == 0
    store.check_integrity()


def test_write_host_to_disk_plans_the_newest_blocks_while_the_disk_has_room() -> None:
    store = BlockStore(2, ROOMY, 3 * file_bytes(2), can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    insert_blocks(store, [5, 5, 6, 6])
    store.write_host_to_disk()
    written = [operation.block for operation in store.drain_disk_operations()]
    assert written == [*store.match(pack([5, 5, 6, 6]), A).blocks, store.match(pack([1, 1]), A).blocks[0]]
    store.check_integrity()
