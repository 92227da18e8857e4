"""Blocks of KV state in host memory and on disk: what is found again is right, and what goes is what should."""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llamaq.worker.core.cache_scope import PUBLIC, Scope, namespace_key
from llamaq.worker.kv_cache.blocks.block import (
    BLOCK_BYTES,
    FILE_BYTES,
    Block,
    BlockHeader,
    EraseBlock,
    TokenSpan,
    WriteBlock,
)
from llamaq.worker.kv_cache.blocks.block_store import BlockStore

ROOMY = 10**9
A, B = Scope("a"), Scope("b")


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def data_of(tokens: bytes, scope: Scope, end: int) -> bytes:
    """Data that tells for whom and for which prefix it was made; of lengths that differ."""
    owner = "public" if end <= scope.public else f"of {scope.namespace}"
    made = hashlib.sha256(owner.encode() + b"|" + tokens[: 4 * end]).digest()
    return made[: 8 + end % 9]


def fill(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> list[Block | None]:
    packed = pack(tokens)
    return [
        store.insert(packed, scope, span, data_of(packed, scope, span.end))
        for span in store.missing_spans(packed, scope)
    ]


def found(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> int:
    return store.match(pack(tokens), scope).n_tokens


def is_in_host(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> bool:
    return all(block.data is not None for block in store.match(pack(tokens), scope).blocks)


def spans(*borders: int) -> list[TokenSpan]:
    return [TokenSpan(start, end) for start, end in itertools.pairwise(borders)]


def room_for(n_blocks: int, n_bytes: int = 8) -> int:
    return n_blocks * (BLOCK_BYTES + n_bytes)


def put_block(store: BlockStore, tokens: Sequence[int], n_bytes: int = 8, scope: Scope = A) -> Block | None:
    """Store what is missing, each block with so many bytes; returns the last."""
    packed, block = pack(tokens), None
    for span in store.missing_spans(packed, scope):
        block = store.insert(packed, scope, span, bytes(n_bytes))
    return block


# ---- what is cut, shared and found


def test_a_prompt_is_cut_into_blocks_and_its_tail_is_kept_too() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    assert store.missing_spans(pack(range(10)), A) == spans(0, 4, 8, 10)
    assert all(fill(store, range(10)))
    assert store.missing_spans(pack(range(10)), A) == []
    assert found(store, range(10)) == 10
    store.check_integrity()


def test_conversations_with_one_beginning_share_its_blocks() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert store.missing_spans(pack([1, 2, 3, 4, 5, 6, 7, 7, 7]), A) == spans(4, 8, 9)
    fill(store, [1, 2, 3, 4, 5, 6, 7, 7, 7])
    assert len(store) == 5


def test_a_query_that_leaves_inside_a_block_uses_it_in_part() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, range(10))
    assert found(store, [0, 1, 2, 3, 4, 5, 99]) == 6
    assert found(store, [0, 1, 2]) == 3
    assert found(store, [99]) == 0
    assert not store.match(b"", A)


def test_where_states_cannot_be_cut_only_whole_blocks_are_used() -> None:
    store = BlockStore(4, ROOMY, can_cut=False)
    fill(store, range(10))
    assert found(store, [0, 1, 2, 3, 4, 5, 99]) == 4
    assert found(store, range(9)) == 8
    assert store.missing_spans(pack(range(9)), A) == spans(8, 9), "a longer tail does not stand for a shorter one"


def test_a_longer_tail_supersedes_a_shorter_one_that_it_goes_on_from() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = fill(store, [1, 2])
    fill(store, [1, 9])
    (longer,) = fill(store, [1, 2, 3])
    assert shorter is not None
    assert longer is not None
    assert shorter not in store
    assert longer in store
    assert len(store) == 2, "the one that parts inside the block stays"
    assert store.missing_spans(pack([1, 2]), A) == [], "what is stored as a part of a longer one needs nothing"
    store.check_integrity()


def test_a_superseded_block_that_a_transfer_uses_stays_until_it_is_evicted() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = fill(store, [1, 2])
    chain = store.match(pack([1, 2]), A)
    store.pin(chain)
    fill(store, [1, 2, 3])
    assert shorter is not None
    assert shorter in store
    assert shorter.data is not None
    store.check_integrity()


def test_whole_sequences_are_one_block_each_and_used_up_to_where_they_agree() -> None:
    store = BlockStore(None, ROOMY, can_cut=True)
    fill(store, [1, 2, 3, 4, 5])
    fill(store, [1, 2, 9])
    assert len(store) == 2
    assert found(store, [1, 2, 3, 9]) == 3
    assert found(store, [1, 2, 9, 9]) == 3
    assert store.match(pack([1, 2, 9, 9]), A).blocks[0].end == 3


def test_whole_sequences_that_cannot_be_cut_are_used_by_what_goes_on_from_all_of_them() -> None:
    store = BlockStore(None, ROOMY, can_cut=False)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 5, 1], [1, 2, 4]):
        fill(store, tokens)
    assert len(store) == 4, "a shorter one serves where a longer one cannot"
    assert found(store, [1, 2, 3, 4, 7]) == 4
    assert found(store, [1, 2, 3, 5]) == 2
    assert found(store, [1]) == 0


def test_of_equal_covers_the_block_that_is_used_whole_is_taken() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, [1, 2, 3, 4], Scope("b", 4))
    fill(store, [1, 2])
    chain = store.match(pack([1, 2, 9]), Scope("a", 2))
    assert (chain.n_tokens, chain.blocks[0].end) == (2, 2)


# ---- who may share


def test_namespaces_share_nothing_but_what_both_declare_public() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, range(10), Scope("a", 6))
    assert store.missing_spans(pack(range(10)), Scope("b", 6)) == spans(6, 10)
    assert found(store, range(10), Scope("b", 6)) == 6
    assert found(store, range(10), Scope("b", 5)) == 5
    assert found(store, range(10), Scope("b")) == 0
    assert found(store, range(10), Scope("a", 6)) == 10
    assert found(store, range(10), Scope("a")) == 0, "who declares nothing public uses nothing that is"


def test_a_namespace_uses_its_own_tokens_whatever_it_declares_now() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, range(10))
    assert found(store, range(10), Scope("a", 6)) == 10
    assert found(store, range(10), Scope("b", 6)) == 0


def test_no_namespace_is_taken_for_another_or_for_the_public() -> None:
    names = ["", "public", "namespace:", "a", "a ", "A", "\udc80", "ä", PUBLIC.hex(), PUBLIC.decode("latin-1")]
    keys = {namespace_key(name) for name in names}
    assert len(keys) == len(names)
    assert PUBLIC not in keys
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, range(6), Scope("", 6))
    assert found(store, range(6), Scope("")) == 0
    assert found(store, range(6), Scope("x", 6)) == 6


def test_a_sequence_saved_whole_is_public_only_if_all_of_it_is() -> None:
    store = BlockStore(None, ROOMY, can_cut=True)
    fill(store, range(6), Scope("a", 6))
    fill(store, range(8), Scope("a", 7))
    assert found(store, range(8), Scope("b", 8)) == 6
    assert found(store, range(8), Scope("b", 5)) == 5
    assert found(store, range(8), Scope("a", 8)) == 8


def test_a_longer_public_block_does_not_stand_for_one_that_private_tokens_go_on_from() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    fill(store, [1, 2, 3, 4], Scope("a", 4))
    assert store.missing_spans(pack([1, 2, 3, 4, 5, 6]), Scope("a", 2)) == spans(0, 2, 6)
    fill(store, [1, 2, 3, 4, 5, 6], Scope("a", 2))
    assert found(store, [1, 2, 3, 4, 5, 6], Scope("b", 4)) == 4
    assert found(store, [1, 2, 3, 4, 5, 6], Scope("a", 2)) == 6
    store.check_integrity()


# ---- what goes


def test_what_was_used_longest_ago_goes_first_and_tails_before_beginnings() -> None:
    store = BlockStore(2, room_for(4), can_cut=True)
    put_block(store, [1, 1, 2, 2])
    put_block(store, [5, 5, 6, 6])
    store.touch(store.match(pack([1, 1, 2, 2]), A))
    put_block(store, [7, 7])
    assert [found(store, query) for query in ([1, 1, 2, 2], [5, 5, 6, 6], [7, 7])] == [4, 2, 2]
    put_block(store, [8, 8])
    assert [found(store, query) for query in ([1, 1, 2, 2], [5, 5], [7, 7], [8, 8])] == [4, 0, 2, 2]
    assert len(store) == 4
    store.check_integrity()


def test_a_conversation_loses_its_tail_for_a_few_cells_not_all_of_it() -> None:
    store = BlockStore(2, room_for(10), can_cut=True)
    put_block(store, range(20))
    put_block(store, [77])
    assert found(store, range(20)) == 18


def test_a_conversation_larger_than_memory_keeps_its_beginning() -> None:
    store = BlockStore(2, room_for(3), can_cut=True)
    assert put_block(store, range(20)) is None
    assert found(store, range(20)) == 6
    assert store.host_bytes == room_for(3)
    store.check_integrity()


def test_data_larger_than_all_memory_is_not_kept_and_evicts_nothing() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    put_block(store, [1, 1, 2, 2])
    assert put_block(store, [9, 9], room_for(2)) is None
    assert found(store, [1, 1, 2, 2]) == 4
    assert len(store) == 2


def test_a_block_whose_beginning_went_meanwhile_is_not_kept() -> None:
    store = BlockStore(2, room_for(1), can_cut=True)
    tokens = pack([1, 1, 2, 2])
    first, second = store.missing_spans(tokens, A)
    store.insert(tokens, A, first, bytes(8))
    put_block(store, [9, 9])
    assert store.insert(tokens, A, second, bytes(8)) is None
    assert found(store, [9, 9]) == 2
    store.check_integrity()


def test_parts_of_one_prompt_are_put_in_their_order_or_not_kept() -> None:
    store = BlockStore(2, ROOMY, can_cut=True)
    tokens = pack(range(6))
    first, second, third = store.missing_spans(tokens, A)
    assert store.insert(tokens, A, first, bytes(8)) is not None
    assert store.insert(tokens, A, third, bytes(8)) is None
    assert store.insert(tokens, B, second, bytes(8)) is None
    assert store.insert(tokens, A, second, bytes(8)) is not None
    assert store.insert(tokens, A, third, bytes(8)) is not None
    assert found(store, range(6)) == 6


def test_a_block_is_not_put_below_one_whose_file_was_lost() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    tokens = pack(range(4))
    first, second = store.missing_spans(tokens, A)
    block = store.insert(tokens, A, first, bytes(8))
    assert block is not None
    store.mark_file_lost(block)
    assert store.insert(tokens, A, second, bytes(8)) is None
    assert len(store) == 0
    store.check_integrity()


def test_a_span_that_is_no_part_of_the_prompt_is_a_defect() -> None:
    store = BlockStore(4, ROOMY, can_cut=True)
    with pytest.raises(ValueError, match="is not a block of these"):
        store.insert(pack(range(10)), A, TokenSpan(0, 5), b"")
    with pytest.raises(ValueError, match="at least one token"):
        BlockStore(0, ROOMY, can_cut=True)


def test_putting_again_what_is_there_changes_nothing_but_counts_as_use() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    first = put_block(store, [1, 1])
    put_block(store, [2, 2])
    assert store.insert(pack([1, 1]), A, TokenSpan(0, 2), bytes(8)) is first
    put_block(store, [3, 3])
    assert [found(store, query) for query in ([1, 1], [2, 2], [3, 3])] == [2, 0, 2]


def test_what_is_put_below_a_beginning_counts_as_use_of_it() -> None:
    store = BlockStore(2, room_for(3), can_cut=True)
    put_block(store, [1, 1])
    put_block(store, [2, 2])
    put_block(store, [1, 1, 3, 3])
    put_block(store, [4, 4])
    assert [found(store, query) for query in ([1, 1, 3, 3], [2, 2], [4, 4])] == [4, 0, 2]


def test_what_a_transfer_uses_does_not_go_until_the_last_one_is_done() -> None:
    store = BlockStore(2, room_for(2), can_cut=True)
    put_block(store, [1, 1, 2, 2])
    chain = store.match(pack([1, 1, 2, 2]), A)
    store.pin(chain)
    store.pin(chain)
    assert put_block(store, [3, 3]) is None, "there is no room beside what is in use"
    store.unpin(chain)
    assert put_block(store, [3, 3]) is None
    store.unpin(chain)
    assert put_block(store, [3, 3]) is not None
    assert found(store, [1, 1, 2, 2]) == 2
    store.check_integrity()


def test_a_chain_that_has_gone_cannot_be_pinned() -> None:
    store = BlockStore(2, room_for(1), can_cut=True)
    put_block(store, [1, 1])
    chain = store.match(pack([1, 1]), A)
    put_block(store, [2, 2])
    with pytest.raises(LookupError):
        store.pin(chain)
    store.touch(chain)
    store.check_integrity()


# ---- disk


def test_what_leaves_memory_is_written_after_all_before_it() -> None:
    store = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = put_block(store, [1, 1]), put_block(store, [1, 1, 2, 2])
    assert store.drain_disk_operations() == []
    put_block(store, [3, 3])
    orders = store.drain_disk_operations()
    assert [type(order) for order in orders] == [WriteBlock, WriteBlock]
    assert [order.block for order in orders] == [one, two]
    assert one is not None
    assert two is not None
    assert (one.data, one.on_disk) == (bytes(8), True), "written early, so that its child's file has a parent"
    assert (two.data, two.on_disk) == (None, True)
    assert repr(two) == f"<Block {two.name.hex()[:8]} [2, 4) disk pins=0>"
    assert found(store, [1, 1, 2, 2]) == 4
    assert store.drain_disk_operations() == []
    assert repr(store) == (
        f"<BlockStore 3 blocks, host {room_for(2)}/{room_for(2)} bytes, disk {store.disk_bytes}/{ROOMY} bytes>"
    )
    store.check_integrity()


def test_what_was_read_stays_in_memory_if_there_is_room_and_need_not_be_written_again() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = put_block(store, [1, 1])
    two = put_block(store, [2, 2])
    store.drain_disk_operations()
    assert one is not None
    assert two is not None
    store.store_in_host(one, bytes(8))
    assert (one.data, two.data) == (bytes(8), None)
    assert [order.block for order in store.drain_disk_operations()] == [two]
    assert store.drain_disk_operations() == []
    store.store_in_host(two, bytes(9))
    assert found(store, [2, 2]) == 2
    assert not is_in_host(store, [2, 2]), "it was not what was stored"
    store.store_in_host(two, bytes(8))
    assert is_in_host(store, [2, 2])
    assert not is_in_host(store, [1, 1])
    assert store.drain_disk_operations() == []
    store.check_integrity()


def test_a_transfer_keeps_in_memory_what_it_has_read() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    put_block(store, [1, 1])
    put_block(store, [2, 2])
    chain = store.match(pack([1, 1]), A)
    store.pin(chain)
    store.store_in_host(chain.blocks[0], bytes(8))
    put_block(store, [3, 3])
    assert is_in_host(store, [1, 1])
    assert not is_in_host(store, [3, 3])
    store.check_integrity()


def test_what_is_larger_than_the_disk_with_all_before_it_evicts_no_file() -> None:
    store = BlockStore(2, room_for(2), 2 * _file_bytes(2), can_cut=True)
    put_block(store, [8, 8])
    put_block(store, [9, 9])
    put_block(store, [1, 1, 2, 2])
    assert len(store.drain_disk_operations()) == 2
    put_block(store, [1, 1, 2, 2, 3, 3])
    assert store.drain_disk_operations() == []
    assert [found(store, query) for query in ([8, 8], [9, 9], range(1))] == [2, 2, 0]
    store.check_integrity()


def test_the_disk_gives_up_what_arrived_or_was_used_longest_ago() -> None:
    file_bytes = _file_bytes(2)
    store = BlockStore(2, room_for(1), 2 * file_bytes, can_cut=True)
    blocks = [put_block(store, [n, n]) for n in range(4)]
    assert [found(store, [n, n]) for n in range(4)] == [0, 2, 2, 2]
    orders = store.drain_disk_operations()
    assert [type(order) for order in orders] == [WriteBlock, WriteBlock, EraseBlock, WriteBlock]
    assert orders[2].block is blocks[0]
    assert store.disk_bytes == 2 * file_bytes
    assert len(store) == 3
    store.check_integrity()


def test_a_file_that_is_not_good_takes_what_is_below_it_along() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    put_block(store, [1, 1, 2, 2, 3, 3])
    put_block(store, [9, 9])
    store.drain_disk_operations()
    chain = store.match(pack([1, 1, 2, 2, 3, 3]), A)
    store.pin(chain)
    store.mark_file_lost(chain.blocks[1])
    assert found(store, [1, 1, 2, 2, 3, 3]) == 2
    assert {order.block for order in store.drain_disk_operations()} == set(chain.blocks[1:])
    store.unpin(chain)
    store.mark_file_lost(chain.blocks[1])
    assert store.drain_disk_operations() == []
    store.check_integrity()


def test_what_lies_in_memory_below_a_bad_file_goes_too() -> None:
    store = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = put_block(store, [1, 1])
    put_block(store, [9, 9])
    put_block(store, [1, 1, 2, 2])
    assert one is not None
    store.mark_file_lost(one)
    assert [found(store, query) for query in ([1, 1, 2, 2], [9, 9])] == [0, 2]
    assert (len(store), store.host_bytes) == (1, 0)
    store.check_integrity()


def test_a_block_in_memory_that_could_not_be_written_stays_there() -> None:
    store = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = put_block(store, [1, 1]), put_block(store, [1, 1, 2, 2])
    put_block(store, [3, 3])
    assert one is not None
    assert two is not None
    store.drain_disk_operations()
    store.mark_file_lost(one)
    assert one in store
    assert not one.on_disk
    assert two not in store, "its data was on disk alone, below a block that has no file"
    store.check_integrity()


def test_without_memory_blocks_go_straight_to_disk() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    put_block(store, [1, 1, 2, 2])
    assert found(store, [1, 1, 2, 2]) == 4
    assert (store.host_bytes, len(store.drain_disk_operations())) == (0, 2)
    chain = store.match(pack([1, 1]), A)
    assert not is_in_host(store, [1, 1])
    store.store_in_host(chain.blocks[0], bytes(8))
    assert store.host_bytes == 0
    store.check_integrity()


def test_spilling_writes_what_was_used_last_as_far_as_the_disk_has_room() -> None:
    store = BlockStore(2, ROOMY, 3 * _file_bytes(2), can_cut=True)
    put_block(store, [1, 1, 2, 2])
    put_block(store, [5, 5, 6, 6])
    store.write_host_to_disk()
    written = [order.block for order in store.drain_disk_operations()]
    assert written == [*store.match(pack([5, 5, 6, 6]), A).blocks, store.match(pack([1, 1]), A).blocks[0]]
    store.check_integrity()


def test_a_tree_is_rebuilt_from_files_and_orphans_are_told() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    scope = Scope("a", 3)
    put_block(store, range(9), scope=scope)
    put_block(store, [7, 7], scope=B)
    stored = [stored_block(order.block, 5.0) for order in store.drain_disk_operations()]
    lost = next(each for each in stored if (each.start, each.end) == (3, 5))
    again = BlockStore(2, ROOMY, ROOMY, can_cut=True)
    orphans = again.rebuild(each for each in reversed(stored) if each is not lost)
    assert sorted((each.start, each.end) for each in orphans) == [(5, 7), (7, 9)]
    assert found(again, range(9), scope) == 3
    assert found(again, [7, 7], B) == 2
    assert again.disk_bytes == sum(len(each.tokens) + each.n_bytes + FILE_BYTES for each in stored) - 3 * _file_bytes(2)
    again.check_integrity()


def test_files_of_another_cut_have_no_place() -> None:
    store = BlockStore(4, 0, ROOMY, can_cut=True)
    put_block(store, range(4))
    stored = [stored_block(order.block, 5.0) for order in store.drain_disk_operations()]
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).rebuild(stored) == stored
    assert BlockStore(None, ROOMY, ROOMY, can_cut=True).rebuild(stored) == []
    private, public = stored_block_of([1, 2]), replace(stored_block_of([3, 4]), namespace=PUBLIC)
    below = replace(public, parent_name=private.name, start=2, end=4)
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).rebuild([private, below]) == [below]


def test_of_too_many_files_the_oldest_go_but_none_before_what_needs_it() -> None:
    store = BlockStore(2, 0, ROOMY, can_cut=True)
    put_block(store, [1, 1, 2, 2])
    put_block(store, [5, 5])
    put_block(store, [6, 6])
    times = [1.0, 9.0, 5.0, 4.0]  # the first one's file is the oldest, but its child was used last
    stored = [stored_block(order.block, at) for order, at in zip(store.drain_disk_operations(), times, strict=True)]
    again = BlockStore(2, 0, 3 * _file_bytes(2), can_cut=True)
    assert again.rebuild(stored) == []
    assert [found(again, query) for query in ([1, 1, 2, 2], [5, 5], [6, 6])] == [4, 2, 0]
    assert [type(order) for order in again.drain_disk_operations()] == [EraseBlock]
    again.check_integrity()


def _file_bytes(n_tokens: int, n_bytes: int = 8) -> int:
    return FILE_BYTES + 4 * n_tokens + n_bytes


def stored_block(block: Block, modified_s: float) -> BlockHeader:
    assert block.parent is not None
    return BlockHeader(
        block.name, block.parent.name, block.namespace, block.tokens, block.start, block.end, block.n_bytes, modified_s
    )


def stored_block_of(tokens: Sequence[int]) -> BlockHeader:
    store = BlockStore(len(tokens), 0, ROOMY, can_cut=True)
    block = put_block(store, tokens)
    assert block is not None
    return stored_block(block, 1.0)


def test_no_operation_scans_the_blocks() -> None:
    store = BlockStore(1, room_for(5_000), 5_000 * _file_bytes(1), can_cut=True)
    started_s = time.perf_counter()
    for n in range(15_000):
        tokens = pack([n % 7, n])
        for span in store.missing_spans(tokens, A):
            store.insert(tokens, A, span, bytes(8))
        store.touch(store.match(tokens, A))
        store.drain_disk_operations()
    assert time.perf_counter() - started_s < 60, "with a scan in each it would be minutes"
    assert len(store) > 7_500
    store.check_integrity()
