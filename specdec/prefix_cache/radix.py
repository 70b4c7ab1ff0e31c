"""A radix tree over token ids: longest common prefix, and an LRU byte budget.

It is pure Python and holds values of any type at the ends of paths. An edge holds all
tokens up to the next fork or value, so a path of 50,000 tokens in blocks of 256 is 200
nodes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
Keys = Sequence[Hashable]


@dataclass(eq=False)
class Node(Generic[V]):
    """The end of an edge. Every node that callers get holds a value."""

    edge: tuple[Hashable, ...] = ()
    end: int = 0
    parent: Node[V] | None = None
    children: dict[Hashable, Node[V]] = field(default_factory=dict)
    value: V | None = None
    nbytes: int = 0

    def path(self) -> tuple[Hashable, ...]:
        """All tokens from the root to here."""
        edges = []
        node: Node[V] | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return tuple(token for edge in reversed(edges) for token in edge)

    def ancestors(self) -> Iterator[Node[V]]:
        """Nodes with a value from here to the root, this one included."""
        node: Node[V] | None = self
        while node is not None:
            if node.value is not None:
                yield node
            node = node.parent


@dataclass(frozen=True)
class Match(Generic[V]):
    """Where a path leaves the tree.

    The first ``length`` tokens are shared with a path of the tree. ``passed`` are the
    nodes with a value on the way there, from the root on.
    """

    length: int
    passed: tuple[Node[V], ...]
    _beneath: tuple[Node[V], ...]

    def beneath(self) -> Iterator[Node[V]]:
        """Nodes with a value beneath that point, fewest edges first.

        Their paths share the first ``length`` tokens, and then differ or go on.
        """
        queue = deque(self._beneath)
        while queue:
            node = queue.popleft()
            if node.value is not None:
                yield node
            queue.extend(node.children.values())


class RadixTree(Generic[V]):
    """Values at the ends of paths; the least recently used is evicted first.

    Using or putting a value counts as a use of all values above it, so that a value is
    never evicted before the values beneath it.

    Args:
        budget: bytes of all values together; ``None`` is no limit.
    """

    def __init__(self, budget: int | None = None):
        self.budget = budget
        self.nbytes = 0
        self._root: Node[V] = Node()
        self._order: OrderedDict[Node[V], None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node[V]]:
        """Nodes with a value, least recently used first."""
        return iter(tuple(self._order))

    def get(self, tokens: Keys) -> Node[V] | None:
        """The node with a value at the end of ``tokens``."""
        match = self.match(tokens)
        if match.passed and match.passed[-1].end == len(tokens):
            return match.passed[-1]
        return None

    def match(self, tokens: Keys) -> Match[V]:
        """Follow ``tokens`` as far as the tree goes."""
        tokens = tuple(tokens)
        node, length = self._root, 0
        passed: list[Node[V]] = []
        while True:
            if node.value is not None:
                passed.append(node)
            child = node.children.get(tokens[length]) if length < len(tokens) else None
            if child is None:
                return Match(length, tuple(passed), tuple(node.children.values()))
            shared = _shared(child, tokens, length)
            length += shared
            if shared < len(child.edge):
                return Match(length, tuple(passed), (child,))
            node = child

    def put(self, tokens: Keys, value: V, nbytes: int) -> list[V]:
        """Hold ``value``, of ``nbytes`` bytes, at the end of ``tokens``.

        It replaces a value that is there.

        Returns:
            Evicted values, oldest first; only ``value`` itself if it alone is larger
            than the budget.
        """
        if self.budget is not None and nbytes > self.budget:
            return [value]
        node = self._node_at(tuple(tokens))
        self.nbytes += nbytes - node.nbytes
        node.value, node.nbytes = value, nbytes
        self.touch(node)
        return [] if self.budget is None else self.shrink(self.budget)

    def touch(self, node: Node[V]) -> None:
        """Note that ``node`` and its ancestors were used now."""
        for each in node.ancestors():
            self._order[each] = None
            self._order.move_to_end(each)

    def remove(self, node: Node[V]) -> None:
        """Remove the value of ``node``; values beneath it stay."""
        del self._order[node]
        self.nbytes -= node.nbytes
        node.value, node.nbytes = None, 0
        self._tidy(node)

    def shrink(self, budget: int) -> list[V]:
        """Evict the least recently used down to ``budget`` bytes; return them."""
        gone: list[V] = []
        while self.nbytes > budget:
            oldest = next(iter(self._order))
            assert oldest.value is not None
            gone.append(oldest.value)
            self.remove(oldest)
        return gone

    def _node_at(self, tokens: tuple[Hashable, ...]) -> Node[V]:
        """The node at the end of ``tokens``, made if there is none."""
        node, length = self._root, 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                leaf = Node(tokens[length:], len(tokens), node)
                node.children[tokens[length]] = leaf
                return leaf
            shared = _shared(child, tokens, length)
            if shared < len(child.edge):
                child = self._split(child, shared)
            node, length = child, length + shared
        return node

    @staticmethod
    def _split(node: Node[V], at: int) -> Node[V]:
        """Split the edge of ``node`` after ``at`` tokens; return the new node."""
        assert node.parent is not None
        head, tail = node.edge[:at], node.edge[at:]
        upper = Node(head, node.end - len(tail), node.parent, {tail[0]: node})
        node.parent.children[head[0]] = upper
        node.edge, node.parent = tail, upper
        return upper

    @staticmethod
    def _tidy(node: Node[V]) -> None:
        """Drop needless nodes without a value, from ``node`` up."""
        while node.parent is not None and node.value is None:
            parent = node.parent
            if len(node.children) > 1:
                return
            if node.children:  # its only child takes its place
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[0]] = child
                return
            del parent.children[node.edge[0]]
            node = parent


def _shared(node: Node[V], tokens: tuple[Hashable, ...], at: int) -> int:
    """How many tokens of ``node``'s edge match ``tokens`` from ``at`` on."""
    return common_length(node.edge, tokens[at : at + len(node.edge)])


def common_length(a: tuple[Hashable, ...], b: tuple[Hashable, ...]) -> int:
    """Length of the common prefix of two tuples."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
