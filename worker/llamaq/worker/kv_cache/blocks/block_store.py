"""The prefix cache's tiers beyond the device, decided: which blocks of KV state lie in host memory and which on disk.

    (root) ── [0, 64) ── [64, 100) ─┬─ [100, 164) ── [164, 170)     namespace A
                public blocks       └─ [100, 131)                   namespace B

Blocks form a tree by their tokens, so conversations with the same beginning share its blocks. Each tier is counted
in bytes and gives up the block that was used longest ago. A block is never used less recently than those below it,
so tails go first. What leaves memory goes to disk, if there is one, its ancestors with it: every file's parent has a
file, whenever the process ends. This module only decides; `block_files` writes, reads and erases.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from llamaq.worker.core.cache_scope import PUBLIC, Scope
from llamaq.worker.core.kv_data import Data
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.blocks.block import Block, Chain, DiskOperation, Erase, Span, StoredBlock, Write
from llamaq.worker.kv_cache.blocks.block_tree import BlockTree
from llamaq.worker.kv_cache.blocks.lru_order import LruOrder


class BlockStore:
    """Which blocks are stored, and in which tier.

    `block_tokens` is how many tokens a block has, None for one block from 0 to its end for each sequence. `max_bytes`
    and `max_disk_bytes` bound the tiers after any call. Without `can_cut` a block is used whole or not at all.
    Not for several threads.
    """

    def __init__(self, block_tokens: int | None, max_bytes: int, max_disk_bytes: int = 0, *, can_cut: bool) -> None:
        self.evictions = 0
        """Blocks that left both tiers for want of room."""
        self._index = BlockTree(block_tokens, can_cut=can_cut)
        self._host = LruOrder(self._index.root, max_bytes, attrgetter("host_bytes"))
        self._disk = LruOrder(self._index.root, max_disk_bytes, attrgetter("file_bytes"))
        self._orders: list[DiskOperation] = []
        self._last_put: tuple[bytes, Scope, Block | None] = (b"", Scope(), None)

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks whose data lies in memory."""
        return self._host.n_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that there are, or will be when all orders are carried out."""
        return self._disk.n_bytes

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, block: Block) -> bool:
        return block in self._index

    def match(self, tokens: bytes, scope: Scope) -> Chain:
        """The stored blocks that hold the most tokens of the query, from its beginning on.

        Mutates nothing. A chain is worth nothing after any call that puts, loads or loses blocks, unless it is pinned.
        """
        return self._index.match(tokens, scope)

    def missing(self, tokens: bytes, scope: Scope) -> list[Span]:
        """The spans that are to be saved, in this order, before all of `tokens` is stored. Mutates nothing."""
        return self._index.missing(tokens, scope)

    def put(self, tokens: bytes, scope: Scope, span: Span, data: Data) -> Block | None:
        """Store the data of one of the missing spans of `tokens`; others may be evicted for it.

        Returns the block that holds it now, perhaps a longer one, or None when it was not kept: larger than all
        there may be, no room beside blocks in use, or one before it has gone meanwhile.
        """
        n_tokens = len(tokens) // TOKEN_BYTES
        parent = self._parent(tokens, scope, span.start)
        if parent is None:
            return None
        namespace, end = self._index.part(span.start, n_tokens, scope)
        if end != span.end:
            raise ValueError(f"{span} is none of the parts of these {n_tokens} tokens")
        block = self._index.child(parent, namespace, tokens, end)
        if block is None:
            block = self._keep(parent, namespace, tokens[span.start * TOKEN_BYTES : end * TOKEN_BYTES], data)
        else:
            if block.end == end:
                self.loaded(block, data)
            self._touch(block)
        self._last_put = (tokens, scope, block)
        return block

    def touch(self, chain: Chain) -> None:
        """The chain was used: what was used before is evicted before it."""
        if chain.blocks and chain.blocks[-1] in self:
            self._touch(chain.blocks[-1])

    def pin(self, chain: Chain) -> None:
        """A transfer uses the chain: until `unpin` nothing evicts it. `LookupError` when a part of it has gone."""
        if any(block not in self for block in chain.blocks):
            raise LookupError(f"{chain} is no longer stored")
        for block in chain.blocks:
            block.pins += 1
            self._host.hold(block)
            self._disk.hold(block)

    def unpin(self, chain: Chain) -> None:
        """One transfer is done with the chain, which counts as used now."""
        for block in reversed(chain.blocks):
            block.pins -= 1
            if block in self and not block.pins:
                if block.data is not None:
                    self._host.release(block)
                if block.on_disk:
                    self._disk.release(block)

    def loaded(self, block: Block, data: Data) -> None:
        """The block's file was read: keep its data in memory too, if there is room."""
        fits = len(data) == block.n_bytes and block.host_bytes <= self._host.max_bytes
        if block in self and block.data is None and fits:
            block.data = data
            self._host.add(block)
            self._touch(block)
            self._shrink(block)

    def lost(self, block: Block) -> None:
        """The block has no good file. It goes with all below it, except where it lies in memory with its ancestors."""
        if block not in self:
            return
        below = block.subtree()
        gone: set[Block | None] = set()
        for each in below:
            if each.on_disk:
                self._forget_file(each)
            if each.data is None or each.parent in gone:
                gone.add(each)
        for each in reversed(below):
            if each in gone:
                self._remove(each)

    def forget(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        """Remove the blocks of these tokens that end after the first `n_kept`.

        What others need stays: what is public, in use, above other blocks, or goes on with other tokens.
        """
        while chain := self.match(tokens, scope):
            for block in reversed(chain.blocks):
                is_others = block.namespace == PUBLIC or block.children or block.pins or block.end > chain.n_tokens
                if is_others or block.end <= n_kept:
                    return
                self._remove(block)

    def take_orders(self) -> list[DiskOperation]:
        """What is to be done on disk since the last call, in this order. Failures are told to `lost`."""
        orders, self._orders = self._orders, []
        return orders

    def spill(self) -> None:
        """Order files for what lies in memory alone, the most recently used first, as far as the disk has room."""
        n_bytes = 0
        for block in list(self._host):
            n_bytes += 0 if block.on_disk else block.file_bytes
            if n_bytes > self._disk.max_bytes:
                break
            if block in self and not block.on_disk:
                self._to_disk(block)

    def restore(self, stored: Iterable[StoredBlock]) -> list[StoredBlock]:
        """Take the files that were found into an empty tree. Returns those that have no place in it and may go."""
        blocks, orphans = self._index.rebuild(stored)
        for block in blocks:
            block.on_disk = True
            self._disk.add(block)
            self._disk.touch(block)
        while self._disk.is_over and (oldest := self._disk.oldest):
            self._leave_disk(oldest)
        return orphans

    def _keep(self, parent: Block, namespace: bytes, tokens: bytes, data: Data) -> Block | None:
        """A new block, in memory if it can be there at all, else on disk."""
        block = self._index.add(parent, namespace, tokens, len(data))
        in_host = block.host_bytes <= self._host.max_bytes
        if not in_host and block.file_bytes > self._disk.max_bytes:
            self._index.remove(block)
            return None
        self._supersede(block)
        block.data = data
        if in_host:
            self._host.add(block)
            self._shrink(block)
        else:
            ordered = self._to_disk(block)
            block.data = None
            if not ordered:
                self._index.remove(block)
        return block if block in self else None

    def _parent(self, tokens: bytes, scope: Scope, start: int) -> Block | None:
        """The block before `start`, or None when it is not stored. What is put counts as used now."""
        last_tokens, last_scope, last = self._last_put
        if tokens is last_tokens and scope == last_scope and last and last.end == start and last in self:
            return last  # a long prompt is not walked, nor moved in the order, for each of its blocks
        parent = self._index.walk(tokens, scope, start)
        self._touch(parent)
        return parent if parent.end == start else None

    def _supersede(self, block: Block) -> None:
        """Remove the shorter siblings of which the block is the continuation."""
        if self._index.can_cut and block.parent is not None:
            siblings = block.parent.children[block.namespace]
            for shorter in list(siblings.within(block.tokens[:-TOKEN_BYTES])):
                if not shorter.children and not shorter.pins:
                    self._remove(shorter)

    def _touch(self, block: Block) -> None:
        """Move the block and then its ancestors to the end of the orders: a parent stands after its children."""
        for each in reversed(block.path()):
            self._host.touch(each)
            self._disk.touch(each)

    def _shrink(self, newest: Block) -> None:
        """Bring memory down to its maximum; `newest` goes if all others are in use."""
        while self._host.is_over:
            self._leave_host(self._host.oldest or newest)

    def _leave_host(self, block: Block) -> None:
        if block.on_disk or self._to_disk(block):
            self._host.remove(block)
            block.data = None
        else:  # nothing is below it: on disk there cannot be, and in memory its turn would have been earlier
            self._remove(block)
            self.evictions += 1

    def _to_disk(self, block: Block) -> bool:
        """Order the files of the block and of its ancestors that have none; others go for them. False: no room."""
        new: list[tuple[Block, Data]] = []
        n_bytes = 0
        above: Block | None = block
        while above is not None and above.data is not None and not above.on_disk:
            new.append((above, above.data))
            n_bytes += above.file_bytes
            if n_bytes > self._disk.max_bytes:
                return False
            above = above.parent
        if not self._make_disk_room(n_bytes, block):
            return False
        for each, data in reversed(new):
            each.on_disk = True
            self._disk.add(each)
            self._orders.append(Write(each, data))
        return True

    def _make_disk_room(self, n_bytes: int, block: Block) -> bool:
        """Evict files until so many bytes are free, but none that `block` needs."""
        is_touched = False
        while self._disk.n_bytes + n_bytes > self._disk.max_bytes:
            oldest = self._disk.oldest
            if oldest is None:
                return False
            if not oldest.is_above(block):
                self._leave_disk(oldest)
            elif is_touched:  # only files that the block needs are left
                return False
            else:
                is_touched = True
                self._touch(block)
        return True

    def _leave_disk(self, block: Block) -> None:
        """Give up the file; what is in no tier then goes, with what lies below it, which is used less."""
        self._forget_file(block)
        if block.data is None:
            below = block.subtree()
            self.evictions += len(below)
            for each in reversed(below):
                self._remove(each)

    def _forget_file(self, block: Block) -> None:
        self._disk.remove(block)
        block.on_disk = False
        self._orders.append(Erase(block))

    def _remove(self, block: Block) -> None:
        """The block goes for good; it has no children."""
        if block.on_disk:
            self._forget_file(block)
        if block.data is not None:
            self._host.remove(block)
            block.data = None
        self._index.remove(block)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when tree, tiers and counts contradict each other."""
        self._index.check_integrity()
        self._host.check_integrity({block for block in self._index if block.data is not None})
        self._disk.check_integrity({block for block in self._index if block.on_disk})
        for block in self._index:
            if block.data is None and not block.on_disk:
                raise AssertionError(f"{block!r} is in no tier")
            if block.data is not None and len(block.data) != block.n_bytes:
                raise AssertionError(f"{block!r} has {len(block.data)} bytes of data, counts {block.n_bytes}")
            if block.on_disk and block.parent is not self._index.root and not (block.parent and block.parent.on_disk):
                raise AssertionError(f"{block!r} has a file, {block.parent!r} has none")
            if block.pins < sum(child.pins for group in block.children.values() for child in group):
                raise AssertionError(f"{block!r} is pinned less often than what is below it")

    def __repr__(self) -> str:
        return f"<BlockStore {len(self)} blocks, host {self._host!r}, disk {self._disk!r}>"
