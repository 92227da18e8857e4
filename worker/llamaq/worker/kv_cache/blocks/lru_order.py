"""One tier of the prefix cache beyond the device: what lies in it, counted in bytes, in the order of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llamaq.worker.kv_cache.blocks.block import Block


class LruOrder:
    """The blocks of one tier. Pinned ones count, but stand in no order: nothing evicts them.

    In the order a block stands after all that are below it in the tree, for whoever uses a block uses its ancestors
    too. It is a linked ring, so that a new block can take the place right before its parent's, wherever that is. The
    root of the tree, above all, closes it: before the root stands the newest, after it the oldest.
    """

    def __init__(self, root: Block, max_bytes: int, measure: Callable[[Block], int]) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._root = root
        self._measure = measure
        self._after = {root: root}
        self._before = {root: root}

    @property
    def is_over(self) -> bool:
        return self.n_bytes > self.max_bytes

    @property
    def oldest(self) -> Block | None:
        """Who was used longest ago of those that are not pinned."""
        block = self._after[self._root]
        return None if block is self._root else block

    def add(self, block: Block) -> None:
        """Take the block in; it counts as used when the nearest of its ancestors was that is here."""
        self.n_bytes += self._measure(block)
        if not block.pins:
            ancestor = block.parent
            while ancestor is not None and ancestor not in self._after:
                ancestor = ancestor.parent
            self._place(block, ancestor or self._root)

    def remove(self, block: Block) -> None:
        self.n_bytes -= self._measure(block)
        self.hold(block)

    def touch(self, block: Block) -> None:
        """Used now, if it is here and not pinned. Whoever calls this touches its ancestors next."""
        if block in self._after:
            self.hold(block)
            self._place(block, self._root)

    def hold(self, block: Block) -> None:
        """Pinned: take it out of the order."""
        if block in self._after:
            before, after = self._before.pop(block), self._after.pop(block)
            self._after[before], self._before[after] = after, before

    def release(self, block: Block) -> None:
        """No longer pinned, and used now. Whoever calls this releases or touches its ancestors next."""
        self._place(block, self._root)

    def _place(self, block: Block, after: Block) -> None:
        before = self._before[after]
        self._after[before] = self._before[after] = block
        self._before[block], self._after[block] = before, after

    def __iter__(self) -> Iterator[Block]:
        """The order, the newest first."""
        block = self._before[self._root]
        while block is not self._root:
            yield block
            block = self._before[block]

    def check_integrity(self, members: set[Block]) -> None:
        """Raise `AssertionError` when bytes or order do not fit the blocks that are in this tier."""
        if self.n_bytes != sum(map(self._measure, members)) or self.is_over:
            raise AssertionError(f"{self!r} counts wrong: {sum(map(self._measure, members))} bytes")
        place = {block: -at for at, block in enumerate(self)}
        if set(place) != {block for block in members if not block.pins} or len(place) + 1 != len(self._after):
            raise AssertionError(f"{self!r} orders others than those it has")
        for block, at in place.items():
            if any(place.get(above, 1) <= at for above in block.path()[:-1]):
                raise AssertionError(f"{block!r} would be evicted after one above it")
            if self._after[self._before[block]] is not block:
                raise AssertionError(f"the order is broken at {block!r}")

    def __repr__(self) -> str:
        return f"{self.n_bytes}/{self.max_bytes} bytes"
