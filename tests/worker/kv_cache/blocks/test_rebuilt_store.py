"""A block store is rebuilt from the headers of the files on disk."""

from __future__ import annotations

from dataclasses import replace

from tests.support.block_stores import ROOMY, B, file_bytes, header_for, header_of, insert_blocks, n_matched

from llamaq.worker.core.cache_scope import PUBLIC, Scope
from llamaq.worker.kv_cache.blocks.block import FILE_BYTES, EraseBlock
from llamaq.worker.kv_cache.blocks.block_store import BlockStore


def test_a_store_is_rebuilt_from_headers_and_returns_the_orphans() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    scope = Scope("a", 3)
    insert_blocks(store, range(9), scope=scope)
    insert_blocks(store, [7, 7], scope=B)
    headers = [header_of(operation.block, 5.0) for operation in store.drain_disk_operations()]
    lost = next(header for header in headers if (header.start, header.end) == (3, 5))
    rebuilt = BlockStore(2, ROOMY, ROOMY, can_cut=True)
    orphans = rebuilt.rebuild(header for header in reversed(headers) if header is not lost)
    assert sorted((header.start, header.end) for header in orphans) == [(5, 7), (7, 9)]
    assert n_matched(rebuilt, range(9), scope) == 3
    assert n_matched(rebuilt, [7, 7], B) == 2
    assert rebuilt.disk_bytes == sum(
        len(header.tokens) + header.n_bytes + FILE_BYTES for header in headers
    ) - 3 * file_bytes(2)
    rebuilt.check_integrity()


def test_headers_with_another_block_size_are_orphans() -> None:
    store = BlockStore(4, 0, ROOMY, can_cut=True)
    insert_blocks(store, range(4))
    headers = [header_of(operation.block, 5.0) for operation in store.drain_disk_operations()]
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).rebuild(headers) == headers
    assert BlockStore(None, ROOMY, ROOMY, can_cut=True).rebuild(headers) == []
    private, public = header_for([1, 2]), replace(header_for([3, 4]), namespace=PUBLIC)
    below = replace(public, parent_name=private.name, start=2, end=4)
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).rebuild([private, below]) == [below]


def test_a_rebuild_evicts_the_oldest_files_but_no_parent_before_its_child() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    insert_blocks(store, [5, 5])
    insert_blocks(store, [6, 6])
    times = [1.0, 9.0, 5.0, 4.0]  # the first file is the oldest, but its child was used last
    headers = [
        header_of(operation.block, at) for operation, at in zip(store.drain_disk_operations(), times, strict=True)
    ]
    rebuilt = BlockStore(2, 0, 3 * file_bytes(2), can_cut=True)
    assert rebuilt.rebuild(headers) == []
    assert [n_matched(rebuilt, query) for query in ([1, 1, 2, 2], [5, 5], [6, 6])] == [4, 2, 0]
    assert [type(operation) for operation in rebuilt.drain_disk_operations()] == [EraseBlock]
    rebuilt.check_integrity()
