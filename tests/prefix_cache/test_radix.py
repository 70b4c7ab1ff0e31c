"""The radix tree against a plain dict of paths."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.prefix_cache.radix import Node, RadixTree

# Few tokens: paths share prefixes all the time.
PATHS = st.lists(st.integers(0, 2), max_size=7).map(tuple)
Key = tuple[int, ...]


def common(a: Key, b: Key) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )


class Plain:
    """What the tree should do, in a dict of paths; the order is that of use."""

    def __init__(self, budget: int | None):
        self.budget = budget
        self.entries: dict[Key, tuple[object, int]] = {}

    def touch(self, path: Key) -> None:
        # Longest first: what stands above was used last.
        for length in range(len(path), -1, -1):
            if path[:length] in self.entries:
                self.entries[path[:length]] = self.entries.pop(path[:length])

    def put(self, path: Key, value: object, nbytes: int) -> list[object]:
        if self.budget is not None and nbytes > self.budget:
            return [value]
        self.entries[path] = value, nbytes
        self.touch(path)
        gone = []
        while self.budget is not None and self.nbytes > self.budget:
            gone.append(self.entries.pop(next(iter(self.entries)))[0])
        return gone

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.entries.values())


class TreeAgainstDict(RuleBasedStateMachine):
    @initialize(budget=st.none() | st.integers(0, 40))
    def start(self, budget: int | None) -> None:
        self.tree: RadixTree[object] = RadixTree(budget)
        self.plain = Plain(budget)

    @rule(path=PATHS, nbytes=st.integers(0, 12))
    def put(self, path: Key, nbytes: int) -> None:
        value = object()
        gone = self.tree.put(path, value, nbytes)
        assert gone == self.plain.put(path, value, nbytes)

    @rule(path=PATHS)
    def touch(self, path: Key) -> None:
        node = self.tree.get(path)
        assert (node is not None) == (path in self.plain.entries)
        if node is not None:
            self.tree.touch(node)
            self.plain.touch(path)

    @rule(path=PATHS)
    def remove(self, path: Key) -> None:
        node = self.tree.get(path)
        if node is not None:
            self.tree.remove(node)
            del self.plain.entries[path]

    @rule(path=PATHS)
    def match(self, path: Key) -> None:
        match = self.tree.match(path)
        length = max((common(path, key) for key in self.plain.entries), default=0)
        assert match.length == length
        passed = [path[:n] for n in range(length + 1) if path[:n] in self.plain.entries]
        assert [n.path() for n in match.passed] == passed
        beneath = sorted(n.path() for n in match.beneath())
        assert beneath == sorted(
            key
            for key in self.plain.entries
            if len(key) > length and key[:length] == path[:length]
        )

    @invariant()
    def same_values_in_the_same_order(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert [(n.path(), (n.value, n.nbytes)) for n in self.tree] == list(
            self.plain.entries.items()
        )
        assert [n.end for n in self.tree] == [len(key) for key in self.plain.entries]
        assert self.tree.nbytes == self.plain.nbytes
        assert len(self.tree) == len(self.plain.entries)

    @invariant()
    def edges_are_as_long_as_can_be(self) -> None:
        """A node stands where paths part, or where a value does."""

        def check(node: Node[Any]) -> None:
            for token, child in node.children.items():
                assert child.edge[0] == token
                assert child.parent is node
                assert child.end == node.end + len(child.edge)
                assert child.value is not None or len(child.children) > 1
                check(child)

        if hasattr(self, "tree"):
            check(self.tree._root)


TestTreeAgainstDict = TreeAgainstDict.TestCase


def test_a_value_never_leaves_before_what_stands_on_it() -> None:
    """A chain put from its root on; the newest end makes place, not the root."""
    tree: RadixTree[str] = RadixTree(3)
    assert [tree.put("abcdef"[:n], str(n), 1) for n in (1, 2, 3)] == [[], [], []]
    assert tree.put("abcd", "4", 1) == ["4"]
    assert tree.put("x", "x", 1) == ["3"]
    assert tree.put("ab", "2 again", 1) == []
    assert [n.value for n in tree] == ["x", "2 again", "1"]
