"""The tree of stored blocks, ordered by their tokens. The tree divides a prompt into blocks and finds stored blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llamaq.worker.core.cache_scope import PUBLIC, Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.blocks.block import (
    ROOT_NAME,
    Block,
    BlockHeader,
    BlockSpan,
    ChildBlocks,
    StoredPrefix,
    block_name,
)


class BlockTree:
    """Finds blocks by their parent and by their name. It does not know tiers, capacities and the order of use."""

    def __init__(self, block_tokens: int | None, *, can_cut: bool) -> None:
        """See `BlockStore` for the parameters."""
        if block_tokens is not None and block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        self.block_tokens = block_tokens
        self.can_cut = can_cut
        self.root = Block(None, PUBLIC, b"", 0, 0, ROOT_NAME, 0)
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __contains__(self, block: Block) -> bool:
        return self._blocks.get(block.name) is block

    def add(self, parent: Block, namespace: bytes, tokens: bytes, n_bytes: int) -> Block:
        """Create a child of `parent` with these packed tokens, for `n_bytes` of data. Returns the child."""
        name = block_name(parent.name, namespace, tokens)
        end = parent.end + len(tokens) // TOKEN_BYTES
        block = Block(parent, namespace, tokens, parent.end, end, name, n_bytes)
        parent.children.setdefault(namespace, ChildBlocks()).add(block)
        self._blocks[name] = block
        return block

    def remove(self, block: Block) -> None:
        """Remove a block that has no children."""
        if block.parent is None or block.children:
            raise ValueError(f"{block!r} is the root or has children")
        siblings = block.parent.children[block.namespace]
        siblings.remove(block)
        if not siblings:
            del block.parent.children[block.namespace]
        del self._blocks[block.name]

    def block_bounds(self, start: int, n_tokens: int, scope: Scope) -> tuple[bytes, int]:
        """Return the namespace and the end of the block that begins at `start` in a prompt of `n_tokens` tokens."""
        if self.block_tokens is None:
            return (PUBLIC if n_tokens <= scope.public else scope.key), n_tokens
        is_public = start < scope.public
        limit = min(scope.public, n_tokens) if is_public else n_tokens
        return (PUBLIC if is_public else scope.key), min(start + self.block_tokens, limit)

    def find_child(self, parent: Block, namespace: bytes, tokens: bytes, end: int) -> Block | None:
        """Return the child of `parent` for the tokens up to `end`, or None.

        If `end` is the end of `tokens` and blocks can be cut, the child may also be longer than these tokens.
        """
        children = parent.children.get(namespace)
        if children is None:
            return None
        part = tokens[parent.end * TOKEN_BYTES : end * TOKEN_BYTES]
        if self.can_cut and end * TOKEN_BYTES == len(tokens):
            return children.first_starting_with(part)
        return children.get(part)

    def last_stored(self, tokens: bytes, scope: Scope, stop: int) -> Block:
        """Follow the stored blocks of `tokens` from the root, and return the last block that ends at or before `stop`.

        Returns the root when the first block is not stored.
        """
        n_tokens, node = len(tokens) // TOKEN_BYTES, self.root
        while node.end < stop:
            namespace, end = self.block_bounds(node.end, n_tokens, scope)
            block = self.find_child(node, namespace, tokens, end)
            if block is None or block.end > stop:
                break
            node = block
        return node

    def missing_spans(self, tokens: bytes, scope: Scope) -> list[BlockSpan]:
        """Return the spans of `tokens` that are not stored, in ascending order."""
        n_tokens = len(tokens) // TOKEN_BYTES
        node = self.last_stored(tokens, scope, n_tokens)
        spans: list[BlockSpan] = []
        start = node.end
        while start < n_tokens:
            namespace, end = self.block_bounds(start, n_tokens, scope)
            if spans or self.find_child(node, namespace, tokens, end) is None:
                spans.append(BlockSpan(start, end))
            start = end
        return spans

    def match(self, tokens: bytes, scope: Scope) -> StoredPrefix:
        """Return the longest stored prefix of `tokens` that `scope` may use."""
        n_tokens, key = len(tokens) // TOKEN_BYTES, scope.key
        best, n_matched = self.root, 0
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            if node.end >= n_matched:  # `>=`, because a whole block is better than a part of a block with equal length
                best, n_matched = node, node.end
            for namespace, limit in ((PUBLIC, min(scope.public, n_tokens)), (key, n_tokens)):
                children = node.children.get(namespace)
                if children is None or node.end >= limit:
                    continue
                window = self._window(tokens, node.end, limit)
                block = children.get(window)
                if block is not None and len(children) == 1:
                    nodes.append(block)
                    continue
                if block is None:
                    n_common, closest = children.closest(window)
                    if not n_common:
                        continue
                    if self.can_cut and node.end + n_common > n_matched:
                        best, n_matched = closest, node.end + n_common
                nodes += children.prefixes_of(window)
        return StoredPrefix(tuple(best.path()), n_matched)

    def _window(self, tokens: bytes, start: int, limit: int) -> bytes:
        """Return the tokens of the query that a block beginning at `start` can contain."""
        end = limit if self.block_tokens is None else min(limit, start + self.block_tokens)
        return tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]

    def accepts(self, parent: Block, namespace: bytes, n_tokens: int) -> bool:
        """Whether a block of `n_tokens` tokens may be a child of `parent`."""
        if self.block_tokens is None:
            return parent is self.root and n_tokens > 0
        return parent.namespace in (PUBLIC, namespace) and 0 < n_tokens <= self.block_tokens

    def rebuild(self, headers: Iterable[BlockHeader]) -> tuple[list[Block], list[BlockHeader]]:
        """Fill an empty tree with a block for each header whose parent is in the tree.

        Returns:
            The blocks, least recently used first, and the headers that do not fit into the tree.
        """
        by_parent: dict[bytes, list[BlockHeader]] = {}
        for header in headers:
            by_parent.setdefault(header.parent_name, []).append(header)
        used_s: dict[Block, float] = {}
        orphans = []
        for node in (nodes := [self.root]):
            for header in by_parent.pop(node.name, ()):
                if self.accepts(node, header.namespace, len(header.tokens) // TOKEN_BYTES):
                    block = self.add(node, header.namespace, header.tokens, header.n_bytes)
                    used_s[block] = header.modified_s
                    nodes.append(block)
                else:
                    orphans.append(header)
        for block in reversed(nodes):
            if block.parent in used_s:  # a use of a block counts as a use of its parent
                used_s[block.parent] = max(used_s[block.parent], used_s[block])
        blocks = sorted(used_s, key=lambda block: (used_s[block], -block.end))
        return blocks, orphans + [header for group in by_parent.values() for header in group]

    def check_integrity(self) -> None:
        """Raise `AssertionError` when parents, children and names contradict each other."""
        reached = self.root.subtree()[1:]
        if len(reached) != len(self) or any(block not in self for block in reached):
            raise AssertionError(f"{len(reached)} blocks are below the root, {len(self)} blocks have names")
        for block in reached:
            _check_block(self, block)


def _check_block(tree: BlockTree, block: Block) -> None:
    parent = block.parent
    if parent is None or block.start != parent.end or (block.end - block.start) * TOKEN_BYTES != len(block.tokens):
        raise AssertionError(f"{block!r} does not start where {parent!r} ends, or has another number of tokens")
    if block.name != block_name(parent.name, block.namespace, block.tokens):
        raise AssertionError(f"{block!r} has the name of another block")
    if not tree.accepts(parent, block.namespace, block.end - block.start):
        raise AssertionError(f"{block!r} cannot be a child of {parent!r}")
    for children in block.children.values():
        if not children:
            raise AssertionError(f"{block!r} has an empty set of children")
        children.check_integrity()
