"""Fills block stores, and asks what they find."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.kv_cache.blocks.block import BLOCK_BYTES, FILE_BYTES, Block, BlockHeader, BlockSpan
from llamaq.worker.kv_cache.blocks.block_store import BlockStore

ROOMY = 10**9
A, B = Scope("a"), Scope("b")


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def data_of(tokens: bytes, scope: Scope, end: int) -> bytes:
    """Return data that is unique for the namespace and the prefix. Its length differs between blocks."""
    owner = "public" if end <= scope.public else f"of {scope.namespace}"
    made = hashlib.sha256(owner.encode() + b"|" + tokens[: 4 * end]).digest()
    return made[: 8 + end % 9]


def insert_all(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> list[Block | None]:
    packed = pack(tokens)
    return [
        store.insert(packed, scope, span, data_of(packed, scope, span.end))
        for span in store.missing_spans(packed, scope)
    ]


def n_matched(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> int:
    return store.match(pack(tokens), scope).n_tokens


def is_in_host(store: BlockStore, tokens: Sequence[int], scope: Scope = A) -> bool:
    return all(block.data is not None for block in store.match(pack(tokens), scope).blocks)


def spans(*borders: int) -> list[BlockSpan]:
    return [BlockSpan(start, end) for start, end in itertools.pairwise(borders)]


def room_for(n_blocks: int, n_bytes: int = 8) -> int:
    return n_blocks * (BLOCK_BYTES + n_bytes)


def insert_blocks(store: BlockStore, tokens: Sequence[int], n_bytes: int = 8, scope: Scope = A) -> Block | None:
    """Insert all missing blocks with `n_bytes` of data each. Returns the last block."""
    packed, block = pack(tokens), None
    for span in store.missing_spans(packed, scope):
        block = store.insert(packed, scope, span, bytes(n_bytes))
    return block


def file_bytes(n_tokens: int, n_bytes: int = 8) -> int:
    return FILE_BYTES + 4 * n_tokens + n_bytes


def header_of(block: Block, modified_s: float) -> BlockHeader:
    assert block.parent is not None
    return BlockHeader(
        block.name, block.parent.name, block.namespace, block.tokens, block.start, block.end, block.n_bytes, modified_s
    )


def header_for(tokens: Sequence[int]) -> BlockHeader:
    store = BlockStore(len(tokens), 0, ROOMY, can_cut=True)
    block = insert_blocks(store, tokens)
    assert block is not None
    return header_of(block, 1.0)
