"""Random operations on a block store: every match equals that of a simple reference, and no block has wrong data."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamaq.worker.core.cache_scope import PUBLIC, Scope, namespace_key
from llamaq.worker.core.saved_cells import SavedCells
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


def data_for(key: bytes, prefix: bytes) -> bytes:
    """Return data that is unique for the key and the prefix. Its length differs between blocks."""
    return hashlib.sha256(key + prefix).digest()[: 4 + len(prefix) // 4]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class ReferenceStore:
    """Computes the expected match from all prompts that were ever inserted, block by block."""

    block_tokens: int | None
    can_cut: bool
    entries: set[tuple[tuple[int, ...], Scope]]

    def block_ends(self, n_tokens: int, scope: Scope) -> Iterator[tuple[bool, int]]:
        """Yield two values for each block of a prompt: whether the block is public, and its end position."""
        if self.block_tokens is None:
            yield n_tokens <= scope.public, n_tokens
            return
        end = 0
        while end < n_tokens:
            is_public = end < scope.public
            end = min(end + self.block_tokens, n_tokens, scope.public if is_public else n_tokens)
            yield is_public, end

    def n_matched(self, query: tuple[int, ...], scope: Scope) -> int:
        return max((self.n_matched_in(query, scope, *entry) for entry in self.entries), default=0)

    def n_matched_in(self, query: tuple[int, ...], scope: Scope, tokens: tuple[int, ...], owner: Scope) -> int:
        covered, agreed = 0, common(query, tokens)
        for is_public, end in self.block_ends(len(tokens), owner):
            limit = scope.public if is_public else len(query) if scope.namespace == owner.namespace else 0
            usable = min(agreed, limit, end)
            if usable < end:
                return max(covered, usable) if self.can_cut else covered
            covered = end
        return covered


class BlockMachine(RuleBasedStateMachine):
    """A block store with a simulated disk, beside the reference."""

    @initialize(
        block_tokens=st.sampled_from([None, 1, 3, 4]),
        can_cut=st.booleans(),
        host=st.sampled_from([0, 3 * BLOCK_BYTES, 6 * BLOCK_BYTES, ROOMY]),
        disk=st.sampled_from([0, 500, 1500, ROOMY]),
    )
    def begin(self, block_tokens: int | None, can_cut: bool, host: int, disk: int) -> None:
        self.host, self.disk = host, disk
        self.reference = ReferenceStore(block_tokens, can_cut, set())
        self.store = self.empty_store()
        self.files: dict[bytes, tuple[Block, SavedCells]] = {}
        self.pinned: list[StoredPrefix] = []
        self.has_all = ROOMY in (host, disk)
        self.clock = 0.0
        self.written_s: dict[bytes, float] = {}

    @rule(tokens=tokens_of, scope=scopes, n_inserted=st.integers(1, 20))
    def insert(self, tokens: tuple[int, ...], scope: Scope, n_inserted: int) -> None:
        """Insert the first `n_inserted` missing spans. The reference gets the tokens up to the end of the last span."""
        packed = pack(tokens)
        missing = self.store.missing_spans(packed, scope)
        n_stored = 0
        for span in missing[:n_inserted]:
            is_public = span.end <= scope.public
            key = PUBLIC if is_public else namespace_key(scope.namespace)
            data = data_for(key, packed[: 4 * span.end])
            block = self.store.insert(packed, scope, span, data)
            self.has_all &= block is not None
            n_stored = span.end
        if len(missing) <= n_inserted:
            self.reference.entries.add((tokens, scope))
            if self.has_all:
                assert self.store.missing_spans(packed, scope) == []
        elif n_stored:
            self.reference.entries.add((tokens[:n_stored], scope))
        self.run_disk_operations()

    @rule(query=tokens_of, scope=scopes)
    def match(self, query: tuple[int, ...], scope: Scope) -> None:
        prefix = self.store.match(pack(query), scope)
        expected = self.reference.n_matched(query, scope)
        assert prefix.n_tokens == expected if self.has_all else prefix.n_tokens <= expected
        self.check_prefix(prefix, query, scope)

    @rule(query=tokens_of, scope=scopes)
    def use(self, query: tuple[int, ...], scope: Scope) -> None:
        self.store.touch(self.store.match(pack(query), scope))

    @rule(query=tokens_of, scope=scopes)
    def pin(self, query: tuple[int, ...], scope: Scope) -> None:
        prefix = self.store.match(pack(query), scope)
        self.store.pin(prefix)
        self.pinned.append(prefix)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.store.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(query=tokens_of, scope=scopes)
    def load(self, query: tuple[int, ...], scope: Scope) -> None:
        for block in self.store.match(pack(query), scope).blocks:
            if block.data is None and block in self.store:
                self.store.store_in_host(block, self.files[block.name][1])
        self.run_disk_operations()

    @rule(query=tokens_of, scope=scopes)
    def lose_file(self, query: tuple[int, ...], scope: Scope) -> None:
        prefix = self.store.match(pack(query), scope)
        if prefix and prefix.blocks[-1].on_disk:
            self.has_all = False
            self.store.mark_file_lost(prefix.blocks[-1])
            for pinned in [each for each in self.pinned if any(block not in self.store for block in each.blocks)]:
                self.store.unpin(pinned)
                self.pinned.remove(pinned)
            self.run_disk_operations()

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """Rebuild the store from its files. An orderly stop writes the blocks in host memory to disk first."""
        if orderly:
            self.store.write_host_to_disk()
            self.run_disk_operations()
        kept = {block.name for block in self.blocks() if block.on_disk}
        assert kept == set(self.files)
        self.has_all &= all(block.on_disk for block in self.blocks())
        self.store = self.empty_store()
        assert self.store.rebuild(self.headers()) == []
        assert {block.name for block in self.blocks()} == kept
        self.pinned.clear()
        self.run_disk_operations()

    def empty_store(self) -> BlockStore:
        return BlockStore(self.reference.block_tokens, self.host, self.disk, can_cut=self.reference.can_cut)

    def headers(self) -> Iterator[BlockHeader]:
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

    def blocks(self) -> list[Block]:
        return list(self.store._tree)

    def run_disk_operations(self) -> None:
        for operation in self.store.drain_disk_operations():
            if isinstance(operation, WriteBlock):
                assert operation.block.name not in self.files
                self.files[operation.block.name] = (operation.block, operation.data)
                self.clock += 1
                self.written_s[operation.block.name] = self.clock
            else:
                del self.files[operation.block.name]

    def check_prefix(self, matched: StoredPrefix, query: tuple[int, ...], scope: Scope) -> None:
        packed, at = pack(query), 0
        for block in matched.blocks:
            assert block.start == at
            at = block.end
            end = min(block.end, matched.n_tokens)
            assert block.tokens[: 4 * (end - block.start)] == packed[4 * block.start : 4 * end]
            assert block.namespace in (PUBLIC, scope.key)
            if block.namespace == PUBLIC:
                assert end <= scope.public
            prefix = packed[: 4 * block.start] + block.tokens
            data = self.files[block.name][1] if block.data is None else block.data
            assert data == data_for(block.namespace, prefix)
        assert at >= matched.n_tokens
        assert not matched.blocks or matched.blocks[-1].start < matched.n_tokens

    @invariant()
    def store_is_consistent(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        assert self.store.host_bytes <= self.host
        assert self.store.disk_bytes <= self.disk
        assert self.store.disk_bytes == sum(FILE_BYTES + len(b.tokens) + len(data) for b, data in self.files.values())
        assert {block.name for block in self.blocks() if block.on_disk} == set(self.files)
        for prefix in self.pinned:
            assert all(block in self.store for block in prefix.blocks)


BlockMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBlocks = BlockMachine.TestCase


@settings(deadline=None, max_examples=80)
@given(st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12), st.data())
def test_child_blocks_are_found_as_a_scan_finds_them(strings: set[tuple[int, ...]], data: st.DataObject) -> None:
    children = ChildBlocks()
    blocks = {string: Block(None, PUBLIC, pack(string), 0, len(string), b"", 0) for string in strings}
    for block in blocks.values():
        children.add(block)
    for removed in data.draw(st.sets(st.sampled_from(sorted(strings)), max_size=len(strings) - 1)):
        children.remove(blocks.pop(removed))
    children.check_integrity()
    assert len(children) == len(blocks)
    query = data.draw(st.lists(st.integers(0, 1), max_size=6).map(tuple))
    packed = pack(query)
    assert children.get(packed) is blocks.get(query)
    prefixes = [block.end for block in children.prefixes_of(packed)]
    assert prefixes == sorted((len(string) for string in blocks if query[: len(string)] == string), reverse=True)
    n_common, closest = children.closest(packed)
    assert n_common == max(common(query, string) for string in blocks)
    assert closest.tokens[: 4 * n_common] == packed[: 4 * n_common]
    longer = children.first_starting_with(packed)
    assert (longer is not None) == any(string[: len(query)] == query for string in blocks)
    assert longer is None or longer.tokens.startswith(packed)
