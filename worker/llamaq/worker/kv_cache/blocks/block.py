"""Blocks of saved KV state: what they are, how they are named, and who their siblings are.

A block is the state of a few consecutive tokens of some prefix. It is worth something only together with the blocks
before it, so its name is a hash over its parent's name, its namespace and its tokens: equal names, equal prefixes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from llamaq.worker.core.kv_data import Data, footprint
from llamaq.worker.core.tokens import TOKEN_BYTES, common_prefix

ROOT_NAME = bytes(32)
"""The name of the root of the tree, the parent of first blocks."""


BLOCK_BYTES = 1024
"""What a block costs in memory beside its data, about: the object, its tokens, its places in tree and order."""

FILE_BYTES = 140
"""What a block's file holds beside tokens and data; `block_format` holds itself to it."""


def block_name(parent_name: bytes, namespace: bytes, tokens: bytes) -> bytes:
    """The 32 bytes that name a block: a sha256 chain from the root."""
    return hashlib.sha256(parent_name + namespace + tokens).digest()


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, end) of a prompt."""

    start: int
    end: int


@dataclass(slots=True, eq=False)
class Block:
    """The state of the tokens [start, end), after those of its ancestors.

    Its data lies in memory (`data`), in a file (`on_disk`, perhaps still to be written), or in both.
    """

    parent: Block | None
    """None for the root of the tree alone."""
    namespace: bytes
    """`PUBLIC` or the key of a namespace."""
    tokens: bytes
    """Packed."""
    start: int
    end: int
    name: bytes
    n_bytes: int
    """Length of the data."""
    data: Data | None = None
    on_disk: bool = False
    pins: int = 0
    """Transfers that use it: with any, it loses neither data nor file."""
    children: dict[bytes, Siblings] = field(default_factory=dict)
    """By their namespaces."""

    @property
    def host_bytes(self) -> int:
        """What it takes of the host's memory, or would if its data lay there."""
        return (self.n_bytes if self.data is None else footprint(self.data)) + BLOCK_BYTES

    @property
    def file_bytes(self) -> int:
        """The size of its file."""
        return self.n_bytes + len(self.tokens) + FILE_BYTES

    def path(self) -> list[Block]:
        """The blocks from the first one down to this one."""
        blocks = []
        block = self
        while block.parent is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    def is_above(self, other: Block) -> bool:
        """Whether the other one is below this one in the tree."""
        above = other.parent
        while above is not None and above.end > self.end:
            above = above.parent
        return above is self

    def subtree(self) -> list[Block]:
        """This block and all below it, each before its children."""
        blocks = [self]
        for block in blocks:
            for siblings in block.children.values():
                blocks.extend(siblings)
        return blocks

    def __repr__(self) -> str:
        places = [place for place, there in (("host", self.data is not None), ("disk", self.on_disk)) if there]
        return f"<Block {self.name.hex()[:8]} [{self.start}, {self.end}) {'+'.join(places) or 'gone'} pins={self.pins}>"


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks from the root on and the `n_tokens` of a query that they hold, of the last one perhaps only a part."""

    blocks: tuple[Block, ...] = ()
    n_tokens: int = 0

    @property
    def is_resident(self) -> bool:
        """Whether all its data lies in memory."""
        return all(block.data is not None for block in self.blocks)

    def __bool__(self) -> bool:
        return self.n_tokens > 0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What a block's file says about it."""

    name: bytes
    parent_name: bytes
    namespace: bytes
    tokens: bytes
    start: int
    end: int
    n_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Write:
    """To be done: write the block's file. Memory may have given up the data meanwhile, so it comes along."""

    block: Block
    data: Data


@dataclass(frozen=True, slots=True)
class Erase:
    """To be done: delete the block's file."""

    block: Block


DiskOperation = Write | Erase


class Siblings:
    """The children of one block in one namespace, in the byte order of their tokens.

    Of all strings, a neighbour of the query in this order has the most in common with it.
    """

    __slots__ = ("_blocks", "_keys")

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._blocks: dict[bytes, Block] = {}

    def add(self, block: Block) -> None:
        insort(self._keys, block.tokens)
        self._blocks[block.tokens] = block

    def remove(self, block: Block) -> None:
        del self._blocks[block.tokens]
        del self._keys[bisect_left(self._keys, block.tokens)]

    def get(self, tokens: bytes) -> Block | None:
        """The block of exactly these tokens."""
        return self._blocks.get(tokens)

    def extending(self, tokens: bytes) -> Block | None:
        """A block that begins with these tokens, perhaps the one that has no others."""
        at = bisect_left(self._keys, tokens)
        if at < len(self._keys) and self._keys[at].startswith(tokens):
            return self._blocks[self._keys[at]]
        return None

    def within(self, tokens: bytes) -> Iterator[Block]:
        """The blocks that these tokens begin with, the longest first."""
        at = bisect_right(self._keys, tokens)
        while at:
            key = self._keys[at - 1]
            if tokens.startswith(key):
                yield self._blocks[key]
                tokens = key[:-TOKEN_BYTES]
            else:  # what is shorter and left of here is within what these two share
                tokens = tokens[: common_prefix(key, tokens) * TOKEN_BYTES]
            at = bisect_right(self._keys, tokens, 0, at - 1)

    def nearest(self, tokens: bytes) -> tuple[int, Block]:
        """The block that has the most tokens in common with these at the beginning, and how many."""
        at = bisect_left(self._keys, tokens)
        neighbours = self._keys[max(0, at - 1) : at + 1]
        in_common = [common_prefix(key, tokens) for key in neighbours]
        most = max(in_common)
        return most, self._blocks[neighbours[in_common.index(most)]]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._keys)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when order and blocks contradict each other."""
        if self._keys != sorted(self._blocks) or any(key != block.tokens for key, block in self._blocks.items()):
            raise AssertionError(f"siblings are out of order: {list(self._blocks.values())}")
