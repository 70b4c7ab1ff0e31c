"""The hot path of every batch cache: write, read, mask, trim.

A cache here is a codec (dense or quantized), a layout (linear or a ring) and mask
rules, chosen by the subclasses in :mod:`specdec.cache.kinds`. It speaks
mlx-lm's cache protocol, so mlx-lm's own models and generators can use it.

A forward changes the arrays of a cache, and what the host knows (bounds on lengths,
what a ring can undo). A compiled forward replays the change of the arrays without
running any Python, so the host's knowledge is updated by hand::

    key = cache.reserve(n)            # room for n tokens; what the graph depends on
    bare = cache.without_arrays()     # when the graph is traced:
    twin = bare.holding(arrays, offset, memo)    #   the model writes into this one
    cache.take(form, arrays, offset, n)     # what the graph computed; the host counts
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self, TypedDict, TypeVar

import mlx.core as mx

from ..backend import defaults
from ..cuda.cache_write import Unwritten
from ..cuda.split_attention import Split
from ..errors import CacheError
from .capacity import grown_capacity
from .positions import (
    Layout,
    LinearLayout,
    Rule,
    SlidingRule,
    additive_mask,
    at_least,
    counted,
    positions_after,
    unfused,
    visible_slots,
    whole,
)
from .ring import Ring
from .storage import Arrays, Codec, DenseCodec, QuantizedCodec, Storage
from .tail import Tail

T = TypeVar("T")
RowCounts = mx.array | Sequence[int]
Options = Mapping[str, int | None]
LINEAR, DENSE = LinearLayout(), DenseCodec()
#: The most queries of MLX's attention kernel for few queries on Metal. With several
#: rows, it copies a mask of one head for all heads, in each layer.
FEW_QUERIES = 8
# The most tokens of a row whose write may be left to attention, or goes to a tail.
# Those of packed keys are not: what unpacks them reads no queries, by which the device
# knows that they are written.
FEW_TOKENS = 16


class Memo:
    """Computes once per forward what every layer of a model needs.

    All layers of a model advance in lockstep, so positions, slots, masks and trims are
    equal for all layers that share a layout. Their caches share one memo and ask it
    with the very array objects they hold; the first to ask computes. A cache that is
    out of step holds other objects, and computes its own.

    Attributes:
        until: the last position that each of the next tokens sees, shape (B, N);
            ``None``: its own. The caches of a model share it, as they share results.
        in_windows: whether ``until`` holds only where a window slides.
        valid: how many tokens of the next write each row keeps, shape (B,), while a
            graph of padded rows is built; ``None``: the caches know.
    """

    def __init__(self) -> None:
        self.until: mx.array | None = None
        self.in_windows = False
        self.valid: mx.array | None = None
        self._last: dict[Hashable, tuple[tuple[mx.array, ...], Hashable, object]] = {}

    def get(
        self,
        name: Hashable,
        arrays: tuple[mx.array, ...],
        params: Hashable,
        compute: Callable[[], T],
    ) -> T:
        """``compute()``, or its last result under ``name`` if nothing changed.

        Args:
            arrays: inputs compared by identity, and kept alive.
            params: inputs compared by value.
        """
        last = self._last.get(name)
        if last is not None:
            old_arrays, old_params, result = last
            same = old_params == params and len(old_arrays) == len(arrays)
            if same and all(map(operator.is_, old_arrays, arrays)):
                return result  # type: ignore[return-value]
        result = compute()
        self._last[name] = (arrays, params, result)
        return result

    def clear(self) -> None:
        """Drop all results and the arrays that they were computed from."""
        self._last.clear()


class Settings(TypedDict, total=False):
    """Arguments that every cache takes, see :class:`CacheCore`."""

    bits: int | None
    group_size: int
    max_length: int | None
    read_bucket: int
    additive_mask: bool
    mask_heads: int
    unpacks: bool | None
    exact_alone: bool
    in_place: bool
    tail: int
    tail_from: int
    memo: Memo | None


class CacheCore:
    """Keys and values of one layer for a batch of rows, each with its own length.

    Row ``i`` has kept ``offset[i]`` tokens. New tokens go after each row's own
    last one: rows have no holes, and shorter rows are padded on the right, which
    the mask hides.

    ::

        offset = [3, 1, 4]        writing 2 tokens      keeping [1, 0, 2] of them
        [a b c . . .]             [a b c A B .]         [a b c A . .]
        [d . . . . .]        ->   [d D E . . .]    ->   [d . . . . .]
        [e f g h . .]             [e f g h F G]         [e f g h F G]

    Args:
        batch_size: number of rows.
        ring: what the rows share their slots by; ``None``: each position has its own.
        rules: what a query may see.
        bits: 4 or 8 stores keys and values quantized, as they are written; ``None``
            stores them as they are.
        group_size: 32, 64 or 128 quantized elements share a scale and a bias. It must
            divide the head size.
        max_length: most positions a row can ever hold, when that is known;
            capacity never passes it.
        read_bucket: columns handed to attention are rounded up to a multiple of
            this, so that shapes repeat; 1 hands over exactly what is held.
        additive_mask: make masks additive (faster on a GPU). mlx-lm's caches make
            boolean masks, and some of its models rely on that.
        mask_heads: query heads for which masks of few queries are repeated, see
            :data:`FEW_QUERIES`; 1: attention repeats them.
        unpacks: unpack stored columns for each read, so that attention gets dense keys
            and values; ``None``: as suits the backend's products with packed ones.
        exact_alone: the only query of a batch of one row of known length reads exactly
            what the row holds, which needs no mask; if false, its shapes repeat as
            others do.
        in_place: leave writes of few tokens to attention, which gets what is
            :class:`~specdec.cuda.cache_write.Unwritten`.
        tail: columns for the newest tokens, which are held apart, so that attention
            gets what is :class:`~specdec.cuda.split_attention.Split`; 0: there are
            none. Only dense caches without a ring have a tail.
        tail_from: there is one once all rows, as long as the longest, have so many
            tokens.
        memo: shared by the caches of one model, see :class:`Memo`.
        options: further arguments of the subclass's constructor, all plain.

    Attributes:
        offset: tokens kept by every row, ``mx.array`` of shape (B,).
        layout: which slot holds which position.
        bits, group_size: of packed elements. Only caches that hand out such have them:
            mlx-lm's attention recognises these caches by ``bits``.
    """

    layout: Layout

    def __init__(
        self,
        batch_size: int,
        *,
        ring: Ring | None = None,
        rules: tuple[Rule, ...] = (),
        bits: int | None = None,
        group_size: int = 64,
        max_length: int | None = None,
        read_bucket: int = 1,
        additive_mask: bool = False,
        mask_heads: int = 1,
        unpacks: bool | None = None,
        exact_alone: bool = True,
        in_place: bool = False,
        tail: int = 0,
        tail_from: int = 0,
        memo: Memo | None = None,
        options: Options | None = None,
    ):
        at_least("batch_size", batch_size, 0)
        at_least("read_bucket", read_bucket, 1)
        at_least("mask_heads", mask_heads, 1)
        if max_length is not None:
            at_least("max_length", max_length, 1)
        self.ring = ring
        self.layout = LINEAR if ring is None else ring.layout
        self.rules = rules
        self.max_length = max_length
        self.read_bucket = read_bucket
        if unpacks is None:
            unpacks = defaults().unpacks
        self.unpacks = unpacks
        codec: Codec = DENSE if bits is None else QuantizedCodec(bits, group_size)
        if not unpacks:
            vars(self).update(codec.options)
        # The constructor's arguments, to make another cache like this one.
        self._options: dict[str, int | None] = {
            **(options or {}),
            **codec.options,
            "max_length": max_length,
            "read_bucket": read_bucket,
            "additive_mask": additive_mask,
            "mask_heads": mask_heads,
            "unpacks": unpacks,
            "exact_alone": exact_alone,
            "in_place": in_place,
            "tail": tail,
            "tail_from": tail_from,
        }
        self._memo = Memo() if memo is None else memo
        self._storage = Storage(codec)
        self.offset = self._memo.get(
            ("zeros", batch_size), (), None, lambda: mx.zeros((batch_size,), mx.int32)
        )
        # What the host knows without the device: no row is longer than _longest, and
        # none is shorter while _uniform.
        self._longest = 0
        self._uniform = True
        # Tokens per row of the last write, and the longest row after it, padding
        # included.
        self._last_write = 0, 0
        # Right padding announced by prepare(), not yet taken back.
        self._lengths: list[int] | None = None
        self._right_padding: list[int] | None = None

    # -- sizes ------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return int(self.offset.shape[0])

    @property
    def capacity(self) -> int:
        """Slots allocated per row."""
        return self._storage.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._storage.nbytes

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes of dense copies of all slots, where attention gets unpacked ones."""
        arrays = self._storage.held
        if not arrays or not (self.unpacks and self.packing):
            return 0
        packed = sum(a.nbytes for a in arrays if a.dtype == mx.uint32)
        return packed * 8 // self.packing["bits"] * arrays[-1].itemsize

    @property
    def packing(self) -> dict[str, int]:
        """How keys and values are packed: ``bits`` and ``group_size``, or nothing."""
        return self._storage.codec.options

    @property
    def lent(self) -> bool:
        """Whether keys and values may be held elsewhere."""
        return self._storage.lent

    @property
    def dtype(self) -> mx.Dtype | None:
        """Type of the scores, and of additive masks; it may be set before a write."""
        return self._storage.dtype

    @dtype.setter
    def dtype(self, dtype: mx.Dtype | None) -> None:
        self._storage.expected = dtype

    def empty(self) -> bool:
        """Whether nothing is allocated: never written, or no rows left."""
        return self._storage.empty

    def size(self) -> int:
        """Tokens held for the longest row (reads ``offset`` unless the host knows)."""
        longest = self._measure_longest()
        return longest if self.ring is None else min(longest, self.ring.size)

    def _measure_longest(self) -> int:
        if not self._uniform:
            n: list[int] = self.offset.tolist() or [0]  # type: ignore[assignment]
            self.note_lengths(longest=max(n), shortest=min(n))
        return self._longest

    def note_lengths(self, *, longest: int, shortest: int = 0) -> None:
        """Note what the host has learnt about ``offset``.

        A tight bound keeps reads and capacity small. It is never checked.
        """
        self._longest = min(self._longest, longest)
        self._uniform = self._uniform or shortest == longest

    # -- writing and reading ----------------------------------------------

    def _capacity_for(self, longest: int, capacity: int | None = None) -> int:
        """Slots to have for rows of up to ``longest`` tokens.

        Args:
            capacity: as many as there are now; ``None``: :attr:`capacity`.
        """
        capacity = self.capacity if capacity is None else capacity
        needed = longest if self.ring is None else min(longest, self.ring.slots)
        if needed <= capacity:
            return capacity
        limits = [n for n in (self.ring and self.ring.slots, self.max_length) if n]
        return grown_capacity(needed, min(limits, default=None))

    def _after(self, num_tokens: int) -> tuple[int, int, int]:
        """What holds once ``num_tokens`` are written.

        Returns:
            An upper bound on the longest row, slots per row, and how many columns
            attention reads.
        """
        longest, capacity = self._longest + num_tokens, self._storage.capacity
        ring, needed = self.ring, longest
        if ring is not None:
            needed = min(longest, ring.slots)
        if needed > capacity or (ring and not ring.takes(num_tokens, longest)):
            # The bound is loose after per-sequence trims; look before growing, or
            # refusing what a short row can take.
            longest = self._measure_longest() + num_tokens
            capacity = self._capacity_for(longest, capacity)
        return longest, capacity, self._extent(longest, capacity, num_tokens)

    def begin_like(self, other: CacheCore) -> None:
        """Let the first write allocate as many slots as ``other`` has.

        The rows can then be placed into ``other`` as they are. Nothing extra is
        allocated if that is far more than they can ever need.
        """
        if self.max_length is not None and self.ring is None:
            most = grown_capacity(self.max_length)
            self._storage.least = other.capacity if other.capacity <= most else 0

    def _exact(self, num_tokens: int) -> bool:
        """Whether attention reads exactly what a row holds.

        The only query of a row whose length is known may do so: it needs no mask, and
        attention without a mask has fast kernels for any length.
        """
        alone = num_tokens == 1 and self._uniform and len(self.offset) == 1
        return self.read_bucket == 1 or bool(alone and self._options["exact_alone"])

    def _extent(self, longest: int, capacity: int, num_tokens: int) -> int:
        """Columns that attention reads when rows are up to ``longest`` long."""
        if self.read_bucket > 1 and not self._exact(num_tokens):
            longest += -longest % self.read_bucket
        return min(capacity, longest)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write new tokens after every row's last one; return what attention reads.

        Args:
            keys, values: shape (B, kv_heads, S, head_dim).

        Returns:
            Keys and values of ``extent`` columns, (B, kv_heads, extent, head_dim);
            for a quantized cache, triples (packed, scales, biases), unless it
            unpacks them; with ``in_place``, what attention has yet to write; with a
            tail, both.

        Raises:
            CacheError: the rows do not fit ``max_length`` or the ring.
        """
        rows, num_tokens, storage = keys.shape[0], keys.shape[2], self._storage
        offset, layout = self.offset, self.layout
        if rows != len(offset):
            raise CacheError(f"{rows} rows were written to a cache of {len(offset)}")
        updates = storage.codec.encode(keys, values)
        tail = self._tail_for(num_tokens)
        longest, capacity, extent = self._make_room(num_tokens)
        if tail is not None:
            storage.tail = tail.written(updates, offset)
            self._advance(num_tokens, longest)
            return self.keys_and_values()
        later = self._in_place(num_tokens)
        unwritten: Any = None
        if self.empty():  # so all rows start in slot 0
            storage.write_first(updates, capacity)
            unwritten = Unwritten(storage, extent)
        else:
            slots = self._memo.get(
                ("slots", layout),
                (offset,),
                num_tokens,
                lambda: layout.slots(positions_after(offset, num_tokens)),
            )
            if later:
                unwritten = storage.write_later(updates, slots, extent)
            else:
                storage.write(updates, slots)
        self._advance(num_tokens, longest)
        return (unwritten, unwritten) if later else self._read(extent)

    def _in_place(self, num_tokens: int) -> bool:
        """Whether a write of so many tokens is left to attention."""
        few = num_tokens <= FEW_TOKENS and not self.packing
        return few and bool(self._options["in_place"])

    def _make_room(self, num_tokens: int) -> tuple[int, int, int]:
        """Grow for a write; return what :meth:`_after` does.

        Raises:
            CacheError: the rows do not fit ``max_length`` or the ring.
        """
        before = self._storage.capacity
        after = longest, capacity, _ = self._after(num_tokens)
        if self.ring is not None:
            self.ring.check(num_tokens, longest)
        if capacity > before:
            self._storage.grow(capacity)
        return after

    def _tail_for(self, num_tokens: int) -> Tail | None:
        """The tail that takes the next write; ``None``: the base takes it.

        A full tail is emptied for that, and a new one begins.
        """
        width, least = self._options["tail"] or 0, self._options["tail_from"] or 0
        if (
            num_tokens > min(width, FEW_TOKENS)
            or self._lengths is not None
            or self.packing
            or self.ring is not None
            or self.empty()
        ):
            return None
        self._make_room(num_tokens)
        if self._longest * self.batch_size < max(1, least):
            return None
        storage = self._storage
        if (tail := storage.tail) and not tail.fits(num_tokens, storage.capacity):
            storage.empty_tail()
        if storage.tail is None:
            storage.tail = Tail(width, self.offset, self._longest)
        return storage.tail

    def _base_extent(self, tail: Tail) -> int:
        """Columns of the base that attention reads."""
        return self._extent(tail.longest, self.capacity, 2)

    def _advance(self, num_tokens: int, longest: int) -> None:
        self._count(num_tokens, longest)
        offset, kept = self.offset, self._memo.valid
        if kept is not None:
            self.offset = self._memo.get(
                "advance", (offset, kept), None, lambda: unfused(mx.add, offset, kept)
            )
            return
        if self._lengths is None:
            # An array, not a number: a number would become part of a compiled kernel,
            # and each new number would compile another.
            self.offset = self._memo.get(
                "advance",
                (offset,),
                num_tokens,
                lambda: unfused(mx.add, offset, counted(num_tokens, num_tokens + 1)),
            )
            return
        # A row whose announced length is reached takes no more: what was
        # written after it is padding, overwritten by its next real token.
        valid = [min(num_tokens, n) for n in self._lengths]
        self._lengths = [n - v for n, v in zip(self._lengths, valid, strict=True)]
        self.offset = self._memo.get(
            "advance",
            (offset,),
            tuple(valid),
            lambda: unfused(mx.add, offset, mx.array(valid)),
        )
        self._leave_padding(num_tokens, valid)

    def _leave_padding(self, num_tokens: int, valid: Sequence[int]) -> None:
        """Note how many tokens of a write each row keeps, on the host."""
        self._longest -= num_tokens - max(valid, default=0)
        self._uniform = self._uniform and len(set(valid)) <= 1
        if self.ring is not None:
            self.ring.trim(num_tokens - min(valid, default=num_tokens))

    def _count(self, num_tokens: int, longest: int) -> None:
        """Note a write of ``num_tokens`` tokens, on the host."""
        self._longest, self._last_write = longest, (num_tokens, longest)
        if self.ring is not None:
            self.ring.write(num_tokens, longest)

    def skip(self, num_tokens: int) -> None:
        """Let rows that were written to have ``num_tokens`` more, of zeros."""
        longest = self._measure_longest() + num_tokens
        self._storage.grow(self._capacity_for(longest))
        self._advance(num_tokens, longest)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What attention reads, without writing (layers that share keys use it)."""
        if (tail := self._storage.tail) and tail.arrays:
            extent = self._base_extent(tail)
            split: Any = Split(self._storage.base(extent), tail.arrays)
            return split, split
        width, longest = self._last_write
        longest = max(self._longest, longest)
        return self._read(self._extent(longest, self.capacity, width))

    def kept(self) -> tuple[Any, Any, mx.array]:
        """What a query of every row's last token attends to, without writing.

        Returns:
            Keys and values as :meth:`update_and_fetch` returns them, and a mask of
            shape (B, 1, 1, extent), as :meth:`make_mask` makes them.
        """
        extent = self._extent(max(self._longest, 1), self.capacity, 1)
        offset, layout, rules = self.offset, self.layout, self.rules
        dtype = self._storage.dtype if self._options["additive_mask"] else None

        def compute() -> mx.array:
            # A row without tokens sees one slot: a softmax of nothing is not a number.
            before = mx.maximum(offset - 1, 0)
            visible = visible_slots(layout, rules, before, 1, extent)
            return visible if dtype is None else additive_mask(visible, dtype)

        params = (extent, str(dtype), rules)
        mask = self._memo.get(("kept", layout), (offset,), params, compute)
        return *self._read(extent), mask

    def _read(self, extent: int) -> tuple[Any, Any]:
        """The first ``extent`` columns, as attention takes them."""
        codec, arrays = self._storage.codec, self._storage.read(extent)
        return codec.dense(arrays) if self.unpacks else codec.present(arrays)

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name
        return_array: bool = False,
        window_size: int | None = None,
        *,
        both_ways: bool = False,
    ) -> mx.array | str | None:
        """The mask for ``N`` new tokens per row; call it before they are written.

        Args:
            window_size: the model's own sliding window, in addition to the
                cache's rules.
            both_ways: whether new tokens also see the new tokens after them.

        Returns:
            An array of shape (B, 1, N, extent), or (B, mask_heads, N, extent) for up to
            :data:`FEW_QUERIES` of several rows. It is additive if the cache was made so
            and has stored something, which fixes the dtype; else boolean. Where no
            array is needed, what mlx-lm's caches return: ``None`` for one query that
            sees every column, ``"causal"`` for several.
        """
        tail = self._tail_for(N)
        longest, _, extent = self._after(N)
        layout: Layout = self.layout
        if tail is not None:
            layout, extent = tail, self._base_extent(tail) + tail.width
        rules = self.rules
        if rules or window_size is not None:
            bound = longest if extent == longest and tail is None else None
            rules = self._rules_within(window_size, bound)
        # Exactly the rows' own columns, oldest first: no array needed.
        offset, until = self.offset, self._memo.until
        if self._memo.in_windows and window_size is None:
            until = None
        alone = self._uniform and extent == longest and not rules and tail is None
        if alone and not return_array and until is None:
            return None if N == 1 or both_ways else "causal"
        dtype = self._storage.dtype if self._options["additive_mask"] else None
        heads = 1 if tail is not None else self._options["mask_heads"] or 1

        def compute() -> mx.array:
            sees = until
            if both_ways:
                last = unfused(mx.add, offset, mx.array(N - 1))
                sees = mx.broadcast_to(last[:, None], (len(offset), N))
            visible = visible_slots(layout, rules, offset, N, extent, until=sees)
            mask = visible if dtype is None else additive_mask(visible, dtype)
            if heads == 1 or len(offset) == 1 or N > FEW_QUERIES:
                return mask
            shape = len(offset), heads, N, extent
            return mx.contiguous(mx.broadcast_to(mask, shape))

        params = (N, extent, str(dtype), rules)
        kind = ("mask", self.layout, window_size, both_ways)
        read = offset, until, None if tail is None else tail.starts
        known = tuple(each for each in read if each is not None)
        return self._memo.get(kind, known, params, compute)

    def _rules_within(
        self, window_size: int | None, longest: int | None
    ) -> tuple[Rule, ...]:
        """The rules that can hide something from rows of up to ``longest`` tokens."""
        rules = self.rules
        if window_size is not None and SlidingRule(window_size) not in rules:
            rules = (*rules, SlidingRule(window_size))
        return tuple(r for r in rules if longest is None or r.span < longest)

    def resize(self, max_write: int) -> None:
        """Prepare for writes of up to ``max_write`` tokens.

        A ring moves its slots with one gather. Shrinking after prefill returns memory;
        only the newest ``keep + window + max_write - 1`` positions stay.

        Raises:
            CacheError: ``max_write`` is less than 1.
        """
        ring = self.ring
        if ring is None or at_least("max_write", max_write, 1) == ring.max_write:
            return
        longest = self._measure_longest()
        old, old_capacity = ring.layout, self.capacity
        ring.resize(max_write, longest)
        self._options["max_write"], self.layout = max_write, ring.layout
        if self.empty():
            return
        capacity = self._capacity_for(max(longest, 1), 0)
        offset, layout = self.offset, ring.layout

        def sources() -> mx.array:
            held = layout.held(capacity, offset - 1)
            return mx.minimum(old.slots(mx.maximum(held, 0)), old_capacity - 1)

        params = (capacity, old_capacity)
        self._storage.take_slots(
            self._memo.get(("relay", old, layout), (offset,), params, sources)
        )

    def checkpoint(self) -> None:
        """Let the next trim take back all that is written from now on."""

    # -- trimming ----------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back now (rings: up to a bound)."""
        return self.ring is None or self.ring.budget != 0

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of every row (all tokens of a shorter row).

        Returns:
            How many tokens the longest row lost.
        """
        lost = max(0, min(n, self._measure_longest()))
        if lost:
            self.trim_per_sequence([lost] * self.batch_size)
        return lost

    def trim_per_sequence(
        self,
        n: RowCounts,
        at_most: int | None = None,
        fewest: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        """Take back the last ``n[i]`` tokens of row ``i``; no copy, no synchronisation.

        Args:
            n: tokens to drop per row, shape (B,), 0 or more; a row loses no more
                than it has. An array is not read: negative values in it count as 0.
            at_most: the largest value that ``n`` can hold, when the host knows it.
                Without it, a ring that may have wrapped reads ``n``.
            fewest: the smallest value that an array ``n`` can hold, when the host knows
                it.
            fresh: ``n`` counts tokens of the last write, which all rows still have, so
                nothing has to bound it.

        Raises:
            CacheError: ``n`` has another length than the batch, is negative or not
                whole, or takes back more than a ring still holds.
        """
        if isinstance(n, mx.array):
            # An unsigned count would make the offsets 64 bits wide.
            counts = n if n.dtype == mx.int32 else n.astype(mx.int32)
            bounded = self.ring is not None and self.ring.budget is not None
            if at_most is None and bounded:
                at_most = int(n.max()) if n.size else 0
        else:
            values = [whole("a count of tokens to trim", v) for v in n]
            fewest, at_most = min(values, default=0), max(values, default=0)
            at_least("tokens to trim", fewest, 0)
            counts = self._memo.get(
                "counts", (), tuple(values), lambda: mx.array(values, mx.int32)
            )
        if counts.shape != self.offset.shape:
            raise CacheError(
                f"trim_per_sequence got shape {tuple(counts.shape)}: "
                f"it must be ({self.batch_size},), one count per row"
            )
        if self.ring is not None:
            self.ring.trim(at_most)
        if (tail := self._storage.tail) is not None:
            shorter = tail.trimmed(at_most, fewest)
            if shorter is None:
                self._storage.empty_tail()
            else:
                self._storage.tail = shorter
        offset = self.offset

        def trimmed() -> mx.array:
            left = offset - counts
            return left if fresh else mx.clip(left, 0, offset)

        self.offset = self._memo.get("trim", (offset, counts), fresh, trimmed)
        self._longest = max(0, self._longest - fewest)
        self._uniform = self._uniform and fewest == at_most

    # -- compiled forwards ---------------------------------------------------

    def fits(self, num_tokens: int) -> bool:
        """Whether every row has room for ``num_tokens`` more within ``max_length``.

        Waits for the device only if the host's bounds on lengths are not enough.
        """
        limit = self.max_length
        if limit is None or self._longest + num_tokens <= limit:
            return True
        return self._measure_longest() + num_tokens <= limit

    def reserve(self, num_tokens: int, *, padded: bool = False) -> Hashable:
        """Make room for a write of ``num_tokens`` tokens per row.

        Args:
            padded: some of these tokens are padding, as in a chunk of prompts.

        Returns:
            A key of all that the graph of the write, its mask and attention's reads
            depends on, besides the arrays' heads and types. ``None`` when it cannot be
            known (nothing is stored yet, or padding is announced), or differs for every
            length.

        Raises:
            CacheError: the rows do not fit ``max_length`` or the ring.
        """
        unknown = self._lengths is not None or (self.empty() and not padded)
        if unknown or self._exact(num_tokens):
            return None
        longest, capacity, extent = self._make_room(num_tokens)
        # A mask, or one of its rules, may be left out only where attention reads no
        # more than the rows hold.
        bound = longest if extent == longest else None
        first, codec = self.empty(), self._storage.codec
        if first:
            capacity = max(capacity, self._storage.least)
        how = first, self._uniform
        return type(self), codec, self.layout, capacity, extent, bound, how

    @property
    def arrays(self) -> Arrays:
        """The stored keys and values, (B, kv_heads, capacity, features) each."""
        assert self._storage.arrays is not None
        return self._storage.arrays

    def given(self, num_tokens: int) -> tuple[Hashable, Arrays]:
        """The inputs of a graph that writes tokens: their form, and the arrays."""
        return None, self._storage.parts(in_place=self._in_place(num_tokens))

    def left(self) -> tuple[Any, Arrays]:
        """The outputs of that graph for :meth:`take`: their form, and the arrays."""
        return self.given(self._last_write[0])

    @property
    def written(self) -> Any:
        """What is computed once all writes are; it is not to be read."""
        storage = self._storage
        return storage.held if storage.tail else storage.current(), self.offset

    def without_arrays(self) -> Self:
        """A copy of this cache that holds no arrays, only what the host knows."""
        bare = copy.copy(self)
        bare._storage, bare._memo = copy.copy(self._storage), Memo()
        bare._storage.arrays = None
        bare.ring = copy.copy(self.ring)
        del bare.offset
        return bare

    def holding(self, arrays: Arrays, offset: mx.array, memo: Memo) -> Self:
        """A cache like this one that holds the given arrays."""
        twin = copy.copy(self)
        twin._storage, twin._memo = copy.copy(self._storage), memo
        twin._storage.take(arrays)
        twin.ring = copy.copy(self.ring)
        twin.offset = offset
        return twin

    def take(
        self,
        form: Any,
        arrays: Arrays,
        offset: mx.array,
        num_tokens: int,
        taken_back: int = 0,
        valid: Sequence[int] = (),
    ) -> None:
        """Hold the result of a write of ``num_tokens`` tokens, after :meth:`reserve`.

        Args:
            form, arrays: what :meth:`left` returned for the cache that was written.
            offset: tokens kept by every row now, shape (B,).
            taken_back: how many of those tokens every row has lost again.
            valid: how many of them each row keeps; empty: all the others.

        Raises:
            CacheError: that is more than a ring can take back.
        """
        self._storage.take(arrays)
        self.offset = offset
        self._count(num_tokens, self._longest + num_tokens)
        if valid:
            self._leave_padding(num_tokens, valid)
        if taken_back:
            if self.ring is not None:
                self.ring.trim(taken_back)
            self._longest -= taken_back
