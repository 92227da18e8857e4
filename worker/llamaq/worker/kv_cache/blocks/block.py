"""A block, which is the saved KV state of a few consecutive tokens, and the types that describe blocks.

A block is useful only together with all its ancestors, which are the blocks of the tokens before it. The name of a
block is therefore a hash of three values: the name of the parent block, and the namespace and the tokens of the block.
Two blocks with equal names have equal tokens and equal ancestors.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.packed_tokens import TOKEN_BYTES, common_prefix
from llamaq.worker.core.saved_cells import SavedCells, footprint

ROOT_NAME = bytes(32)
"""Name of the root of the tree. The root is the parent of every first block."""

BLOCK_BYTES = 1024
"""Approximate host memory of a block without its data, in bytes: the object, the tokens, the tree and LRU entries."""

FILE_BYTES = 140
"""Size of a block's file without its tokens and its data, in bytes. `disk_format` defines the file."""


def block_name(parent_name: bytes, namespace: bytes, tokens: bytes) -> bytes:
    """Return the 32-byte name of a block: a SHA-256 hash that includes the name of the parent."""
    return hashlib.sha256(parent_name + namespace + tokens).digest()


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """The tokens of a prompt from position `start` up to but not including position `end`."""

    start: int
    end: int


@dataclass(slots=True, eq=False)
class Block:
    """The KV state of the tokens from `start` up to but not including `end`, computed after the ancestors' tokens.

    The data of a block is in host memory (`data`), in a file (`on_disk`), or in both.
    """

    parent: Block | None
    """None only for the root of the tree."""
    namespace: bytes
    """`PUBLIC` or the key of a namespace."""
    tokens: bytes
    """Packed tokens of this block, without the tokens of its ancestors."""
    start: int
    end: int
    name: bytes
    n_bytes: int
    """Length of the data in bytes."""
    data: SavedCells | None = None
    on_disk: bool = False
    """Whether the block has a file. The write of the file may still be pending."""
    pin_count: int = 0
    """Number of transfers that use the block. A block with pins is not evicted from any tier."""
    children: dict[bytes, ChildBlocks] = field(default_factory=dict)
    """Maps a namespace to the child blocks in that namespace."""

    @property
    def host_bytes(self) -> int:
        """Host memory that the block uses when its data is in host memory, in bytes."""
        return (self.n_bytes if self.data is None else footprint(self.data)) + BLOCK_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of the block's file in bytes."""
        return self.n_bytes + len(self.tokens) + FILE_BYTES

    def path(self) -> list[Block]:
        """Return the ancestors of this block and then this block, in the order of their tokens. Excludes the root."""
        blocks = []
        block = self
        while block.parent is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    def is_ancestor_of(self, other: Block) -> bool:
        """Whether this block is on the path from the root to `other`."""
        ancestor = other.parent
        while ancestor is not None and ancestor.end > self.end:
            ancestor = ancestor.parent
        return ancestor is self

    def subtree(self) -> list[Block]:
        """Return this block and all its descendants, each block before its children."""
        blocks = [self]
        for block in blocks:
            for children in block.children.values():
                blocks.extend(children)
        return blocks

    def __repr__(self) -> str:
        tiers = [tier for tier, is_stored in (("host", self.data is not None), ("disk", self.on_disk)) if is_stored]
        stored_in = "+".join(tiers) or "no tier"
        return f"<Block {self.name.hex()[:8]} [{self.start}, {self.end}) {stored_in} pins={self.pin_count}>"


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The stored blocks that contain the first `n_tokens` tokens of a query, in the order of their tokens.

    The last block may contain more tokens than the query matches. Then only its first part is used.
    """

    blocks: tuple[Block, ...] = ()
    n_tokens: int = 0

    def __bool__(self) -> bool:
        return self.n_tokens > 0

    @property
    def tier(self) -> CacheTier:
        """The farthest tier that the blocks must be loaded from."""
        return CacheTier.DISK if any(block.data is None for block in self.blocks) else CacheTier.HOST


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The header of a block's file: everything about the block except its data."""

    name: bytes
    parent_name: bytes
    namespace: bytes
    tokens: bytes
    start: int
    end: int
    n_bytes: int
    """Length of the data in bytes."""
    modified_s: float
    """Modification time of the file, in seconds of Unix time."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write the block's file.

    The operation holds the data itself, because host memory may evict the block before the file is written.
    """

    block: Block
    data: SavedCells


@dataclass(frozen=True, slots=True)
class EraseBlock:
    """Delete the block's file."""

    block: Block


DiskOperation = WriteBlock | EraseBlock


class ChildBlocks:
    """The children of one block in one namespace, sorted by the bytes of their tokens.

    In this order, the block with the longest common prefix with a query is directly before or after the position at
    which the query would be inserted.
    """

    __slots__ = ("_blocks", "_keys")

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._blocks: dict[bytes, Block] = {}

    def add(self, block: Block) -> None:
        """Add a block. No child may have the same tokens."""
        insort(self._keys, block.tokens)
        self._blocks[block.tokens] = block

    def remove(self, block: Block) -> None:
        """Remove a block that is among the children."""
        del self._blocks[block.tokens]
        del self._keys[bisect_left(self._keys, block.tokens)]

    def get(self, tokens: bytes) -> Block | None:
        """Return the block with exactly these tokens, or None."""
        return self._blocks.get(tokens)

    def first_starting_with(self, tokens: bytes) -> Block | None:
        """Return a block whose tokens start with `tokens` or equal them, or None."""
        at = bisect_left(self._keys, tokens)
        if at < len(self._keys) and self._keys[at].startswith(tokens):
            return self._blocks[self._keys[at]]
        return None

    def prefixes_of(self, tokens: bytes) -> Iterator[Block]:
        """Iterate over the blocks whose tokens are a prefix of `tokens`, longest first."""
        at = bisect_right(self._keys, tokens)
        while at:
            key = self._keys[at - 1]
            if tokens.startswith(key):
                yield self._blocks[key]
                tokens = key[:-TOKEN_BYTES]
            else:  # each prefix of `tokens` before `key` is a prefix of what `key` and `tokens` have in common
                tokens = tokens[: common_prefix(key, tokens) * TOKEN_BYTES]
            at = bisect_right(self._keys, tokens, 0, at - 1)

    def closest(self, tokens: bytes) -> tuple[int, Block]:
        """Return the block with the longest common prefix with `tokens`, and the length of this prefix in tokens."""
        at = bisect_left(self._keys, tokens)
        neighbours = self._keys[max(0, at - 1) : at + 1]
        in_common = [common_prefix(key, tokens) for key in neighbours]
        longest = max(in_common)
        return longest, self._blocks[neighbours[in_common.index(longest)]]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._keys)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the sorted keys and the blocks contradict each other."""
        if self._keys != sorted(self._blocks) or any(key != block.tokens for key, block in self._blocks.items()):
            raise AssertionError(f"child blocks are out of order: {list(self._blocks.values())}")
