"""Which blocks host memory stores, and which of them it evicts first."""

from __future__ import annotations

import pytest
from tests.support.block_stores import ROOMY, A, B, file_bytes, insert_blocks, n_matched, pack, room_for
from tests.support.executed_lines import count_executed_lines

from llamaq.worker.kv_cache.blocks.block import BlockSpan
from llamaq.worker.kv_cache.blocks.block_store import BlockStore


def test_the_least_recently_used_block_is_evicted_first_and_children_before_parents() -> None:
    store = BlockStore(2, room_for(4), can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    insert_blocks(store, [5, 5, 6, 6])
    store.touch(store.match(pack([1, 1, 2, 2]), A))
    insert_blocks(store, [7, 7])
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [5, 5, 6, 6], [7, 7])] == [4, 2, 2]
    insert_blocks(store, [8, 8])
    assert [n_matched(store, query) for query in ([1, 1, 2, 2], [5, 5], [7, 7], [8, 8])] == [4, 0, 2, 2]
    assert len(store) == 4
    store.check_integrity()


def test_a_small_insert_evicts_only_the_last_block_of_a_long_prompt() -> None:
    store = BlockStore(2, room_for(10), can_cut=True)
    insert_blocks(store, range(20))
    insert_blocks(store, [77])
    assert n_matched(store, range(20)) == 18


def test_the_beginning_of_a_prompt_larger_than_host_memory_is_stored() -> None:
    store = BlockStore(2, room_for(3), can_cut=True)
    assert insert_blocks(store, range(20)) is None
    assert n_matched(store, range(20)) == 6
    assert store.host_bytes == room_for(3)
    store.check_integrity()


def test_data_larger_than_host_memory_is_not_stored_and_evicts_nothing() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    assert insert_blocks(store, [9, 9], room_for(2)) is None
    assert n_matched(store, [1, 1, 2, 2]) == 4
    assert len(store) == 2


def test_a_block_whose_parent_was_evicted_meanwhile_is_not_stored() -> None:
    store = BlockStore(2, room_for(1), can_cut=True)
    tokens = pack([1, 1, 2, 2])
    first, second = store.missing_spans(tokens, A)
    store.insert(tokens, A, first, bytes(8))
    insert_blocks(store, [9, 9])
    assert store.insert(tokens, A, second, bytes(8)) is None
    assert n_matched(store, [9, 9]) == 2
    store.check_integrity()


def test_spans_are_stored_only_in_the_order_of_the_prompt() -> None:
    store = BlockStore(2, ROOMY, can_cut=True)
    tokens = pack(range(6))
    first, second, third = store.missing_spans(tokens, A)
    assert store.insert(tokens, A, first, bytes(8)) is not None
    assert store.insert(tokens, A, third, bytes(8)) is None
    assert store.insert(tokens, B, second, bytes(8)) is None
    assert store.insert(tokens, A, second, bytes(8)) is not None
    assert store.insert(tokens, A, third, bytes(8)) is not None
    assert n_matched(store, range(6)) == 6


def test_a_block_is_not_stored_below_one_whose_file_was_lost() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    tokens = pack(range(4))
    first, second = store.missing_spans(tokens, A)
    block = store.insert(tokens, A, first, bytes(8))
    assert block is not None
    store.mark_file_lost(block)
    assert store.insert(tokens, A, second, bytes(8)) is None
    assert len(store) == 0
    store.check_integrity()


def test_a_span_that_is_not_a_block_of_the_prompt_is_an_error() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    with pytest.raises(ValueError, match="is not a block of these"):
        store.insert(pack(range(10)), A, BlockSpan(0, 5), b"")
    with pytest.raises(ValueError, match="at least one token"):
        BlockStore(0, ROOMY, can_cut=True)


def test_inserting_a_stored_block_again_counts_as_use() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    first = insert_blocks(store, [1, 1])
    insert_blocks(store, [2, 2])
    assert store.insert(pack([1, 1]), A, BlockSpan(0, 2), bytes(8)) is first
    insert_blocks(store, [3, 3])
    assert [n_matched(store, query) for query in ([1, 1], [2, 2], [3, 3])] == [2, 0, 2]


def test_inserting_a_child_counts_as_use_of_its_parent() -> None:
    store = BlockStore(2, room_for(3), can_cut=True)
    insert_blocks(store, [1, 1])
    insert_blocks(store, [2, 2])
    insert_blocks(store, [1, 1, 3, 3])
    insert_blocks(store, [4, 4])
    assert [n_matched(store, query) for query in ([1, 1, 3, 3], [2, 2], [4, 4])] == [4, 0, 2]


def test_a_pinned_block_is_not_evicted_before_its_last_unpin() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    insert_blocks(store, [1, 1, 2, 2])
    prefix = store.match(pack([1, 1, 2, 2]), A)
    store.pin(prefix)
    store.pin(prefix)
    assert insert_blocks(store, [3, 3]) is None, "pinned blocks leave no room"
    store.unpin(prefix)
    assert insert_blocks(store, [3, 3]) is None
    store.unpin(prefix)
    assert insert_blocks(store, [3, 3]) is not None
    assert n_matched(store, [1, 1, 2, 2]) == 2
    store.check_integrity()


def test_a_prefix_that_was_evicted_cannot_be_pinned() -> None:
    store = BlockStore(2, room_for(1), can_cut=True)
    insert_blocks(store, [1, 1])
    prefix = store.match(pack([1, 1]), A)
    insert_blocks(store, [2, 2])
    with pytest.raises(LookupError):
        store.pin(prefix)
    store.touch(prefix)
    store.check_integrity()


def test_no_operation_scans_all_blocks() -> None:
    store = BlockStore(1, room_for(5_000), 5_000 * file_bytes(1), can_cut=True)

    def insert_and_use(n: int) -> None:
        tokens = pack([n % 7, n])
        for span in store.missing_spans(tokens, A):
            store.insert(tokens, A, span, bytes(8))
        store.touch(store.match(tokens, A))
        store.drain_disk_operations()

    for n in range(15_000):
        insert_and_use(n)
    assert len(store) > 7_500
    n_lines = [count_executed_lines(lambda: insert_and_use(n)) for n in range(15_000, 15_100)]  # noqa: B023
    assert max(n_lines) < 1_000  # a scan has thousands
    store.check_integrity()


def test_a_discarded_branch_takes_the_blocks_before_it_along_up_to_one_that_another_text_continues() -> None:
    store = BlockStore(2, room_for(10), can_cut=True)
    insert_blocks(store, [1, 1, 2, 2, 3, 3, 4, 4])
    insert_blocks(store, [1, 1, 9, 9])
    pinned = store.match(pack([1, 1, 9, 9]), A)
    store.discard_branch(pack([1, 1, 2, 2, 3, 3, 7]), A)
    assert [n_matched(store, query) for query in ([1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 9, 9])] == [2, 4]
    store.pin(pinned)
    store.discard_branch(pack([1, 1]), A)
    assert n_matched(store, [1, 1, 9, 9]) == 4
    store.unpin(pinned)
    store.discard_branch(pack([1, 1]), A)
    assert len(store) == 0
    store.check_integrity()
