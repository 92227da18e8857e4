"""Decides which blocks of KV state are stored in host memory and which on disk.

    (root) ── [0, 64) ── [64, 100) ─┬─ [100, 164) ── [164, 170)     namespace A
                public blocks       └─ [100, 131)                   namespace B

Blocks form a tree: conversations that begin with the same tokens share the blocks of these tokens. Each tier has a
capacity in bytes and evicts its least recently used block. A use of a block is also a use of its ancestors, so the last
blocks of a conversation are evicted first.

If a disk tier exists, a block that host memory evicts moves to disk. Its ancestors get files too. So the parent of a
block with a file always has a file. This module only decides. The package `offload` writes, reads and erases the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from operator import attrgetter

from llamaq.worker.core.cache_scope import PUBLIC, Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.kv_cache.blocks.block import (
    Block,
    BlockHeader,
    BlockSpan,
    DiskOperation,
    EraseBlock,
    StoredPrefix,
    WriteBlock,
)
from llamaq.worker.kv_cache.blocks.block_tree import BlockTree
from llamaq.worker.kv_cache.blocks.lru_order import LruOrder


class BlockStore:
    """The stored blocks, and the tiers that contain each block.

    Not thread-safe: all calls must come from one thread.
    """

    def __init__(self, block_tokens: int | None, max_bytes: int, max_disk_bytes: int = 0, *, can_cut: bool) -> None:
        """Create an empty store.

        Args:
            block_tokens: Number of tokens of a block. If None, each sequence is stored as a single block.
            max_bytes: Capacity of host memory in bytes. It is not exceeded after any call.
            max_disk_bytes: Capacity of the disk in bytes. It is not exceeded after any call. 0 means no disk tier.
            can_cut: Whether a query may use only the first part of a block.
        """
        self._tree = BlockTree(block_tokens, can_cut=can_cut)
        self._host = LruOrder(self._tree.root, max_bytes, attrgetter("host_bytes"))
        self._disk = LruOrder(self._tree.root, max_disk_bytes, attrgetter("file_bytes"))
        self._disk_operations: list[DiskOperation] = []
        self._last_insert: tuple[bytes, Scope, Block | None] = (b"", Scope(), None)

    @property
    def max_host_bytes(self) -> int:
        """Capacity of host memory in bytes."""
        return self._host.max_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory used by the blocks whose data is in host memory, in bytes."""
        return self._host.n_bytes

    @property
    def disk_bytes(self) -> int:
        """Total size of the files in bytes, as it will be when all planned disk operations are done."""
        return self._disk.n_bytes

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, block: Block) -> bool:
        return block in self._tree

    def match(self, tokens: bytes, scope: Scope) -> StoredPrefix:
        """Return the longest stored prefix of `tokens` that `scope` may use. Changes nothing.

        The result becomes invalid when blocks are inserted, loaded or removed, unless it is pinned.
        """
        return self._tree.match(tokens, scope)

    def missing_spans(self, tokens: bytes, scope: Scope) -> list[BlockSpan]:
        """Return the missing spans of `tokens`. The caller inserts them in this order. Changes nothing."""
        return self._tree.missing_spans(tokens, scope)

    def insert(self, tokens: bytes, scope: Scope, span: BlockSpan, data: SavedCells) -> Block | None:
        """Store the data of one of the missing spans of `tokens`. This may evict other blocks.

        Returns:
            The block that contains the span. The block may be longer than the span. None when the span cannot be
            stored: the data is larger than the capacity, pinned blocks leave no room, or the parent block is no longer
            stored.
        """
        n_tokens = len(tokens) // TOKEN_BYTES
        parent = self._parent_of(tokens, scope, span.start)
        if parent is None:
            return None
        namespace, end = self._tree.block_bounds(span.start, n_tokens, scope)
        if end != span.end:
            raise ValueError(f"{span} is not a block of these {n_tokens} tokens")
        block = self._tree.find_child(parent, namespace, tokens, end)
        if block is None:
            block = self._add(parent, namespace, tokens[span.start * TOKEN_BYTES : end * TOKEN_BYTES], data)
        else:
            if block.end == end:
                self.store_in_host(block, data)
            self._touch(block)
        self._last_insert = (tokens, scope, block)
        return block

    def touch(self, stored: StoredPrefix) -> None:
        """Mark the blocks of the prefix as used now."""
        if stored.blocks and stored.blocks[-1] in self:
            self._touch(stored.blocks[-1])

    def pin(self, stored: StoredPrefix) -> None:
        """Protect the blocks from eviction until `unpin`. Raises `LookupError` when one of them is no longer stored."""
        if any(block not in self for block in stored.blocks):
            raise LookupError(f"{stored} is no longer stored")
        for block in stored.blocks:
            block.pin_count += 1
            self._host.pin(block)
            self._disk.pin(block)

    def unpin(self, stored: StoredPrefix) -> None:
        """Undo one `pin`. Blocks without further pins are marked as used now."""
        for block in reversed(stored.blocks):
            block.pin_count -= 1
            if block in self and not block.pin_count:
                if block.data is not None:
                    self._host.unpin(block)
                if block.on_disk:
                    self._disk.unpin(block)

    def store_in_host(self, block: Block, data: SavedCells) -> None:
        """Store the data of a block that is only on disk also in host memory. This may evict other blocks.

        Nothing is stored or evicted if the length of the data is wrong or host memory has no room for the block.
        """
        if block in self and block.data is None and len(data) == block.n_bytes:
            self._touch(block)
            if self._put_in_host(block, data):
                self._evict_until_host_fits()

    def mark_file_lost(self, block: Block) -> None:
        """Remove the files of the block and its descendants, because the block's file is missing or invalid.

        A block of this subtree stays stored only if its data is in host memory. The data of each block on the path from
        `block` to it must be in host memory too. All other blocks of the subtree are removed.
        """
        if block not in self or not block.on_disk:  # without its file, no descendant has a file either
            return
        subtree = block.subtree()
        removed: set[Block | None] = set()
        for each in subtree:
            if each.on_disk:
                self._remove_file(each)
            if each.data is None or each.parent in removed:
                removed.add(each)
        for each in reversed(subtree):
            if each in removed:
                self._remove(each)

    def discard(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        """Remove the blocks of `tokens` that end after the first `n_kept` tokens.

        A block is kept when it is public, is pinned, still has a child, or also contains tokens that are not in
        `tokens`.
        """
        while stored := self.match(tokens, scope):
            for block in reversed(stored.blocks):
                is_shared = block.namespace == PUBLIC or block.children or block.end > stored.n_tokens
                if is_shared or block.pin_count or block.end <= n_kept:
                    return
                self._remove(block)

    def discard_branch(self, tokens: bytes, scope: Scope) -> None:
        """Remove the last block of `tokens` with all blocks after it; then `discard` the blocks before it."""
        if stored := self.match(tokens, scope):
            for block in reversed(list(stored.blocks[-1].subtree())):
                if not (block.children or block.pin_count):
                    self._remove(block)
        self.discard(tokens, scope, 0)

    def drain_disk_operations(self) -> list[DiskOperation]:
        """Return the disk operations that were planned since the last call, in the order to execute them.

        If an operation fails, the caller calls `mark_file_lost`.
        """
        operations, self._disk_operations = self._disk_operations, []
        return operations

    def write_host_to_disk(self) -> None:
        """Plan files for the blocks that are only in host memory, most recently used first, while the disk has room."""
        n_bytes = 0
        for block in list(self._host):
            n_bytes += 0 if block.on_disk else block.file_bytes
            if n_bytes > self._disk.max_bytes:
                break
            if block in self and not block.on_disk:
                self._plan_files(block)

    def rebuild(self, headers: Iterable[BlockHeader]) -> list[BlockHeader]:
        """Fill an empty store from the headers of the files on disk.

        Returns:
            The headers that do not fit into the tree. The caller may erase their files.
        """
        blocks, orphans = self._tree.rebuild(headers)
        for block in blocks:
            block.on_disk = True
            self._disk.add(block)
            self._disk.touch(block)
        while self._disk.is_over and (oldest := self._disk.oldest):
            self._evict_from_disk(oldest)
        return orphans

    def _add(self, parent: Block, namespace: bytes, tokens: bytes, data: SavedCells) -> Block | None:
        """Add a new block in host memory, or on disk when host memory has no room. None when neither has room.

        Blocks that the new block supersedes are removed only if the new block is stored.
        """
        block = self._tree.add(parent, namespace, tokens, len(data))
        if self._put_in_host(block, data):
            self._remove_superseded(block)  # before other blocks are evicted, because their room may be enough
            self._evict_until_host_fits()
        elif not self._put_on_disk(block, data):
            self._tree.remove(block)
        return block if block in self else None

    def _put_in_host(self, block: Block, data: SavedCells) -> bool:
        """Put the block into host memory if there is room without older blocks. The caller evicts these blocks.

        Returns:
            False if pinned or more recently used blocks leave no room. Then nothing has changed.
        """
        block.data = data
        self._host.add(block)
        if self._host.fits_without(takewhile(lambda each: each is not block, self._host.oldest_first())):
            return True
        self._host.remove(block)
        block.data = None
        return False

    def _put_on_disk(self, block: Block, data: SavedCells) -> bool:
        """Plan a file for a new block that is not in host memory, in place of the blocks that it supersedes.

        Returns:
            False when the disk has no room. Then nothing has changed.
        """
        block.data = data
        fits = self._fits_on_disk(block)
        if fits:
            self._remove_superseded(block)
            self._plan_files(block)
        block.data = None
        return fits

    def _parent_of(self, tokens: bytes, scope: Scope, start: int) -> Block | None:
        """Return the block of `tokens` that ends at `start`, or None. Marks the block and its ancestors as used now."""
        last_tokens, last_scope, last = self._last_insert
        if tokens is last_tokens and scope == last_scope and last and last.end == start and last in self:
            return last  # avoids a search from the root for each block of a long prompt
        parent = self._tree.last_stored(tokens, scope, start)
        self._touch(parent)
        return parent if parent.end == start else None

    def _remove_superseded(self, block: Block) -> None:
        """Remove the siblings whose tokens are a prefix of the block's tokens."""
        if self._tree.can_cut and block.parent is not None:
            siblings = block.parent.children[block.namespace]
            for shorter in list(siblings.prefixes_of(block.tokens[:-TOKEN_BYTES])):
                if not shorter.children and not shorter.pin_count:
                    self._remove(shorter)

    def _touch(self, block: Block) -> None:
        """Mark the block and then its ancestors as used now, so that a parent is always newer than its children."""
        for each in reversed(block.path()):
            self._host.touch(each)
            self._disk.touch(each)

    def _evict_until_host_fits(self) -> None:
        """Evict blocks until host memory is within its capacity, the oldest first."""
        while self._host.is_over and (oldest := self._host.oldest):
            self._evict_from_host(oldest)

    def _evict_from_host(self, block: Block) -> None:
        """Move the block to disk, or remove it when the disk has no room."""
        if block.on_disk or self._plan_files(block):
            self._host.remove(block)
            block.data = None
        else:  # the block has no children: a child on disk has a parent on disk, and host memory evicts children first
            self._remove(block)

    def _plan_files(self, block: Block) -> bool:
        """Plan files for the block and each ancestor without a file.

        Returns:
            False when the disk has no room. Then nothing has changed.
        """
        if not self._fits_on_disk(block):
            return False
        without_file = _without_file(block)
        self._make_disk_room(sum(each.file_bytes for each, _ in without_file), block)
        for planned, data in reversed(without_file):
            planned.on_disk = True
            self._disk.add(planned)
            self._disk_operations.append(WriteBlock(planned, data))
        return True

    def _fits_on_disk(self, block: Block) -> bool:
        """Whether the disk has room for the files that the block needs. Pinned blocks and its ancestors are kept."""
        n_bytes = sum(each.file_bytes for each, _ in _without_file(block))
        evictable = (each for each in self._disk.oldest_first() if not each.is_ancestor_of(block))
        return self._disk.fits_without(evictable, n_bytes)

    def _make_disk_room(self, n_bytes: int, block: Block) -> None:
        """Evict files until `n_bytes` are free. Files of the block's ancestors are kept."""
        while self._disk.n_bytes + n_bytes > self._disk.max_bytes and (oldest := self._disk.oldest):
            if oldest.is_ancestor_of(block):
                self._touch(block)  # makes the ancestors the newest
            else:
                self._evict_from_disk(oldest)

    def _evict_from_disk(self, block: Block) -> None:
        """Remove the block's file. If its data is not in host memory either, remove the block and its descendants."""
        self._remove_file(block)
        if block.data is None:
            for each in reversed(block.subtree()):
                self._remove(each)

    def _remove_file(self, block: Block) -> None:
        self._disk.remove(block)
        block.on_disk = False
        self._disk_operations.append(EraseBlock(block))

    def _remove(self, block: Block) -> None:
        """Remove a block that has no children from all tiers and from the tree."""
        if block.on_disk:
            self._remove_file(block)
        if block.data is not None:
            self._host.remove(block)
            block.data = None
        self._tree.remove(block)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the tree, the tiers and the byte counts contradict each other."""
        self._tree.check_integrity()
        self._host.check_integrity({block for block in self._tree if block.data is not None})
        self._disk.check_integrity({block for block in self._tree if block.on_disk})
        for block in self._tree:
            if block.data is None and not block.on_disk:
                raise AssertionError(f"{block!r} is in no tier")
            if block.data is not None and len(block.data) != block.n_bytes:
                raise AssertionError(f"{block!r} has {len(block.data)} bytes of data instead of {block.n_bytes}")
            if block.on_disk and block.parent is not self._tree.root and not (block.parent and block.parent.on_disk):
                raise AssertionError(f"{block!r} has a file, its parent {block.parent!r} has none")
            if block.pin_count < sum(child.pin_count for group in block.children.values() for child in group):
                raise AssertionError(f"{block!r} has fewer pins than its children")

    def __repr__(self) -> str:
        return f"<BlockStore {len(self)} blocks, host {self._host!r}, disk {self._disk!r}>"


def _without_file(block: Block) -> list[tuple[Block, SavedCells]]:
    """Return the block and its ancestors up to the first one with a file, with their data."""
    found: list[tuple[Block, SavedCells]] = []
    each: Block | None = block
    while each is not None and each.data is not None and not each.on_disk:
        found.append((each, each.data))
        each = each.parent
    return found
