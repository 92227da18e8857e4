"""The blocks of one tier (host memory or disk) in the order of their last use, and their total size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from llamaq.worker.kv_cache.blocks.block import Block


class LruOrder:
    """The blocks of one tier, ordered by their last use.

    The order does not contain pinned blocks, because pinned blocks cannot be evicted. `n_bytes` includes pinned blocks.

    Invariant: a block is always newer than all its descendants, because every use of a block is also a use of its
    ancestors.

    The order is a circular doubly linked list, so that a block can be inserted before its parent in constant time. The
    root of the tree is the sentinel: the oldest block is directly after the root, the newest directly before the root.
    """

    def __init__(self, root: Block, max_bytes: int, size_of: Callable[[Block], int]) -> None:
        """Create an empty order.

        Args:
            root: The root of the block tree.
            max_bytes: Capacity of the tier in bytes.
            size_of: Returns the size of a block in this tier, in bytes.
        """
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._root = root
        self._size_of = size_of
        self._next = {root: root}
        self._previous = {root: root}

    @property
    def is_over(self) -> bool:
        """Whether the blocks use more than `max_bytes`."""
        return self.n_bytes > self.max_bytes

    @property
    def oldest(self) -> Block | None:
        """The least recently used block that is not pinned."""
        block = self._next[self._root]
        return None if block is self._root else block

    def fits_without(self, evictable: Iterable[Block], n_more: int = 0) -> bool:
        """Whether `n_more` bytes fit if blocks are evicted in the order of `evictable`, until there is room."""
        n_bytes = self.n_bytes + n_more
        if self.max_bytes < n_bytes and n_more <= self.max_bytes:
            for block in evictable:
                n_bytes -= self._size_of(block)
                if n_bytes <= self.max_bytes:
                    break
        return n_bytes <= self.max_bytes

    def add(self, block: Block) -> None:
        """Add a block directly before its nearest ancestor in the order. It counts as used when that ancestor was used.

        If no ancestor is in the order, the block becomes the newest.
        """
        self.n_bytes += self._size_of(block)
        if not block.pin_count:
            ancestor = block.parent
            while ancestor is not None and ancestor not in self._next:
                ancestor = ancestor.parent
            self._link_before(ancestor or self._root, block)

    def remove(self, block: Block) -> None:
        """Remove a block of this tier, pinned or not."""
        self.n_bytes -= self._size_of(block)
        self._unlink(block)

    def touch(self, block: Block) -> None:
        """Make the block the newest, if it is in the order. The caller must touch the ancestors of the block next."""
        if block in self._next:
            self._unlink(block)
            self._link_before(self._root, block)

    def pin(self, block: Block) -> None:
        """Remove the block from the order, if it is in the order."""
        self._unlink(block)

    def unpin(self, block: Block) -> None:
        """Add the block again as the newest. The caller must unpin or touch the ancestors of the block next."""
        self._link_before(self._root, block)

    def _link_before(self, successor: Block, block: Block) -> None:
        previous = self._previous[successor]
        self._next[previous] = self._previous[successor] = block
        self._previous[block], self._next[block] = previous, successor

    def _unlink(self, block: Block) -> None:
        if block in self._next:
            previous, successor = self._previous.pop(block), self._next.pop(block)
            self._next[previous], self._previous[successor] = successor, previous

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks that are not pinned, the newest first."""
        block = self._previous[self._root]
        while block is not self._root:
            yield block
            block = self._previous[block]

    def oldest_first(self) -> Iterator[Block]:
        """Iterate over the blocks that are not pinned, the oldest first."""
        block = self._next[self._root]
        while block is not self._root:
            yield block
            block = self._next[block]

    def check_integrity(self, members: set[Block]) -> None:
        """Raise `AssertionError` when size or order contradict `members`, the blocks of this tier."""
        if self.n_bytes != sum(map(self._size_of, members)) or self.is_over:
            raise AssertionError(f"{self!r}: the blocks use {sum(map(self._size_of, members))} bytes")
        position = {block: -at for at, block in enumerate(self)}
        if set(position) != {block for block in members if not block.pin_count} or len(position) + 1 != len(self._next):
            raise AssertionError(f"{self!r}: the order does not have exactly the tier's blocks that are not pinned")
        for block, at in position.items():
            if any(position.get(ancestor, 1) <= at for ancestor in block.path()[:-1]):
                raise AssertionError(f"{block!r} would be evicted after one of its ancestors")
            if self._next[self._previous[block]] is not block:
                raise AssertionError(f"the links of {block!r} contradict each other")

    def __repr__(self) -> str:
        return f"{self.n_bytes}/{self.max_bytes} bytes"
