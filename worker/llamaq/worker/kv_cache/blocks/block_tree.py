"""The tree of blocks by their tokens: into which blocks a prompt is cut, and which of them are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llamaq.worker.core.cache_scope import PUBLIC, Scope
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.blocks.block import ROOT_NAME, Block, Chain, Siblings, Span, StoredBlock, block_name


class BlockTree:
    """Blocks under their parents, and by their names. Knows nothing of tiers, bytes and use."""

    def __init__(self, block_tokens: int | None, *, can_cut: bool) -> None:
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
        """A new block, the child of `parent`."""
        name = block_name(parent.name, namespace, tokens)
        end = parent.end + len(tokens) // TOKEN_BYTES
        block = Block(parent, namespace, tokens, parent.end, end, name, n_bytes)
        parent.children.setdefault(namespace, Siblings()).add(block)
        self._blocks[name] = block
        return block

    def remove(self, block: Block) -> None:
        """Forget the block; it has no children."""
        if block.parent is None or block.children:
            raise ValueError(f"{block!r} is the root or has children")
        siblings = block.parent.children[block.namespace]
        siblings.remove(block)
        if not siblings:
            del block.parent.children[block.namespace]
        del self._blocks[block.name]

    def part(self, start: int, n_tokens: int, scope: Scope) -> tuple[bytes, int]:
        """Of `n_tokens` tokens, the block that begins at `start`: the key of whom it belongs to, and its end."""
        if self.block_tokens is None:
            return (PUBLIC if n_tokens <= scope.public else scope.key), n_tokens
        is_public = start < scope.public
        limit = min(scope.public, n_tokens) if is_public else n_tokens
        return (PUBLIC if is_public else scope.key), min(start + self.block_tokens, limit)

    def child(self, node: Block, namespace: bytes, tokens: bytes, end: int) -> Block | None:
        """The child with the tokens up to `end`; at the end of `tokens` a longer one will do, if it can be cut."""
        siblings = node.children.get(namespace)
        if siblings is None:
            return None
        part = tokens[node.end * TOKEN_BYTES : end * TOKEN_BYTES]
        if self.can_cut and end * TOKEN_BYTES == len(tokens):
            return siblings.extending(part)
        return siblings.get(part)

    def walk(self, tokens: bytes, scope: Scope, stop: int) -> Block:
        """The last of the blocks that `tokens` are cut into, from the root on, that is stored and ends by `stop`."""
        n_tokens, node = len(tokens) // TOKEN_BYTES, self.root
        while node.end < stop:
            namespace, end = self.part(node.end, n_tokens, scope)
            block = self.child(node, namespace, tokens, end)
            if block is None or block.end > stop:
                break
            node = block
        return node

    def missing(self, tokens: bytes, scope: Scope) -> list[Span]:
        """The spans that are to be saved, in this order, before all of `tokens` is stored."""
        n_tokens = len(tokens) // TOKEN_BYTES
        node = self.walk(tokens, scope, n_tokens)
        spans: list[Span] = []
        start = node.end
        while start < n_tokens:
            namespace, end = self.part(start, n_tokens, scope)
            if spans or self.child(node, namespace, tokens, end) is None:
                spans.append(Span(start, end))
            start = end
        return spans

    def match(self, tokens: bytes, scope: Scope) -> Chain:
        """The blocks that hold the most tokens of the query, from its beginning on."""
        n_tokens, key = len(tokens) // TOKEN_BYTES, scope.key
        best, covered = self.root, 0
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            if node.end >= covered:  # a whole block rather than a part of another
                best, covered = node, node.end
            for namespace, limit in ((PUBLIC, min(scope.public, n_tokens)), (key, n_tokens)):
                siblings = node.children.get(namespace)
                if siblings is None or node.end >= limit:
                    continue
                window = self._window(tokens, node.end, limit)
                block = siblings.get(window)
                if block is not None and len(siblings) == 1:
                    nodes.append(block)
                    continue
                if block is None:
                    common, nearest = siblings.nearest(window)
                    if not common:
                        continue
                    if self.can_cut and node.end + common > covered:
                        best, covered = nearest, node.end + common
                nodes += siblings.within(window)
        return Chain(tuple(best.path()), covered)

    def _window(self, tokens: bytes, start: int, limit: int) -> bytes:
        """The tokens that a block from `start` on can have in common with the query."""
        end = limit if self.block_tokens is None else min(limit, start + self.block_tokens)
        return tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]

    def accepts(self, parent: Block, namespace: bytes, n_tokens: int) -> bool:
        """Whether a block of so many tokens can stand below `parent`."""
        if self.block_tokens is None:
            return parent is self.root and n_tokens > 0
        return parent.namespace in (PUBLIC, namespace) and 0 < n_tokens <= self.block_tokens

    def rebuild(self, stored: Iterable[StoredBlock]) -> tuple[list[Block], list[StoredBlock]]:
        """Add all whose parents are there, to an empty tree.

        Returns the blocks, those used longest ago first, and what has no place in this tree.
        """
        waiting: dict[bytes, list[StoredBlock]] = {}
        for each in stored:
            waiting.setdefault(each.parent_name, []).append(each)
        used_s: dict[Block, float] = {}
        orphans = []
        for node in (nodes := [self.root]):
            for each in waiting.pop(node.name, ()):
                if self.accepts(node, each.namespace, len(each.tokens) // TOKEN_BYTES):
                    block = self.add(node, each.namespace, each.tokens, each.n_bytes)
                    used_s[block] = each.modified_s
                    nodes.append(block)
                else:
                    orphans.append(each)
        for block in reversed(nodes):
            if block.parent in used_s:  # it was used whenever one below it was
                used_s[block.parent] = max(used_s[block.parent], used_s[block])
        blocks = sorted(used_s, key=lambda block: (used_s[block], -block.end))
        return blocks, orphans + [each for group in waiting.values() for each in group]

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the tree contradicts itself."""
        reached = self.root.subtree()[1:]
        if len(reached) != len(self) or any(block not in self for block in reached):
            raise AssertionError(f"{len(reached)} blocks hang on the tree, {len(self)} are known by name")
        for block in reached:
            _check_block(self, block)


def _check_block(index: BlockTree, block: Block) -> None:
    parent = block.parent
    if parent is None or block.start != parent.end or (block.end - block.start) * TOKEN_BYTES != len(block.tokens):
        raise AssertionError(f"{block!r} does not follow {parent!r}")
    if block.name != block_name(parent.name, block.namespace, block.tokens):
        raise AssertionError(f"{block!r} has another's name")
    if not index.accepts(parent, block.namespace, block.end - block.start):
        raise AssertionError(f"{block!r} cannot stand below {parent!r}")
    for siblings in block.children.values():
        if not siblings:
            raise AssertionError(f"{block!r} keeps an empty place for children")
        siblings.check_integrity()
