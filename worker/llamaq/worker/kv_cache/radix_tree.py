"""A radix tree over packed tokens. It finds the holders of the longest prefix of a query.

Tokens are packed, 4 bytes each, so that one memcmp compares two long prefixes. No loop over tokens is needed. Example:

    (root) ── system prompt ─┬─ question A ── answer ── next question   ← a holder ends here
                             └─ question B                              ← another holder ends here

An edge is a string of packed tokens. Every node except the root marks a position where the tokens of a holder end, or
where the tokens of several holders begin to differ. Every leaf therefore has a holder, and a tree with n holders has
fewer than 2n nodes besides the root.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamaq.worker.core.packed_tokens import TOKEN_BYTES, agreeing_bytes

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Node(Generic[H]):
    """A node and the edge to it. Invariant: a node other than the root has a holder or at least two children."""

    edge: bytes
    parent: _Node[H] | None
    children: dict[bytes, _Node[H]] = field(default_factory=dict)
    """Maps the first token of a child's edge, packed, to the child."""
    holders: dict[H, None] = field(default_factory=dict)
    """The holders whose tokens end exactly here, the first added first."""

    def adopt(self, child: _Node[H]) -> None:
        """Add a child under the first token of its edge. Replaces an earlier child under the same token."""
        child.parent = self
        self.children[child.edge[:TOKEN_BYTES]] = child


class RadixTree(Generic[H]):
    """Finds the holders that share the most tokens with a query.

    A holder is any hashable object. It may be added under several token strings, once under each string. A lookup needs
    one dictionary access and one memcmp for each node on the path. The number of holders below the path has no effect.
    """

    def __init__(self) -> None:
        self._root: _Node[H] = _Node(b"", None)
        self._n_holders = 0

    def __len__(self) -> int:
        return self._n_holders

    def add(self, tokens: bytes, holder: H) -> None:
        """Add the holder under these packed tokens.

        Raises:
            ValueError: The holder is already under these tokens, or the tokens are not packed.
        """
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes are not a whole number of tokens")
        node, depth = self._descend(tokens)
        if child := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            n_same = agreeing_bytes(child.edge, tokens, depth)
            node, depth = _split(node, child, n_same), depth + n_same
        if depth < len(tokens):
            leaf = _Node[H](tokens[depth:], node)
            node.adopt(leaf)
            node = leaf
        if holder in node.holders:
            raise ValueError(f"{holder!r} is indexed under these {len(tokens) // TOKEN_BYTES} tokens already")
        node.holders[holder] = None
        self._n_holders += 1

    def remove(self, tokens: bytes, holder: H) -> None:
        """Remove the holder under exactly these packed tokens.

        Raises:
            LookupError: The holder is not under these tokens.
        """
        node, depth = self._descend(tokens)
        if depth != len(tokens) or holder not in node.holders:
            raise LookupError(f"{holder!r} is not indexed under these {len(tokens) // TOKEN_BYTES} tokens")
        del node.holders[holder]
        self._n_holders -= 1
        self._remove_redundant(node)

    def matches(self, tokens: bytes) -> Iterator[tuple[int, H]]:
        """Iterate over all holders that share at least one token with the query, the longest common prefix first.

        Each holder is yielded once, with its longest common prefix. The iterator is lazy, so a caller that stops early
        saves most of the work. It is invalid after the next `add` or `remove`.

        Yields:
            The length of the common prefix in tokens, and the holder.
        """
        node, depth = self._descend(tokens)
        seen: set[H] = set()
        if done := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            n_common = (depth + agreeing_bytes(done.edge, tokens, depth)) // TOKEN_BYTES
            yield from _unseen_holders(done, None, n_common, seen)
        while node.parent is not None:
            yield from _unseen_holders(node, done, depth // TOKEN_BYTES, seen)
            done, node, depth = node, node.parent, depth - len(node.edge)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the nodes of the tree break an invariant."""
        nodes = list(_nodes_below(self._root))
        if self._root.edge or self._root.parent is not None:
            raise AssertionError("the root has an edge or a parent")
        n_holders = sum(len(node.holders) for node in nodes)
        if n_holders != self._n_holders:
            raise AssertionError(f"{n_holders} holders are in the tree, {self._n_holders} were counted")
        for node in nodes:
            if node is not self._root and not node.holders and len(node.children) < 2:
                raise AssertionError(f"a node with {len(node.children)} children and no holder is redundant")
            for first, child in node.children.items():
                if child.parent is not node or not child.edge or len(child.edge) % TOKEN_BYTES:
                    raise AssertionError(f"an edge of {len(child.edge)} bytes has a wrong parent or length")
                if child.edge[:TOKEN_BYTES] != first:
                    raise AssertionError(
                        f"the child for {first!r} has an edge that begins {child.edge[:TOKEN_BYTES]!r}"
                    )

    def __repr__(self) -> str:
        return f"<RadixTree {self._n_holders} holders {sum(1 for _ in _nodes_below(self._root))} nodes>"

    def _descend(self, tokens: bytes) -> tuple[_Node[H], int]:
        """Return the deepest node whose path from the root is a prefix of `tokens`, and the path's length in bytes."""
        node, depth = self._root, 0
        while child := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            if not tokens.startswith(child.edge, depth):
                break
            node, depth = child, depth + len(child.edge)
        return node, depth

    def _remove_redundant(self, node: _Node[H]) -> None:
        """Remove a node without holders and with at most one child. Its parent may then be redundant too."""
        parent = node.parent
        if parent is None or node.holders or len(node.children) > 1:
            return
        if node.children:
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            parent.adopt(child)
        else:
            del parent.children[node.edge[:TOKEN_BYTES]]
            self._remove_redundant(parent)


def _split(parent: _Node[H], child: _Node[H], offset: int) -> _Node[H]:
    """Split the child's edge after `offset` bytes, and return the new node between parent and child."""
    middle = _Node[H](child.edge[:offset], parent)
    parent.adopt(middle)
    child.edge = child.edge[offset:]
    middle.adopt(child)
    return middle


def _nodes_below(top: _Node[H]) -> Iterator[_Node[H]]:
    """Iterate over the node and all its descendants, each node before its children."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _unseen_holders(top: _Node[H], done: _Node[H] | None, n_common: int, seen: set[H]) -> Iterator[tuple[int, H]]:
    """Iterate over the holders of `top` and its descendants that are not in `seen`. Skips the subtree of `done`.

    Adds each holder to `seen`, and yields it together with `n_common`.
    """
    stack = [top]
    while stack:
        node = stack.pop()
        if node is done:
            continue
        for holder in node.holders:
            if holder not in seen:
                seen.add(holder)
                yield n_common, holder
        stack.extend(node.children.values())
