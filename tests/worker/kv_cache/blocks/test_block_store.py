"""The block store: which stored prefix a query finds, and which blocks are evicted first."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.executed_lines import count_executed_lines

from llamaq.worker.core.cache_scope import PUBLIC, Scope, namespace_key
from llamaq.worker.kv_cache.blocks.block import (
    BLOCK_BYTES,
    FILE_BYTES,
    Block,
    BlockHeader,
    BlockSpan,
    EraseBlock,
    WriteBlock,
)
from llamaq.worker.kv_cache.blocks.block_store import BlockStore

ROOMY = 10**9
A, B = Scope("a"), Scope("b")


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def data_of(tokens: bytes, scope: Scope, end: int) -> bytes:
    """Return data that is unique for the namespace and the prefix. Its length differs between blocks."""
    owner = "public" if end <= scope.public else f"of {scope.namespace}"
    made = hashlib.sha256(owner.encode() + b"|" + tokens[: 4 * end]).digest()
    return made[: 8 + end % 9]


def insert_all(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> list[Block | None]:
    packed = pack(tokens)
    return [
        store.insert(packed, scope, span, data_of(packed, scope, span.end))
        for span in store.missing_spans(packed, scope)
    ]


def n_matched(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> int:
    return store.match(pack(tokens), scope).n_tokens


def is_in_host(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> bool:
    return all(block.data is not None for block in store.match(pack(tokens), scope).blocks)


def spans(*borders: int) -> list[BlockSpan]:
    return [BlockSpan(start, end) for start, end in itertools.pairwise(borders)]


def room_for(n_blocks: int, n_bytes: int = 8) -> int:
    return n_blocks * (BLOCK_BYTES + n_bytes)


def insert_blocks(store: BlockStore, tokens: Sequence[int], n_bytes: int = 8, scope: Scope = A) -> Block | None:
    """Insert all missing blocks with `n_bytes` of data each. Returns the last block."""
    packed, block = pack(tokens), None
    for span in store.missing_spans(packed, scope):
        block = store.insert(packed, scope, span, bytes(n_bytes))
    return block


def file_bytes(n_tokens: int, n_bytes: int = 8) -> int:
    return FILE_BYTES + 4 * n_tokens + n_bytes


def header_of(block: Block, modified_s: float) -> BlockHeader:
    assert block.parent is not None
    return BlockHeader(
        block.name, block.parent.name, block.namespace, block.tokens, block.start, block.end, block.n_bytes, modified_s
    )


def header_for(tokens: Sequence[int]) -> BlockHeader:
    store = BlockStore(len(tokens), 0, ROOMY, can_cut=True)
    block = insert_blocks(store, tokens)
    assert block is not None
    return header_of(block, 1.0)


# ---- how prompts are cut and matched


def test_a_prompt_is_cut_into_blocks_and_the_last_one_may_be_shorter() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    assert store.missing_spans(pack(range(10)), A) == spans(0, 4, 8, 10)
    assert all(insert_all(store, range(10)))
    assert store.missing_spans(pack(range(10)), A) == []
    assert n_matched(store, range(10)) == 10
    store.check_integrity()


def test_prompts_with_the_same_beginning_share_its_blocks() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert store.missing_spans(pack([1, 2, 3, 4, 5, 6, 7, 7, 7]), A) == spans(4, 8, 9)
    insert_all(store, [1, 2, 3, 4, 5, 6, 7, 7, 7])
    assert len(store) == 5


def test_a_query_that_differs_inside_a_block_matches_the_first_part_of_the_block() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, range(10))
    assert n_matched(store, [0, 1, 2, 3, 4, 5, 99]) == 6
    assert n_matched(store, [0, 1, 2]) == 3
    assert n_matched(store, [99]) == 0
    assert not store.match(b"", A)


def test_blocks_that_cannot_be_cut_match_only_as_a_whole() -> None:
    store = BlockStore(4, ROOMY, can_cut=False)
    insert_all(store, range(10))
    assert n_matched(store, [0, 1, 2, 3, 4, 5, 99]) == 4
    assert n_matched(store, range(9)) == 8
    assert store.missing_spans(pack(range(9)), A) == spans(8, 9), "a longer block is not used in place of a shorter one"


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


def test_whole_sequences_are_one_block_each_and_match_up_to_the_first_difference() -> None:
    store = BlockStore(None, ROOMY, can_cut=True)
    insert_all(store, [1, 2, 3, 4, 5])
    insert_all(store, [1, 2, 9])
    assert len(store) == 2
    assert n_matched(store, [1, 2, 3, 9]) == 3
    assert n_matched(store, [1, 2, 9, 9]) == 3
    assert store.match(pack([1, 2, 9, 9]), A).blocks[0].end == 3


def test_whole_sequences_that_cannot_be_cut_match_only_queries_that_continue_them() -> None:
    store = BlockStore(None, ROOMY, can_cut=False)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 5, 1], [1, 2, 4]):
        insert_all(store, tokens)
    assert len(store) == 4, "a shorter block may match where a longer one does not"
    assert n_matched(store, [1, 2, 3, 4, 7]) == 4
    assert n_matched(store, [1, 2, 3, 5]) == 2
    assert n_matched(store, [1]) == 0


def test_at_equal_length_a_whole_block_is_preferred_to_a_part_of_a_block() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, [1, 2, 3, 4], Scope("b", 4))
    insert_all(store, [1, 2])
    prefix = store.match(pack([1, 2, 9]), Scope("a", 2))
    assert (prefix.n_tokens, prefix.blocks[0].end) == (2, 2)


# ---- which namespaces share blocks


def test_namespaces_share_only_tokens_that_both_declare_public() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, range(10), Scope("a", 6))
    assert store.missing_spans(pack(range(10)), Scope("b", 6)) == spans(6, 10)
    assert n_matched(store, range(10), Scope("b", 6)) == 6
    assert n_matched(store, range(10), Scope("b", 5)) == 5
    assert n_matched(store, range(10), Scope("b")) == 0
    assert n_matched(store, range(10), Scope("a", 6)) == 10
    assert n_matched(store, range(10), Scope("a")) == 0, "a scope without public tokens does not use public blocks"


def test_a_namespace_matches_its_private_tokens_also_when_it_declares_them_public_now() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, range(10))
    assert n_matched(store, range(10), Scope("a", 6)) == 10
    assert n_matched(store, range(10), Scope("b", 6)) == 0


def test_no_two_namespaces_and_no_namespace_and_public_have_the_same_key() -> None:
    names = ["", "public", "namespace:", "a", "a ", "A", "\udc80", "ä", PUBLIC.hex(), PUBLIC.decode("latin-1")]
    keys = {namespace_key(name) for name in names}
    assert len(keys) == len(names)
    assert PUBLIC not in keys
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, range(6), Scope("", 6))
    assert n_matched(store, range(6), Scope("")) == 0
    assert n_matched(store, range(6), Scope("x", 6)) == 6


def test_a_sequence_in_one_block_is_public_only_if_all_its_tokens_are() -> None:
    store = BlockStore(None, ROOMY, can_cut=True)
    insert_all(store, range(6), Scope("a", 6))
    insert_all(store, range(8), Scope("a", 7))
    assert n_matched(store, range(8), Scope("b", 8)) == 6
    assert n_matched(store, range(8), Scope("b", 5)) == 5
    assert n_matched(store, range(8), Scope("a", 8)) == 8


def test_private_blocks_are_stored_below_a_public_block_that_ends_where_they_begin() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    insert_all(store, [1, 2, 3, 4], Scope("a", 4))
    assert store.missing_spans(pack([1, 2, 3, 4, 5, 6]), Scope("a", 2)) == spans(0, 2, 6)
    insert_all(store, [1, 2, 3, 4, 5, 6], Scope("a", 2))
    assert n_matched(store, [1, 2, 3, 4, 5, 6], Scope("b", 4)) == 4
    assert n_matched(store, [1, 2, 3, 4, 5, 6], Scope("a", 2)) == 6
    store.check_integrity()


# ---- which blocks are evicted


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


# ---- disk


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
    store.store_in_host(two, bytes(9))
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
