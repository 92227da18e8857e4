"""Who holds the longest beginning of these tokens: a radix tree over packed tokens.

Tokens are packed, 4 bytes each, so that two long prefixes are compared by one memcmp rather than by a loop:

    (root) ── system prompt ─┬─ question A ── answer ── next question   ← a holder ends here
                             └─ question B                              ← and another here

Edges are such byte strings. A node is where a holder ends or where holders part; no other nodes exist, so n holders
make fewer than 2n nodes, and every leaf has a holder: whoever comes down any branch finds one soon.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamaq.worker.core.tokens import TOKEN_BYTES, agreeing_bytes

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Node(Generic[H]):
    """The end of `edge`. Without holders of its own it has at least two children; only the root is free of that."""

    edge: bytes
    parent: _Node[H] | None
    children: dict[bytes, _Node[H]] = field(default_factory=dict)
    """By the first token of their edges, packed."""
    holders: dict[H, None] = field(default_factory=dict)
    """Those whose tokens end exactly here, in the order of their coming."""

    def adopt(self, child: _Node[H]) -> None:
        """Put the child in the place that its edge names, whoever was there before."""
        child.parent = self
        self.children[child.edge[:TOKEN_BYTES]] = child


class RadixTree(Generic[H]):
    """Finds the holders that share the most tokens with a query.

    A holder is anything hashable. It may be added under several token strings, once under each. Lookup costs one
    dictionary access and one memcmp for each node on the way down, however many holders share that way.
    """

    def __init__(self) -> None:
        self._root: _Node[H] = _Node(b"", None)
        self._n_holders = 0

    def __len__(self) -> int:
        return self._n_holders

    def add(self, tokens: bytes, holder: H) -> None:
        """Index the holder under these packed tokens; `ValueError` when it is there already."""
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes are no whole tokens")
        node, depth = self._descend(tokens)
        if child := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            same = agreeing_bytes(child.edge, tokens, depth)
            node, depth = _split(node, child, same), depth + same
        if depth < len(tokens):
            leaf = _Node[H](tokens[depth:], node)
            node.adopt(leaf)
            node = leaf
        if holder in node.holders:
            raise ValueError(f"{holder!r} is indexed under these {len(tokens) // TOKEN_BYTES} tokens already")
        node.holders[holder] = None
        self._n_holders += 1

    def remove(self, tokens: bytes, holder: H) -> None:
        """Forget the holder under exactly these packed tokens; `LookupError` when it is not there."""
        node, depth = self._descend(tokens)
        if depth != len(tokens) or holder not in node.holders:
            raise LookupError(f"{holder!r} is not indexed under these {len(tokens) // TOKEN_BYTES} tokens")
        del node.holders[holder]
        self._n_holders -= 1
        self._tidy(node)

    def matches(self, tokens: bytes) -> Iterator[tuple[int, H]]:
        """(tokens in common with the query, holder) for every holder with at least one, the deepest first.

        Each holder comes once, at its deepest. Lazy: taking only the first few costs only them. The iterator is
        worth nothing after the next `add` or `remove`.
        """
        node, depth = self._descend(tokens)
        seen: set[H] = set()
        if done := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            n_common = (depth + agreeing_bytes(done.edge, tokens, depth)) // TOKEN_BYTES
            yield from _new_below(done, None, n_common, seen)
        while node.parent is not None:
            yield from _new_below(node, done, depth // TOKEN_BYTES, seen)
            done, node, depth = node, node.parent, depth - len(node.edge)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the tree contradicts itself."""
        nodes = list(_nodes_below(self._root))
        if self._root.edge or self._root.parent is not None:
            raise AssertionError("the root is below something")
        n_holders = sum(len(node.holders) for node in nodes)
        if n_holders != self._n_holders:
            raise AssertionError(f"{n_holders} holders are in the tree, {self._n_holders} were counted")
        for node in nodes:
            if node is not self._root and not node.holders and len(node.children) < 2:
                raise AssertionError(f"a node with {len(node.children)} children and no holder: nothing parts there")
            for first, child in node.children.items():
                if child.parent is not node or not child.edge or len(child.edge) % TOKEN_BYTES:
                    raise AssertionError(f"an edge of {len(child.edge)} bytes hangs wrongly")
                if child.edge[:TOKEN_BYTES] != first:
                    raise AssertionError(f"an edge is filed under {first!r} and begins {child.edge[:TOKEN_BYTES]!r}")

    def __repr__(self) -> str:
        return f"<RadixTree {self._n_holders} holders {sum(1 for _ in _nodes_below(self._root))} nodes>"

    def _descend(self, tokens: bytes) -> tuple[_Node[H], int]:
        """The deepest node whose whole way from the root the tokens follow, and how many bytes that is."""
        node, depth = self._root, 0
        while child := node.children.get(tokens[depth : depth + TOKEN_BYTES]):
            if not tokens.startswith(child.edge, depth):
                break
            node, depth = child, depth + len(child.edge)
        return node, depth

    def _tidy(self, node: _Node[H]) -> None:
        """Take a node away that is needed no longer; that may make its parent, at most, superfluous as well."""
        parent = node.parent
        if parent is None or node.holders or len(node.children) > 1:
            return
        if node.children:
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            parent.adopt(child)
        else:
            del parent.children[node.edge[:TOKEN_BYTES]]
            self._tidy(parent)


def _split(parent: _Node[H], child: _Node[H], at: int) -> _Node[H]:
    """A new node within the child's edge, `at` bytes after its parent."""
    middle = _Node[H](child.edge[:at], parent)
    parent.adopt(middle)
    child.edge = child.edge[at:]
    middle.adopt(child)
    return middle


def _nodes_below(top: _Node[H]) -> Iterator[_Node[H]]:
    """The node and everything below it, each before its children."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _new_below(top: _Node[H], done: _Node[H] | None, n_common: int, seen: set[H]) -> Iterator[tuple[int, H]]:
    """Holders in `top` and below that were not seen, except under its child `done`."""
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
