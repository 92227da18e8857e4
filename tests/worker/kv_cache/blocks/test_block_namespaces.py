"""Which namespaces share blocks."""

from __future__ import annotations

from tests.support.block_stores import ROOMY, insert_all, n_matched, pack, spans

from llamaq.worker.core.cache_scope import PUBLIC, Scope, namespace_key
from llamaq.worker.kv_cache.blocks.block_store import BlockStore


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
