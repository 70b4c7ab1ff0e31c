"""Random histories of a batch cache beside plain lists, and the check of both.

Every written token has a number, found again in its values, and random keys. A
row of the reference is a list of such numbers. After each write the check looks
at every query: which numbers lie in the columns that its mask leaves visible,
and what attention returns. Both must be what the list and the layer's rule say.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from specdec.cache import (
    BatchChunkedKVCache,
    BatchKVCache,
    BatchRotatingKVCache,
)
from specdec.cuda.attention_patch import attend
from specdec.cuda.split_attention import Split
from specdec.errors import CacheError

KV_HEADS, QUERY_HEADS, HEAD_DIM, GROUP = 2, 4, 64, 32
SCALE = HEAD_DIM**-0.5
KV_OF_HEAD = np.arange(QUERY_HEADS) * KV_HEADS // QUERY_HEADS
MAX_TOKENS = 4096

_random = np.random.default_rng(0)
KEYS = _random.normal(size=(MAX_TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
VALUES = _random.normal(size=(MAX_TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
# One whole group holds the token's number, so that quantizing keeps it exact.
VALUES[:, :, :GROUP] = np.arange(MAX_TOKENS)[:, None, None]
QUERIES = _random.normal(size=(64, QUERY_HEADS, HEAD_DIM)).astype(np.float32)


def as_stored(x: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    w, scales, biases = mx.quantize(mx.array(x), group_size=GROUP, bits=bits)
    return np.array(mx.dequantize(w, scales, biases, group_size=GROUP, bits=bits))


STORED = {
    None: (KEYS, VALUES),
    4: (as_stored(KEYS, 4), as_stored(VALUES, 4)),
    8: (as_stored(KEYS, 8), as_stored(VALUES, 8)),
}


class Choices(Protocol):
    """Where a history's choices come from."""

    def integer(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, both included."""


class Seeded:
    """Choices of a fixed seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


@dataclass(frozen=True)
class Kind:
    """A cache class with its settings, and the rule that it implements."""

    name: str
    make: Callable[..., Any]
    visible: Callable[[int, int], bool]  # (key position, query position)
    bits: int | None = None
    window: int | None = None  # tokens that a ring holds for its queries
    keep: int = 0
    tail: bool = False


def full(p: int, q: int) -> bool:
    return p <= q


def sliding(window: int, keep: int) -> Callable[[int, int], bool]:
    return lambda p, q: p <= q and (p > q - window or p < keep)


def chunked(chunk: int) -> Callable[[int, int], bool]:
    return lambda p, q: p <= q and p // chunk == q // chunk


def packed(bits: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": GROUP}


KINDS = [
    Kind("linear", BatchKVCache, full),
    Kind("linear-tail", lambda b, **s: BatchKVCache(b, tail=6, **s),
         full, tail=True),
    Kind("linear-8bit", lambda b, **s: BatchKVCache(b, **packed(8), **s),
         full, bits=8),
    Kind("ring", lambda b, **s: BatchRotatingKVCache(b, max_size=5, **s),
         sliding(5, 0), window=5),
    Kind("ring-keep", lambda b, **s: BatchRotatingKVCache(b, max_size=6, keep=2, **s),
         sliding(4, 2), window=4, keep=2),
    Kind("ring-4bit",
         lambda b, **s: BatchRotatingKVCache(b, max_size=6, keep=1, **packed(4), **s),
         sliding(5, 1), bits=4, window=5, keep=1),
    Kind("chunked", lambda b, **s: BatchChunkedKVCache(b, chunk_size=4, **s),
         chunked(4), window=4),
    Kind("chunked-8bit",
         lambda b, **s: BatchChunkedKVCache(b, chunk_size=4, **packed(8), **s),
         chunked(4), bits=8, window=4),
]  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


def visible_columns(
    mask: Any, row: int, query: int, num_queries: int, columns: int
) -> np.ndarray[Any, Any]:
    """Which columns ``mask``, in any form a model may be handed, leaves visible."""
    if mask is None:
        assert num_queries == 1
        return np.ones(columns, bool)
    if isinstance(mask, str):
        assert mask == "causal"
        seen: np.ndarray[Any, Any] = np.arange(columns) <= columns - num_queries + query
        return seen
    whole = np.array(mask)
    assert whole.shape[-2:] == (num_queries, columns), whole.shape
    line = whole[row if whole.shape[0] > 1 else 0, 0, query]
    return np.asarray(line if whole.dtype == np.bool_ else line == 0)


@dataclass
class History:
    """A cache and what its rows should be."""

    kind: Kind
    choices: Choices
    max_write: int
    cache: Any = None
    rows: list[list[int]] = field(default_factory=list)
    next_token: int = 0
    # Tokens of the last write not yet taken back: those a ring must give.
    undoable: int = 0

    @classmethod
    def begin(
        cls, kind: Kind, choices: Choices, batch_size: int, next_token: int = 0
    ) -> History:
        max_write = choices.integer(1, 4)
        settings: dict[str, Any] = {
            "read_bucket": choices.integer(1, 3),
            "additive_mask": choices.integer(0, 1) == 1,
            "unpacks": choices.integer(0, 1) == 1,
        }
        settings["exact_alone"] = not settings["unpacks"]
        if kind.window is not None:
            settings["max_write"] = max_write
        cache = kind.make(batch_size, **settings)
        rows: list[list[int]] = [[] for _ in range(batch_size)]
        return cls(kind, choices, max_write, cache, rows, next_token)

    # -- steps -------------------------------------------------------------

    def write(self) -> None:
        if not self.rows:
            return
        size = self.choices.integer(1, self.max_write)
        if self.kind.window is None or not any(self.rows):
            size = self.choices.integer(1, 7)
            if self.kind.window is not None:  # more than a ring holds
                slots = self.kind.keep + self.kind.window + self.max_write - 1
                size = min(size, slots)
        lengths = [size] * len(self.rows)
        padded = self.choices.integer(0, 2) == 0
        # Rows that lost all they had may still be those of a wrapped ring, which
        # takes no more padding back than max_write.
        if self.kind.window is not None and size > self.max_write:
            padded = padded and self.cache.empty()
        if padded:
            lengths = [self.choices.integer(0, size) for _ in self.rows]
            self.cache.prepare(
                lengths=lengths, right_padding=[size - n for n in lengths]
            )
        new = []
        for _ in self.rows:
            new.append(list(range(self.next_token, self.next_token + size)))
            self.next_token += size
        self.write_tokens(new, lengths)
        if padded:
            self.cache.finalize()
        self.undoable = min(lengths, default=0)

    def write_tokens(self, new: list[list[int]], lengths: list[int]) -> None:
        """Write ``new`` after the rows, of which ``lengths`` count; check all."""
        size = len(new[0])
        tokens = np.array(new)
        keys = mx.array(KEYS[tokens]).transpose(0, 2, 1, 3)
        values = mx.array(VALUES[tokens]).transpose(0, 2, 1, 3)
        queries = mx.array(np.stack([QUERIES[:size]] * len(new))).transpose(0, 2, 1, 3)
        mask = self.cache.make_mask(
            size,
            return_array=self.choices.integer(0, 1) == 1,
            window_size=None,
        )
        k, v = self.cache.update_and_fetch(keys, values)
        output = attend(queries, k, v, cache=self.cache, scale=SCALE, mask=mask)
        for row, (ids, n) in enumerate(zip(new, lengths, strict=True)):
            self.rows[row] = self.rows[row] + ids[:n]
        self.check(mask, v, np.array(output, copy=True), size, lengths)

    def trim(self) -> None:
        most = self.choices.integer(0, self.max_write)
        counts = [self.choices.integer(0, most) for _ in self.rows]
        uniform = self.choices.integer(0, 3) == 0
        if uniform:
            counts = [most] * len(self.rows)
        most = max(counts, default=0)
        before = self.cache.offset.tolist()
        try:
            if uniform:
                longest = max(map(len, self.rows), default=0)
                assert self.cache.trim(most) == min(most, longest)
            elif self.choices.integer(0, 1):
                self.cache.trim_per_sequence(counts)
            else:
                dtype = (mx.int32, mx.uint32)[self.choices.integer(0, 1)]
                at_most = (None, most)[self.choices.integer(0, 1)]
                self.cache.trim_per_sequence(mx.array(counts, dtype), at_most)
        except CacheError:
            assert most > self.undoable, "a trim of the last write was refused"
            assert self.kind.window is not None
            assert self.cache.offset.tolist() == before
            return
        self.undoable = max(0, self.undoable - most)
        self.rows = [
            row[: max(0, len(row) - n)]
            for row, n in zip(self.rows, counts, strict=True)
        ]

    def filter(self) -> None:
        size = len(self.rows)
        if size == 0:
            return
        count = self.choices.integer(0, min(4, size + 1))
        rows = [self.choices.integer(0, size - 1) for _ in range(count)]
        array = mx.array(rows, mx.int32)
        self.cache.filter(rows if self.choices.integer(0, 1) else array)
        self.rows = [self.rows[i] for i in rows]

    def extend(self) -> None:
        if len(self.rows) > 4:
            return
        other = History.begin(
            self.kind, self.choices, self.choices.integer(0, 2), self.next_token
        )
        for _ in range(self.choices.integer(0, 4)):
            other.write()
            other.trim()
        self.cache.extend(other.cache)
        self.rows = self.rows + other.rows
        self.next_token = other.next_token
        self.undoable = 0
        if self.kind.window is not None:
            self.max_write = max(self.max_write, other.max_write)

    def place(self) -> None:
        """Rows of another batch in place of some of these, or none left of them.

        The other batch may have more rows, which are dropped.
        """
        places = [i for i in range(len(self.rows)) if self.choices.integer(0, 1)]
        if self.choices.integer(0, 2) == 0:
            self.cache.reset(places)
            for row in places:
                self.rows[row] = []
            return
        places = places[:: -1 if self.choices.integer(0, 1) else 1]
        size = len(places) + len(places) % 2  # slots are few sizes
        other = History.begin(self.kind, self.choices, size, self.next_token)
        for _ in range(self.choices.integer(0, 4)):
            other.write()
            other.trim()
        self.cache.place(places, other.cache)
        for i, row in enumerate(places):
            self.rows[row] = other.rows[i]
        self.next_token = other.next_token
        self.undoable = 0
        if self.kind.window is not None and places:
            self.max_write = max(self.max_write, other.max_write)

    def merge(self) -> None:
        """Through mlx-lm's own caches of one sequence, and back."""
        singles = self.kind.bits is None or self.kind.window is None
        if not self.rows or not singles:
            return
        parts = [self.cache.extract(i) for i in range(len(self.rows))]
        for part, row in zip(parts, self.rows, strict=True):
            assert type(part) is self.cache.single
            assert part.offset == len(row)
        self.cache = type(self.cache).merge(parts)
        self.cache.resize(self.max_write)
        self.undoable = 0

    def resize(self) -> None:
        if self.kind.window is not None:
            self.max_write = self.choices.integer(1, 5)
            self.cache.resize(self.max_write)
            self.undoable = 0

    def copy(self) -> None:
        old = self.cache
        if self.choices.integer(0, 1):
            self.cache = copy.deepcopy(old)
        else:
            self.cache = type(old).from_state(old.state)
        self.junk(old)

    def junk(self, cache: Any) -> None:
        """Overwrite the last token of a copy left behind: ours must not change."""
        if cache.batch_size and cache.is_trimmable():
            cache.trim(1)
            ones = mx.ones((cache.batch_size, KV_HEADS, 1, HEAD_DIM))
            mx.eval(cache.update_and_fetch(ones, ones))

    def note(self) -> None:
        lengths = [len(row) for row in self.rows]
        if lengths:
            slack = self.choices.integer(0, 2)
            self.cache.note_lengths(
                longest=max(lengths) + slack, shortest=0 if slack else min(lengths)
            )

    def step(self) -> None:
        # Most other steps empty a tail.
        rounds = self.kind.tail and self.choices.integer(0, 3)
        step = self.choices.integer(0, 11 if rounds else 18)
        if step <= 8:
            self.write()
        elif step <= 11:
            self.trim()
        else:
            steps = (
                self.filter, self.extend, self.merge, self.resize, self.copy, self.note,
                self.place,
            )  # fmt: skip
            steps[step - 12]()
        self.check_sizes()

    # -- checks ------------------------------------------------------------

    def check(
        self,
        mask: Any,
        values: Any,
        output: np.ndarray[Any, Any],
        size: int,
        lengths: list[int],
    ) -> None:
        if isinstance(values, tuple):
            packed, scales, biases = values
            values = mx.dequantize(
                packed, scales, biases, group_size=GROUP, bits=self.kind.bits
            )
        if isinstance(values, Split):
            values = mx.concatenate([values.base[1], values.tail[1]], axis=2)
        numbers = np.rint(np.array(values)[:, :, :, 0]).astype(int)
        keys, stored = STORED[self.kind.bits]
        expected = np.zeros_like(output)
        for row, history in enumerate(self.rows):
            first = len(history) - lengths[row]
            for query in range(lengths[row]):
                q = first + query
                wanted = [t for p, t in enumerate(history) if self.kind.visible(p, q)]
                columns = visible_columns(mask, row, query, size, numbers.shape[2])
                for head in range(KV_HEADS):
                    attended = sorted(numbers[row, head, columns].tolist())
                    assert attended == wanted, (
                        f"row {row}, position {q}: attends to {attended}, "
                        f"should to {wanted}"
                    )
                k, v = (x[wanted][:, KV_OF_HEAD] for x in (keys, stored))
                scores = np.einsum("phd,hd->ph", k, QUERIES[query]) * SCALE
                weights = np.exp(scores - scores.max(axis=0))
                weights /= weights.sum(axis=0)
                expected[row, :, query] = np.einsum("ph,phd->hd", weights, v)
            output[row, :, lengths[row] :] = 0  # padding: nobody looks
        np.testing.assert_allclose(output, expected, rtol=2e-4, atol=2e-4)

    def check_sizes(self) -> None:
        lengths = [len(row) for row in self.rows]
        cache = self.cache
        assert cache.offset.tolist() == lengths
        assert cache.offset.dtype == mx.int32
        assert cache.batch_size == len(lengths)
        longest = max(lengths, default=0)
        held = longest
        if self.kind.window is not None:
            held = min(longest, self.kind.keep + self.kind.window)
            assert cache.capacity <= (
                self.kind.keep + self.kind.window + self.max_write - 1
            )
        assert cache.size() == held
        assert cache.nbytes == 0 or not cache.empty()


def run(kind: Kind, choices: Choices, steps: int) -> History:
    """A history of ``steps`` steps; raises AssertionError where it goes wrong."""
    history = History.begin(kind, choices, choices.integer(0, 3))
    for _ in range(steps):
        if history.next_token > MAX_TOKENS - 256:
            break
        history.step()
    return history
