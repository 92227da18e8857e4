"""The prefix cache alone: which entry or run a prompt matches, and which entry is the coldest."""

from __future__ import annotations

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, NullPrefixCache, PrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.testing import make_job


def make_run(tokens: list[int], order: int = 1, n_past: int = 0, scope: Scope | None = None) -> Run:
    job = make_job(tokens)
    job.scope = scope or Scope()
    return Run(job, 40 + order, tokens, n_past=n_past, admission_number=order, packed=pack(tokens))


def test_the_null_cache_stores_nothing() -> None:
    cache: PrefixCache = NullPrefixCache()
    assert cache.insert(5, pack([1, 2, 3]), Scope()) == [5]
    assert cache.match(pack([1, 2, 3]), Scope()).n_held == 0
    assert (len(cache), cache.coldest(), cache.entries()) == (0, None, [])
    cache.check_integrity()


def test_a_match_is_the_longest_prefix_among_entries_and_runs() -> None:
    cache = RadixPrefixCache()
    cache.insert(1, pack([1, 2, 3]), Scope())
    cache.insert(2, pack([1, 2, 9, 9, 9]), Scope())
    cache.add_run(run := make_run([1, 2, 3, 4, 5, 6], n_past=5))
    found = cache.match(pack([1, 2, 9, 9, 7]), Scope())
    assert isinstance(found.source, CachedSequence)
    assert (found.n_held, found.source.seq_id) == (4, 2)
    found = cache.match(pack([1, 2, 3, 4, 5, 6, 7]), Scope())
    assert (found.n_held, found.source, found.n_coming, found.leader) == (5, run, 6, run)
    cache.remove_run(run)
    assert cache.match(pack([1, 2, 3, 4, 5, 6, 7]), Scope()).n_held == 3
    assert cache.match(pack([5]), Scope()).source is None
    cache.check_integrity()


def test_a_search_of_some_runs_finds_neither_entries_nor_other_runs_and_touches_no_entry() -> None:
    cache = RadixPrefixCache()
    for seq_id in (1, 2):
        cache.insert(seq_id, pack([1, 2, 3, 4, 5, seq_id]), Scope())
    first, second = make_run([1, 2, 3, 4, 9], order=1, n_past=3), make_run([1, 2, 3, 4, 5, 6], order=2, n_past=6)
    cache.add_run(first)
    cache.add_run(second)
    query = pack([1, 2, 3, 4, 5, 1])
    found = cache.match_runs(query, Scope(), {first})
    assert (found.n_held, found.source, found.n_coming, found.leader) == (3, first, 4, first)
    assert cache.match_runs(query, Scope(), {first, second}).source is second
    assert cache.match_runs(query, Scope(), frozenset()).source is None
    assert [entry.seq_id for entry in cache.entries()] == [1, 2]
    assert NullPrefixCache().match_runs(query, Scope(), {first}).source is None


def test_only_runs_admitted_before_can_be_leaders() -> None:
    cache = RadixPrefixCache()
    for order in (1, 2):
        cache.add_run(make_run([7] * 20, order=order))
    found = cache.match(pack([7] * 20), Scope(), admitted_before=2)
    assert found.leader is not None
    assert found.leader.admission_number == 1
    assert cache.match(pack([7] * 20), Scope(), admitted_before=1).leader is None


def test_a_run_that_scores_its_prompt_cannot_be_a_leader() -> None:
    cache = RadixPrefixCache()
    job = make_job([7] * 20, prompt_logprobs=0)
    cache.add_run(run := Run(job, 41, [7] * 20, n_past=5, admission_number=1, packed=pack([7] * 20)))
    found = cache.match(pack([7] * 30), Scope())
    assert (found.n_held, found.source, found.leader) == (5, run, None)
    run.tokens.append(8)  # after the first token, lost cells are computed again without scores
    assert cache.match(pack([7] * 30), Scope()).leader is run


def test_an_entry_whose_tokens_another_entry_begins_with_is_removed() -> None:
    cache = RadixPrefixCache()
    assert cache.insert(1, pack([1, 2, 3]), Scope()) == []
    assert cache.insert(2, pack([1, 2]), Scope()) == [2]
    assert cache.insert(3, pack([1, 2, 3, 4]), Scope()) == [1]
    assert cache.insert(4, pack([1, 2, 3, 4]), Scope("other")) == []
    assert [entry.seq_id for entry in cache.entries()] == [3, 4]


def test_a_state_that_cannot_be_cut_matches_only_with_all_its_tokens() -> None:
    cache = RadixPrefixCache(can_cut=False)
    assert cache.insert(1, pack([1, 2]), Scope()) == []
    assert cache.insert(2, pack([1, 2, 3, 4]), Scope()) == []
    assert cache.insert(3, pack([1, 2, 3, 4]), Scope()) == [3]
    assert cache.match(pack([1, 2, 3]), Scope()).n_held == 2
    assert cache.match(pack([1, 2, 3, 4, 5]), Scope()).n_held == 4
    assert cache.match(pack([1, 9]), Scope()).n_held == 0
    cache.add_run(make_run([1, 2, 3, 4, 5, 6, 7], n_past=6))
    assert cache.match(pack([1, 2, 3, 4, 5, 6]), Scope()).n_held == 6
    assert cache.match(pack([1, 2, 3, 4, 5]), Scope()).n_held == 4


def test_the_least_recently_used_entry_is_the_coldest_unless_it_is_in_transfer() -> None:
    cache = RadixPrefixCache()
    for seq_id in (1, 2, 3):
        cache.insert(seq_id, pack([seq_id] * 4), Scope())
    cache.match(pack([1, 1]), Scope())
    assert [entry.seq_id for entry in cache.entries()] == [2, 3, 1]
    coldest = cache.coldest()
    assert coldest is not None
    coldest.in_transfer = True
    assert cache.coldest() is cache.entries()[1]
    cache.remove(coldest)
    assert len(cache) == 2
    cache.check_integrity()


SECRET, PUBLIC = [7] * 10, [1] * 6


def test_namespaces_share_only_tokens_that_both_declare_public() -> None:
    cache = RadixPrefixCache()
    cache.insert(1, pack(PUBLIC + SECRET), Scope("a", public=6))
    for scope, expected in (
        (Scope("a", 6), 16),
        (Scope("a"), 16),
        (Scope("b", 6), 6),
        (Scope("b", 4), 4),
        (Scope("b", 16), 6),
        (Scope("b"), 0),
        (Scope(""), 0),
    ):
        assert cache.match(pack(PUBLIC + SECRET), scope).n_held == expected, scope
    assert cache.match(pack(SECRET), Scope("b", 10)).n_held == 0
