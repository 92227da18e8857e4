"""How the block store cuts a prompt into blocks, and which stored prefix a query finds."""

from __future__ import annotations

from tests.support.block_stores import ROOMY, A, insert_all, n_matched, pack, spans

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.kv_cache.blocks.block_store import BlockStore


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
