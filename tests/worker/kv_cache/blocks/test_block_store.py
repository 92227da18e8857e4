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
from llamaq.worker.kv_cache.blocks.block import BLOCK_BYTES, FILE_BYTES, Block, Erase, Span, StoredBlock, Write
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


def store(tree: BlockStore, tokens: Sequence[int], scope: Scope = A) -> list[Block | None]:
    packed = pack(tokens)
    return [tree.put(packed, scope, span, data_of(packed, scope, span.end)) for span in tree.missing(packed, scope)]


def found(tree: BlockStore, tokens: Sequence[int], scope: Scope = A) -> int:
    return tree.match(pack(tokens), scope).n_tokens


def spans(*borders: int) -> list[Span]:
    return [Span(start, end) for start, end in itertools.pairwise(borders)]


def room_for(n_blocks: int, n_bytes: int = 8) -> int:
    return n_blocks * (BLOCK_BYTES + n_bytes)


def put_block(tree: BlockStore, tokens: Sequence[int], n_bytes: int = 8, scope: Scope = A) -> Block | None:
    """Store what is missing, each block with so many bytes; returns the last."""
    packed, block = pack(tokens), None
    for span in tree.missing(packed, scope):
        block = tree.put(packed, scope, span, bytes(n_bytes))
    return block


# ---- what is cut, shared and found


def test_a_prompt_is_cut_into_blocks_and_its_tail_is_kept_too() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    assert tree.missing(pack(range(10)), A) == spans(0, 4, 8, 10)
    assert all(store(tree, range(10)))
    assert tree.missing(pack(range(10)), A) == []
    assert found(tree, range(10)) == 10
    tree.check_integrity()


def test_conversations_with_one_beginning_share_its_blocks() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert tree.missing(pack([1, 2, 3, 4, 5, 6, 7, 7, 7]), A) == spans(4, 8, 9)
    store(tree, [1, 2, 3, 4, 5, 6, 7, 7, 7])
    assert len(tree) == 5


def test_a_query_that_leaves_inside_a_block_uses_it_in_part() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, range(10))
    assert found(tree, [0, 1, 2, 3, 4, 5, 99]) == 6
    assert found(tree, [0, 1, 2]) == 3
    assert found(tree, [99]) == 0
    assert not tree.match(b"", A)


def test_where_states_cannot_be_cut_only_whole_blocks_are_used() -> None:
    tree = BlockStore(4, ROOMY, can_cut=False)
    store(tree, range(10))
    assert found(tree, [0, 1, 2, 3, 4, 5, 99]) == 4
    assert found(tree, range(9)) == 8
    assert tree.missing(pack(range(9)), A) == spans(8, 9), "a longer tail does not stand for a shorter one"


def test_a_longer_tail_supersedes_a_shorter_one_that_it_goes_on_from() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = store(tree, [1, 2])
    store(tree, [1, 9])
    (longer,) = store(tree, [1, 2, 3])
    assert shorter is not None
    assert longer is not None
    assert shorter not in tree
    assert longer in tree
    assert len(tree) == 2, "the one that parts inside the block stays"
    assert tree.missing(pack([1, 2]), A) == [], "what is stored as a part of a longer one needs nothing"
    tree.check_integrity()


def test_a_superseded_block_that_a_transfer_uses_stays_until_it_is_evicted() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    (shorter,) = store(tree, [1, 2])
    chain = tree.match(pack([1, 2]), A)
    tree.pin(chain)
    store(tree, [1, 2, 3])
    assert shorter is not None
    assert shorter in tree
    assert shorter.data is not None
    tree.check_integrity()


def test_whole_sequences_are_one_block_each_and_used_up_to_where_they_agree() -> None:
    tree = BlockStore(None, ROOMY, can_cut=True)
    store(tree, [1, 2, 3, 4, 5])
    store(tree, [1, 2, 9])
    assert len(tree) == 2
    assert found(tree, [1, 2, 3, 9]) == 3
    assert found(tree, [1, 2, 9, 9]) == 3
    assert tree.match(pack([1, 2, 9, 9]), A).blocks[0].end == 3


def test_whole_sequences_that_cannot_be_cut_are_used_by_what_goes_on_from_all_of_them() -> None:
    tree = BlockStore(None, ROOMY, can_cut=False)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 5, 1], [1, 2, 4]):
        store(tree, tokens)
    assert len(tree) == 4, "a shorter one serves where a longer one cannot"
    assert found(tree, [1, 2, 3, 4, 7]) == 4
    assert found(tree, [1, 2, 3, 5]) == 2
    assert found(tree, [1]) == 0


def test_of_equal_covers_the_block_that_is_used_whole_is_taken() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, [1, 2, 3, 4], Scope("b", 4))
    store(tree, [1, 2])
    chain = tree.match(pack([1, 2, 9]), Scope("a", 2))
    assert (chain.n_tokens, chain.blocks[0].end) == (2, 2)


# ---- who may share


def test_namespaces_share_nothing_but_what_both_declare_public() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, range(10), Scope("a", 6))
    assert tree.missing(pack(range(10)), Scope("b", 6)) == spans(6, 10)
    assert found(tree, range(10), Scope("b", 6)) == 6
    assert found(tree, range(10), Scope("b", 5)) == 5
    assert found(tree, range(10), Scope("b")) == 0
    assert found(tree, range(10), Scope("a", 6)) == 10
    assert found(tree, range(10), Scope("a")) == 0, "who declares nothing public uses nothing that is"


def test_a_namespace_uses_its_own_tokens_whatever_it_declares_now() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, range(10))
    assert found(tree, range(10), Scope("a", 6)) == 10
    assert found(tree, range(10), Scope("b", 6)) == 0


def test_no_namespace_is_taken_for_another_or_for_the_public() -> None:
    names = ["", "public", "namespace:", "a", "a ", "A", "\udc80", "ä", PUBLIC.hex(), PUBLIC.decode("latin-1")]
    keys = {namespace_key(name) for name in names}
    assert len(keys) == len(names)
    assert PUBLIC not in keys
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, range(6), Scope("", 6))
    assert found(tree, range(6), Scope("")) == 0
    assert found(tree, range(6), Scope("x", 6)) == 6


def test_a_sequence_saved_whole_is_public_only_if_all_of_it_is() -> None:
    tree = BlockStore(None, ROOMY, can_cut=True)
    store(tree, range(6), Scope("a", 6))
    store(tree, range(8), Scope("a", 7))
    assert found(tree, range(8), Scope("b", 8)) == 6
    assert found(tree, range(8), Scope("b", 5)) == 5
    assert found(tree, range(8), Scope("a", 8)) == 8


def test_a_longer_public_block_does_not_stand_for_one_that_private_tokens_go_on_from() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    store(tree, [1, 2, 3, 4], Scope("a", 4))
    assert tree.missing(pack([1, 2, 3, 4, 5, 6]), Scope("a", 2)) == spans(0, 2, 6)
    store(tree, [1, 2, 3, 4, 5, 6], Scope("a", 2))
    assert found(tree, [1, 2, 3, 4, 5, 6], Scope("b", 4)) == 4
    assert found(tree, [1, 2, 3, 4, 5, 6], Scope("a", 2)) == 6
    tree.check_integrity()


# ---- what goes


def test_what_was_used_longest_ago_goes_first_and_tails_before_beginnings() -> None:
    tree = BlockStore(2, room_for(4), can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    put_block(tree, [5, 5, 6, 6])
    tree.touch(tree.match(pack([1, 1, 2, 2]), A))
    put_block(tree, [7, 7])
    assert [found(tree, query) for query in ([1, 1, 2, 2], [5, 5, 6, 6], [7, 7])] == [4, 2, 2]
    put_block(tree, [8, 8])
    assert [found(tree, query) for query in ([1, 1, 2, 2], [5, 5], [7, 7], [8, 8])] == [4, 0, 2, 2]
    assert tree.evictions == 2
    tree.check_integrity()


def test_a_conversation_loses_its_tail_for_a_few_cells_not_all_of_it() -> None:
    tree = BlockStore(2, room_for(10), can_cut=True)
    put_block(tree, range(20))
    put_block(tree, [77])
    assert found(tree, range(20)) == 18


def test_a_conversation_larger_than_memory_keeps_its_beginning() -> None:
    tree = BlockStore(2, room_for(3), can_cut=True)
    assert put_block(tree, range(20)) is None
    assert found(tree, range(20)) == 6
    assert tree.host_bytes == room_for(3)
    tree.check_integrity()


def test_data_larger_than_all_memory_is_not_kept_and_evicts_nothing() -> None:
    tree = BlockStore(2, room_for(2), can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    assert put_block(tree, [9, 9], room_for(2)) is None
    assert found(tree, [1, 1, 2, 2]) == 4
    assert len(tree) == 2


def test_a_block_whose_beginning_went_meanwhile_is_not_kept() -> None:
    tree = BlockStore(2, room_for(1), can_cut=True)
    tokens = pack([1, 1, 2, 2])
    first, second = tree.missing(tokens, A)
    tree.put(tokens, A, first, bytes(8))
    put_block(tree, [9, 9])
    assert tree.put(tokens, A, second, bytes(8)) is None
    assert found(tree, [9, 9]) == 2
    tree.check_integrity()


def test_parts_of_one_prompt_are_put_in_their_order_or_not_kept() -> None:
    tree = BlockStore(2, ROOMY, can_cut=True)
    tokens = pack(range(6))
    first, second, third = tree.missing(tokens, A)
    assert tree.put(tokens, A, first, bytes(8)) is not None
    assert tree.put(tokens, A, third, bytes(8)) is None
    assert tree.put(tokens, B, second, bytes(8)) is None
    assert tree.put(tokens, A, second, bytes(8)) is not None
    assert tree.put(tokens, A, third, bytes(8)) is not None
    assert found(tree, range(6)) == 6


def test_a_block_is_not_put_below_one_whose_file_was_lost() -> None:
    tree = BlockStore(2, 0, ROOMY, can_cut=True)
    tokens = pack(range(4))
    first, second = tree.missing(tokens, A)
    block = tree.put(tokens, A, first, bytes(8))
    assert block is not None
    tree.lost(block)
    assert tree.put(tokens, A, second, bytes(8)) is None
    assert len(tree) == 0
    tree.check_integrity()


def test_a_span_that_is_no_part_of_the_prompt_is_a_defect() -> None:
    tree = BlockStore(4, ROOMY, can_cut=True)
    with pytest.raises(ValueError, match="none of the parts"):
        tree.put(pack(range(10)), A, Span(0, 5), b"")
    with pytest.raises(ValueError, match="at least one token"):
        BlockStore(0, ROOMY, can_cut=True)


def test_putting_again_what_is_there_changes_nothing_but_counts_as_use() -> None:
    tree = BlockStore(2, room_for(2), can_cut=True)
    first = put_block(tree, [1, 1])
    put_block(tree, [2, 2])
    assert tree.put(pack([1, 1]), A, Span(0, 2), bytes(8)) is first
    put_block(tree, [3, 3])
    assert [found(tree, query) for query in ([1, 1], [2, 2], [3, 3])] == [2, 0, 2]


def test_what_is_put_below_a_beginning_counts_as_use_of_it() -> None:
    tree = BlockStore(2, room_for(3), can_cut=True)
    put_block(tree, [1, 1])
    put_block(tree, [2, 2])
    put_block(tree, [1, 1, 3, 3])
    put_block(tree, [4, 4])
    assert [found(tree, query) for query in ([1, 1, 3, 3], [2, 2], [4, 4])] == [4, 0, 2]


def test_what_a_transfer_uses_does_not_go_until_the_last_one_is_done() -> None:
    tree = BlockStore(2, room_for(2), can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    chain = tree.match(pack([1, 1, 2, 2]), A)
    tree.pin(chain)
    tree.pin(chain)
    assert put_block(tree, [3, 3]) is None, "there is no room beside what is in use"
    tree.unpin(chain)
    assert put_block(tree, [3, 3]) is None
    tree.unpin(chain)
    assert put_block(tree, [3, 3]) is not None
    assert found(tree, [1, 1, 2, 2]) == 2
    tree.check_integrity()


def test_a_chain_that_has_gone_cannot_be_pinned() -> None:
    tree = BlockStore(2, room_for(1), can_cut=True)
    put_block(tree, [1, 1])
    chain = tree.match(pack([1, 1]), A)
    put_block(tree, [2, 2])
    with pytest.raises(LookupError):
        tree.pin(chain)
    tree.touch(chain)
    tree.check_integrity()


# ---- disk


def test_what_leaves_memory_is_written_after_all_before_it() -> None:
    tree = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = put_block(tree, [1, 1]), put_block(tree, [1, 1, 2, 2])
    assert tree.take_orders() == []
    put_block(tree, [3, 3])
    orders = tree.take_orders()
    assert [type(order) for order in orders] == [Write, Write]
    assert [order.block for order in orders] == [one, two]
    assert one is not None
    assert two is not None
    assert (one.data, one.on_disk) == (bytes(8), True), "written early, so that its child's file has a parent"
    assert (two.data, two.on_disk) == (None, True)
    assert repr(two) == f"<Block {two.name.hex()[:8]} [2, 4) disk pins=0>"
    assert found(tree, [1, 1, 2, 2]) == 4
    assert tree.take_orders() == []
    assert repr(tree) == (
        f"<BlockStore 3 blocks, host {room_for(2)}/{room_for(2)} bytes, disk {tree.disk_bytes}/{ROOMY} bytes>"
    )
    tree.check_integrity()


def test_what_was_read_stays_in_memory_if_there_is_room_and_need_not_be_written_again() -> None:
    tree = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = put_block(tree, [1, 1])
    two = put_block(tree, [2, 2])
    tree.take_orders()
    assert one is not None
    assert two is not None
    tree.loaded(one, bytes(8))
    assert (one.data, two.data) == (bytes(8), None)
    assert [order.block for order in tree.take_orders()] == [two]
    assert tree.take_orders() == []
    tree.loaded(two, bytes(9))
    assert found(tree, [2, 2]) == 2
    assert not tree.match(pack([2, 2]), A).is_resident, "it was not what was stored"
    tree.loaded(two, bytes(8))
    assert tree.match(pack([2, 2]), A).is_resident
    assert not tree.match(pack([1, 1]), A).is_resident
    assert tree.take_orders() == []
    tree.check_integrity()


def test_a_transfer_keeps_in_memory_what_it_has_read() -> None:
    tree = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    put_block(tree, [1, 1])
    put_block(tree, [2, 2])
    chain = tree.match(pack([1, 1]), A)
    tree.pin(chain)
    tree.loaded(chain.blocks[0], bytes(8))
    put_block(tree, [3, 3])
    assert tree.match(pack([1, 1]), A).is_resident
    assert not tree.match(pack([3, 3]), A).is_resident
    tree.check_integrity()


def test_what_is_larger_than_the_disk_with_all_before_it_evicts_no_file() -> None:
    tree = BlockStore(2, room_for(2), 2 * _file_bytes(2), can_cut=True)
    put_block(tree, [8, 8])
    put_block(tree, [9, 9])
    put_block(tree, [1, 1, 2, 2])
    assert len(tree.take_orders()) == 2
    put_block(tree, [1, 1, 2, 2, 3, 3])
    assert tree.take_orders() == []
    assert [found(tree, query) for query in ([8, 8], [9, 9], range(1))] == [2, 2, 0]
    tree.check_integrity()


def test_the_disk_gives_up_what_arrived_or_was_used_longest_ago() -> None:
    file_bytes = _file_bytes(2)
    tree = BlockStore(2, room_for(1), 2 * file_bytes, can_cut=True)
    blocks = [put_block(tree, [n, n]) for n in range(4)]
    assert [found(tree, [n, n]) for n in range(4)] == [0, 2, 2, 2]
    orders = tree.take_orders()
    assert [type(order) for order in orders] == [Write, Write, Erase, Write]
    assert orders[2].block is blocks[0]
    assert tree.disk_bytes == 2 * file_bytes
    assert tree.evictions == 1
    tree.check_integrity()


def test_a_file_that_is_not_good_takes_what_is_below_it_along() -> None:
    tree = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    put_block(tree, [1, 1, 2, 2, 3, 3])
    put_block(tree, [9, 9])
    tree.take_orders()
    chain = tree.match(pack([1, 1, 2, 2, 3, 3]), A)
    tree.pin(chain)
    tree.lost(chain.blocks[1])
    assert found(tree, [1, 1, 2, 2, 3, 3]) == 2
    assert {order.block for order in tree.take_orders()} == set(chain.blocks[1:])
    tree.unpin(chain)
    tree.lost(chain.blocks[1])
    assert tree.take_orders() == []
    tree.check_integrity()


def test_what_lies_in_memory_below_a_bad_file_goes_too() -> None:
    tree = BlockStore(2, room_for(1), ROOMY, can_cut=True)
    one = put_block(tree, [1, 1])
    put_block(tree, [9, 9])
    put_block(tree, [1, 1, 2, 2])
    assert one is not None
    tree.lost(one)
    assert [found(tree, query) for query in ([1, 1, 2, 2], [9, 9])] == [0, 2]
    assert (len(tree), tree.host_bytes) == (1, 0)
    tree.check_integrity()


def test_a_block_in_memory_that_could_not_be_written_stays_there() -> None:
    tree = BlockStore(2, room_for(2), ROOMY, can_cut=True)
    one, two = put_block(tree, [1, 1]), put_block(tree, [1, 1, 2, 2])
    put_block(tree, [3, 3])
    assert one is not None
    assert two is not None
    tree.take_orders()
    tree.lost(one)
    assert one in tree
    assert not one.on_disk
    assert two not in tree, "its data was on disk alone, below a block that has no file"
    tree.check_integrity()


def test_without_memory_blocks_go_straight_to_disk() -> None:
    tree = BlockStore(2, 0, ROOMY, can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    assert found(tree, [1, 1, 2, 2]) == 4
    assert (tree.host_bytes, len(tree.take_orders())) == (0, 2)
    chain = tree.match(pack([1, 1]), A)
    assert not chain.is_resident
    tree.loaded(chain.blocks[0], bytes(8))
    assert tree.host_bytes == 0
    tree.check_integrity()


def test_spilling_writes_what_was_used_last_as_far_as_the_disk_has_room() -> None:
    tree = BlockStore(2, ROOMY, 3 * _file_bytes(2), can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    put_block(tree, [5, 5, 6, 6])
    tree.spill()
    written = [order.block for order in tree.take_orders()]
    assert written == [*tree.match(pack([5, 5, 6, 6]), A).blocks, tree.match(pack([1, 1]), A).blocks[0]]
    tree.check_integrity()


def test_a_tree_is_rebuilt_from_files_and_orphans_are_told() -> None:
    tree = BlockStore(2, 0, ROOMY, can_cut=True)
    scope = Scope("a", 3)
    put_block(tree, range(9), scope=scope)
    put_block(tree, [7, 7], scope=B)
    stored = [stored_block(order.block, 5.0) for order in tree.take_orders()]
    lost = next(each for each in stored if (each.start, each.end) == (3, 5))
    again = BlockStore(2, ROOMY, ROOMY, can_cut=True)
    orphans = again.restore(each for each in reversed(stored) if each is not lost)
    assert sorted((each.start, each.end) for each in orphans) == [(5, 7), (7, 9)]
    assert found(again, range(9), scope) == 3
    assert found(again, [7, 7], B) == 2
    assert again.disk_bytes == sum(len(each.tokens) + each.n_bytes + FILE_BYTES for each in stored) - 3 * _file_bytes(2)
    again.check_integrity()


def test_files_of_another_cut_have_no_place() -> None:
    tree = BlockStore(4, 0, ROOMY, can_cut=True)
    put_block(tree, range(4))
    stored = [stored_block(order.block, 5.0) for order in tree.take_orders()]
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).restore(stored) == stored
    assert BlockStore(None, ROOMY, ROOMY, can_cut=True).restore(stored) == []
    private, public = stored_block_of([1, 2]), replace(stored_block_of([3, 4]), namespace=PUBLIC)
    below = replace(public, parent_name=private.name, start=2, end=4)
    assert BlockStore(2, ROOMY, ROOMY, can_cut=True).restore([private, below]) == [below]


def test_of_too_many_files_the_oldest_go_but_none_before_what_needs_it() -> None:
    tree = BlockStore(2, 0, ROOMY, can_cut=True)
    put_block(tree, [1, 1, 2, 2])
    put_block(tree, [5, 5])
    put_block(tree, [6, 6])
    times = [1.0, 9.0, 5.0, 4.0]  # the first one's file is the oldest, but its child was used last
    stored = [stored_block(order.block, at) for order, at in zip(tree.take_orders(), times, strict=True)]
    again = BlockStore(2, 0, 3 * _file_bytes(2), can_cut=True)
    assert again.restore(stored) == []
    assert [found(again, query) for query in ([1, 1, 2, 2], [5, 5], [6, 6])] == [4, 2, 0]
    assert [type(order) for order in again.take_orders()] == [Erase]
    again.check_integrity()


def _file_bytes(n_tokens: int, n_bytes: int = 8) -> int:
    return FILE_BYTES + 4 * n_tokens + n_bytes


def stored_block(block: Block, modified_s: float) -> StoredBlock:
    assert block.parent is not None
    return StoredBlock(
        block.name, block.parent.name, block.namespace, block.tokens, block.start, block.end, block.n_bytes, modified_s
    )


def stored_block_of(tokens: Sequence[int]) -> StoredBlock:
    tree = BlockStore(len(tokens), 0, ROOMY, can_cut=True)
    block = put_block(tree, tokens)
    assert block is not None
    return stored_block(block, 1.0)


def test_no_operation_scans_the_blocks() -> None:
    tree = BlockStore(1, room_for(5_000), 5_000 * _file_bytes(1), can_cut=True)
    started_s = time.perf_counter()
    for n in range(15_000):
        tokens = pack([n % 7, n])
        for span in tree.missing(tokens, A):
            tree.put(tokens, A, span, bytes(8))
        tree.touch(tree.match(tokens, A))
        tree.take_orders()
    assert time.perf_counter() - started_s < 60, "with a scan in each it would be minutes"
    assert len(tree) > 7_500
    tree.check_integrity()
