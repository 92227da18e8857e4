"""Whatever is put, used, evicted, lost and restored: blocks are found as a plain model finds them, never wrongly."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamaq.worker.core.cache_scope import PUBLIC, Scope, namespace_key
from llamaq.worker.core.kv_data import Data
from llamaq.worker.kv_cache.blocks.block import (
    BLOCK_BYTES,
    FILE_BYTES,
    Block,
    BlockHeader,
    ChildBlocks,
    StoredPrefix,
    WriteBlock,
)
from llamaq.worker.kv_cache.blocks.block_store import BlockStore

ROOMY = 10**9

tokens_of = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14).map(tuple)
scopes = st.builds(Scope, st.sampled_from(["", "a", "public"]), st.sampled_from([0, 0, 2, 5, 8, 20]))


def pack(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()


def made_for(key: bytes, prefix: bytes) -> bytes:
    """Data that only this owner's block at the end of this prefix may have; of lengths that differ."""
    return hashlib.sha256(key + prefix).digest()[: 4 + len(prefix) // 4]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Model:
    """What ought to be found: every entry that was ever stored is looked at, block by block."""

    block_tokens: int | None
    can_cut: bool
    entries: set[tuple[tuple[int, ...], Scope]]

    def parts(self, n_tokens: int, scope: Scope) -> Iterator[tuple[bool, int]]:
        """Whether a block is public, and its end."""
        if self.block_tokens is None:
            yield n_tokens <= scope.public, n_tokens
            return
        end = 0
        while end < n_tokens:
            is_public = end < scope.public
            end = min(end + self.block_tokens, n_tokens, scope.public if is_public else n_tokens)
            yield is_public, end

    def found(self, query: tuple[int, ...], scope: Scope) -> int:
        return max((self.found_in(query, scope, *entry) for entry in self.entries), default=0)

    def found_in(self, query: tuple[int, ...], scope: Scope, tokens: tuple[int, ...], owner: Scope) -> int:
        covered, agreed = 0, common(query, tokens)
        for is_public, end in self.parts(len(tokens), owner):
            limit = scope.public if is_public else len(query) if scope.namespace == owner.namespace else 0
            usable = min(agreed, limit, end)
            if usable < end:
                return max(covered, usable) if self.can_cut else covered
            covered = end
        return covered


class BlockMachine(RuleBasedStateMachine):
    """A tree with a pretended disk beside a model that knows all that was ever put."""

    @initialize(
        block_tokens=st.sampled_from([None, 1, 3, 4]),
        can_cut=st.booleans(),
        host=st.sampled_from([0, 3 * BLOCK_BYTES, 6 * BLOCK_BYTES, ROOMY]),
        disk=st.sampled_from([0, 500, 1500, ROOMY]),
    )
    def begin(self, block_tokens: int | None, can_cut: bool, host: int, disk: int) -> None:
        self.host, self.disk = host, disk
        self.model = Model(block_tokens, can_cut, set())
        self.store = self.empty_tree()
        self.files: dict[bytes, tuple[Block, Data]] = {}
        self.pinned: list[StoredPrefix] = []
        self.is_whole = ROOMY in (host, disk)
        self.clock = 0.0
        self.written_s: dict[bytes, float] = {}

    @rule(tokens=tokens_of, scope=scopes, n_saved=st.integers(1, 20))
    def insert(self, tokens: tuple[int, ...], scope: Scope, n_saved: int) -> None:
        """Save the first so many of the missing spans; an entry that is not saved to its end is one that is shorter."""
        packed = pack(tokens)
        missing = self.store.missing_spans(packed, scope)
        public = 0
        for span in missing[:n_saved]:
            is_public = span.end <= scope.public
            key = PUBLIC if is_public else namespace_key(scope.namespace)
            data = made_for(key, packed[: 4 * span.end])
            block = self.store.insert(packed, scope, span, data)
            self.is_whole &= block is not None
            public = span.end
        if len(missing) <= n_saved:
            self.model.entries.add((tokens, scope))
            if self.is_whole:
                assert self.store.missing_spans(packed, scope) == []
        elif public:
            self.model.entries.add((tokens[:public], scope))
        self.carry_out()

    @rule(query=tokens_of, scope=scopes)
    def look(self, query: tuple[int, ...], scope: Scope) -> None:
        chain = self.store.match(pack(query), scope)
        expected = self.model.found(query, scope)
        assert chain.n_tokens == expected if self.is_whole else chain.n_tokens <= expected
        self.check_chain(chain, query, scope)

    @rule(query=tokens_of, scope=scopes)
    def use(self, query: tuple[int, ...], scope: Scope) -> None:
        self.store.touch(self.store.match(pack(query), scope))

    @rule(query=tokens_of, scope=scopes)
    def pin(self, query: tuple[int, ...], scope: Scope) -> None:
        chain = self.store.match(pack(query), scope)
        self.store.pin(chain)
        self.pinned.append(chain)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.store.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(query=tokens_of, scope=scopes)
    def load(self, query: tuple[int, ...], scope: Scope) -> None:
        for block in self.store.match(pack(query), scope).blocks:
            if block.data is None and block in self.store:
                self.store.store_in_host(block, self.files[block.name][1])
        self.carry_out()

    @rule(query=tokens_of, scope=scopes)
    def lose(self, query: tuple[int, ...], scope: Scope) -> None:
        chain = self.store.match(pack(query), scope)
        if chain and chain.blocks[-1].on_disk:
            self.is_whole = False
            self.store.mark_file_lost(chain.blocks[-1])
            for broken in [each for each in self.pinned if any(block not in self.store for block in each.blocks)]:
                self.store.unpin(broken)
                self.pinned.remove(broken)
            self.carry_out()

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """With or without the time to write what lies in memory; files alone remain."""
        if orderly:
            self.store.write_host_to_disk()
            self.carry_out()
        kept = {block.name for block in self.tree_blocks() if block.on_disk}
        assert kept == set(self.files)
        self.is_whole &= all(block.on_disk for block in self.tree_blocks())
        self.store = self.empty_tree()
        assert self.store.rebuild(self.stored()) == []
        assert {block.name for block in self.tree_blocks()} == kept
        self.pinned.clear()
        self.carry_out()

    def empty_tree(self) -> BlockStore:
        return BlockStore(self.model.block_tokens, self.host, self.disk, can_cut=self.model.can_cut)

    def stored(self) -> Iterator[BlockHeader]:
        for name, (block, data) in self.files.items():
            assert block.parent is not None
            yield BlockHeader(
                name,
                block.parent.name,
                block.namespace,
                block.tokens,
                block.start,
                block.end,
                len(data),
                self.written_s[name],
            )

    def tree_blocks(self) -> list[Block]:
        return list(self.store._tree)

    def carry_out(self) -> None:
        for order in self.store.drain_disk_operations():
            if isinstance(order, WriteBlock):
                assert order.block.name not in self.files
                self.files[order.block.name] = (order.block, order.data)
                self.clock += 1
                self.written_s[order.block.name] = self.clock
            else:
                del self.files[order.block.name]

    def check_chain(self, chain: StoredPrefix, query: tuple[int, ...], scope: Scope) -> None:
        packed, at = pack(query), 0
        for block in chain.blocks:
            assert block.start == at
            at = block.end
            end = min(block.end, chain.n_tokens)
            assert block.tokens[: 4 * (end - block.start)] == packed[4 * block.start : 4 * end]
            assert block.namespace in (PUBLIC, scope.key)
            if block.namespace == PUBLIC:
                assert end <= scope.public
            prefix = packed[: 4 * block.start] + block.tokens
            data = self.files[block.name][1] if block.data is None else block.data
            assert data == made_for(block.namespace, prefix)
        assert at >= chain.n_tokens
        assert not chain.blocks or chain.blocks[-1].start < chain.n_tokens

    @invariant()
    def all_fits(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.store.check_integrity()
        assert self.store.host_bytes <= self.host
        assert self.store.disk_bytes <= self.disk
        assert self.store.disk_bytes == sum(FILE_BYTES + len(b.tokens) + len(data) for b, data in self.files.values())
        assert {block.name for block in self.tree_blocks() if block.on_disk} == set(self.files)
        for chain in self.pinned:
            assert all(block in self.store for block in chain.blocks)


BlockMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBlocks = BlockMachine.TestCase


@settings(deadline=None, max_examples=80)
@given(st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12), st.data())
def test_siblings_are_found_as_a_scan_finds_them(strings: set[tuple[int, ...]], data: st.DataObject) -> None:
    siblings = ChildBlocks()
    blocks = {string: Block(None, PUBLIC, pack(string), 0, len(string), b"", 0) for string in strings}
    for block in blocks.values():
        siblings.add(block)
    for gone in data.draw(st.sets(st.sampled_from(sorted(strings)), max_size=len(strings) - 1)):
        siblings.remove(blocks.pop(gone))
    siblings.check_integrity()
    assert len(siblings) == len(blocks)
    query = data.draw(st.lists(st.integers(0, 1), max_size=6).map(tuple))
    packed = pack(query)
    assert siblings.get(packed) is blocks.get(query)
    within = [block.end for block in siblings.prefixes_of(packed)]
    assert within == sorted((len(string) for string in blocks if query[: len(string)] == string), reverse=True)
    n_common, nearest = siblings.closest(packed)
    assert n_common == max(common(query, string) for string in blocks)
    assert nearest.tokens[: 4 * n_common] == packed[: 4 * n_common]
    extending = siblings.first_starting_with(packed)
    assert (extending is not None) == any(string[: len(query)] == query for string in blocks)
    assert extending is None or extending.tokens.startswith(packed)
