"""A lookup in the tree gives the same result as a comparison of the query with the tokens of every holder."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.executed_lines import count_executed_lines
from tests.support.token_lists import TOKENS, n_common

from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.kv_cache.radix_tree import RadixTree

Tree = RadixTree[str]

STEPS = st.lists(st.tuples(st.booleans(), TOKENS, st.sampled_from("ABCD")), min_size=10, max_size=40)


def apply_steps(steps: list[tuple[bool, list[int], str]]) -> Iterator[tuple[Tree, set[tuple[tuple[int, ...], str]]]]:
    """Apply steps, each of which adds or removes a holder. Yield the tree and its expected holders after each step."""
    index = Tree()
    held: set[tuple[tuple[int, ...], str]] = set()
    for add, tokens, holder in steps:
        if not add and held:
            gone = sorted(held)[len(tokens) % len(held)]
            held.remove(gone)
            index.remove(pack(gone[0]), gone[1])
        elif (tuple(tokens), holder) not in held:
            held.add((tuple(tokens), holder))
            index.add(pack(tokens), holder)
        yield index, held


@settings(max_examples=80, deadline=None)
@given(STEPS, TOKENS)
def test_after_every_step_a_lookup_finds_the_same_as_a_comparison_with_all_holders(
    steps: list[tuple[bool, list[int], str]], query: list[int]
) -> None:
    for index, held in apply_steps(steps):
        index.check_integrity()
        assert len(index) == len(held)
        found = list(index.matches(pack(query)))
        assert [n for n, _ in found] == sorted((n for n, _ in found), reverse=True)
        best: dict[str, int] = {}
        for tokens, holder in held:
            best[holder] = max(best.get(holder, 0), n_common(tokens, query))
        assert sorted(found) == sorted((n, holder) for holder, n in best.items() if n)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_without_holders_only_the_root_remains(steps: list[tuple[bool, list[int], str]]) -> None:
    index, held = Tree(), set[tuple[tuple[int, ...], str]]()
    for index, held in apply_steps(steps):  # noqa: B007 - only the last pair is used
        pass
    for tokens, holder in sorted(held, key=repr):
        index.remove(pack(tokens), holder)
        index.check_integrity()
    assert repr(index) == "<RadixTree 0 holders 1 nodes>"


def index_of(**texts: str) -> Tree:
    """Return a tree with a holder of each name, and one token for each letter of its text."""
    index = Tree()
    for holder, text in texts.items():
        index.add(letters(text), holder)
    return index


def letters(text: str) -> bytes:
    return pack([ord(letter) for letter in text])


def test_the_deepest_match_comes_first_and_each_holder_once() -> None:
    index = index_of(a="system one", b="system two", c="system", d="other")
    assert list(index.matches(letters("system two?"))) == [(10, "b"), (7, "a"), (6, "c")]
    assert repr(index) == "<RadixTree 4 holders 6 nodes>"


def test_a_match_that_ends_within_an_edge_counts_the_tokens_before_its_end() -> None:
    assert list(index_of(a="system").matches(letters("sys!"))) == [(3, "a")]
    assert list(index_of(a="system").matches(letters("sys"))) == [(3, "a")]


def test_a_holder_under_two_strings_is_found_at_the_longer_one_and_removed_from_each_separately() -> None:
    index = index_of(a="abcd")
    index.add(letters("ab"), "a")
    assert (len(index), list(index.matches(letters("abcx")))) == (2, [(3, "a")])
    index.remove(letters("abcd"), "a")
    assert (len(index), list(index.matches(letters("abcx")))) == (1, [(2, "a")])


def test_a_holder_without_tokens_is_stored_and_never_matched() -> None:
    index = index_of(a="", b="b")
    assert (len(index), list(index.matches(letters("b"))), list(index.matches(b""))) == (2, [(1, "b")], [])
    index.remove(b"", "a")
    with pytest.raises(LookupError):
        index.remove(b"", "a")


def test_adding_twice_is_refused_and_changes_nothing() -> None:
    index = index_of(a="abc", b="abd")
    with pytest.raises(ValueError, match="'a' is indexed under these 3 tokens already"):
        index.add(letters("abc"), "a")
    with pytest.raises(ValueError, match="3 bytes are not a whole number of tokens"):
        index.add(b"abc", "a")
    index.check_integrity()
    assert repr(index) == "<RadixTree 2 holders 4 nodes>"


@pytest.mark.parametrize(
    ("text", "holder"), [("abc", "b"), ("ab", "a"), ("a", "a"), ("abcd", "a"), ("x", "a"), ("", "a")]
)
def test_removing_an_unknown_holder_is_refused_and_changes_nothing(text: str, holder: str) -> None:
    index = index_of(a="abc", b="abd")
    with pytest.raises(LookupError, match=f"'{holder}' is not indexed under these {len(text)} tokens"):
        index.remove(letters(text), holder)
    index.check_integrity()
    assert repr(index) == "<RadixTree 2 holders 4 nodes>"


# ---- cost, at 200 holders of 8,000 tokens

N_HOLDERS, N_TOKENS = 200, 8000


@dataclass(frozen=True)
class CountingHolder:
    """A holder that counts accesses. Every lookup in a dictionary or a set calls `__hash__`, which counts it."""

    accesses: list[None]

    def __hash__(self) -> int:
        self.accesses.append(None)
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def strings_that_share(n_shared: int) -> list[bytes]:
    rng = random.Random(n_shared)
    shared = rng.choices(range(150_000), k=n_shared)
    return [pack(shared + rng.choices(range(150_000), k=N_TOKENS - n_shared)) for _ in range(N_HOLDERS)]


def chats() -> list[bytes]:
    """Return the histories of five chats for each of ten system prompts, after each of four turns."""
    rng = random.Random(0)
    strings = []
    for _ in range(10):
        system = rng.choices(range(150_000), k=1000)
        for _ in range(5):
            turns = rng.choices(range(150_000), k=N_TOKENS - 1000)
            strings += [pack(system + turns[:n]) for n in range(1750, 7001, 1750)]
    return strings


PATTERNS: dict[str, Callable[[], list[bytes]]] = {
    "nothing": lambda: strings_that_share(0),
    "nearly_all": lambda: strings_that_share(7900),
    "all": lambda: strings_that_share(N_TOKENS),
    "chats": chats,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_lookup_in_a_large_tree_takes_few_steps_and_copies_no_tokens(pattern: str) -> None:
    strings = PATTERNS[pattern]()
    index: RadixTree[int] = RadixTree()
    for holder, tokens in enumerate(strings):
        index.add(tokens, holder)
    query = strings[123][:-8] + pack([-1, -1])
    first, second = itertools.islice(itertools.chain(index.matches(query), [None, None]), 2)
    assert first is not None
    assert first[0] == len(query) // 4 - 2
    assert (second is None) == (pattern == "nothing")
    n_lines = count_executed_lines(lambda: list(itertools.islice(index.matches(query), 2)))
    assert n_lines < 500  # a loop over the tokens of the query has thousands
    tracemalloc.start()
    try:
        next(index.matches(query))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8_192  # a copy of the prefix would take 32,000 bytes


@pytest.mark.parametrize("n_shared", [7900, N_TOKENS])
def test_the_first_match_and_a_removal_access_few_of_the_holders_that_share_a_prefix(n_shared: int) -> None:
    strings = strings_that_share(n_shared)
    accesses: list[None] = []
    holders = [CountingHolder(accesses) for _ in strings]
    index: RadixTree[CountingHolder] = RadixTree()
    for tokens, holder in zip(strings, holders, strict=True):
        index.add(tokens, holder)
    accesses.clear()
    next(index.matches(strings[0][: 4 * 7900]))
    assert len(accesses) <= 4
    accesses.clear()
    index.remove(strings[99], holders[99])
    assert len(accesses) <= 4


def test_iterating_over_all_matches_visits_each_holder_once() -> None:
    accesses: list[None] = []
    index: RadixTree[CountingHolder] = RadixTree()
    for n in range(1, 51):
        index.add(pack(range(n)), CountingHolder(accesses))
    accesses.clear()
    assert [n for n, _ in index.matches(pack(range(40)))] == [40] * 11 + list(range(39, 0, -1))
    assert len(accesses) == 2 * 50  # for each holder, one lookup in the set of seen holders and one insertion


# ---- damage


def miscount(index: Tree) -> None:
    index._n_holders += 1


def leave_a_redundant_node(index: Tree) -> None:
    del index._root.children[letters("a")].children[letters("d")]
    index._n_holders -= 1


def leave_an_empty_leaf(index: Tree) -> None:
    index._root.children[letters("a")].children[letters("d")].holders.clear()
    index._n_holders -= 1


def remove_the_parent(index: Tree) -> None:
    index._root.children[letters("a")].parent = None


def change_the_key_of_a_child(index: Tree) -> None:
    children = index._root.children
    children[letters("x")] = children.pop(letters("a"))


def lengthen_an_edge_by_one_byte(index: Tree) -> None:
    index._root.children[letters("a")].edge += b"?"


def lengthen_the_root(index: Tree) -> None:
    index._root.edge = letters("r")


@pytest.mark.parametrize(
    "damage",
    [
        miscount,
        leave_a_redundant_node,
        leave_an_empty_leaf,
        remove_the_parent,
        change_the_key_of_a_child,
        lengthen_an_edge_by_one_byte,
        lengthen_the_root,
    ],
)
def test_the_integrity_check_finds_damage(damage: Callable[[Tree], None]) -> None:
    index = index_of(a="abc", b="abd")
    index.check_integrity()
    damage(index)
    with pytest.raises(AssertionError):
        index.check_integrity()
