"""The peak memory of a run: a pure function of shapes and lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..backend import LOOKAHEAD, SCORED_BYTES, BackendDefaults
from ..cache.capacity import (
    CATCH_UP_STEP,
    cache_slots,
    chunk_width,
    padded_length,
    ring_slots,
    round_up,
)
from ..cuda.packed_matmul import TIMED_ROWS
from ..sampling_params import SamplingParams
from .formulas import logits_bytes
from .rows import RowNeeds, choosing_bytes

if TYPE_CHECKING:
    from ..models.vision import TowerMemory

# A search for the largest context ends here, beyond any model's positions.
MAX_CONTEXT = 1 << 22
#: Tokens that mlx-lm's scans score with each other at a time.
SCAN_PART = 256
#: The most layers whose arrays are not freed yet. MLX gives CUDA a graph of about one
#: layer's operations at a time, waits if ten are running, and frees an array with the
#: last graph that used it.
UNDER_WAY = 10
#: Copies of a recurrent layer's states that are held at once: the current ones, the
#: next ones, and, if tokens can be taken back, those before the last write.
STATE_COPIES = 3
# Slices that may be under way together, and copies of each that scoring holds: a dozen
# operations, of which MLX begins about 60 ahead.
SCORED_SLICES, SCORE_COPIES = 6, 5

PARTS = (
    "target weights",
    "draft weights",
    "target KV cache",
    "draft KV cache",
    "growth and joins",
    "logits",
    "activations",
    "rollback inputs",
    "rounds in flight",
    "n-gram lookup",
    "prefix cache",
    "images",
    "loading",
)


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """One cache of one layer.

    Args:
        slot_bytes: bytes of one token of one row: key and value of every head, packed
            with their scales and biases if they are quantized. 0 if the model never
            writes to the cache.
        window: tokens that a query sees in a ring (sinks not counted), or a
            chunk; ``None``: everything.
        keep: first tokens that a ring never drops.
        state_bytes: bytes of a recurrent layer's states for one row of any length.
        held_bytes: bytes per token of a round: inputs of a recurrent layer, which are
            held to take tokens back.
    """

    slot_bytes: int
    window: int | None = None
    keep: int = 0
    state_bytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """A model's weights, its caches, and what a forward holds besides them.

    :mod:`.planning` reads it off a model.

    Args:
        name: for messages.
        num_parameters: parameters of the model, however they are packed.
        weight_bytes: bytes of all weights as the run holds them.
        caches: in the order in which the model uses them.
        dense_caches: the same caches before they are quantized, if rows are quantized
            once they are long (``quantized_kv_start``); else empty.
        vocab_size: number of logits of one position.
        elem_bytes: bytes of one logit.
        token_bytes: bytes of the activations of one token in one layer.
        score_bytes: bytes of attention scores and masks per token and cached column.
        pair_bytes: bytes per pair of tokens of a row in one part of a scan
            (:data:`SCAN_PART`).
        column_bytes: bytes of the copy that attention makes of one cached column of a
            row.
        unpacked_column_bytes: bytes of such a column in a layer whose packed keys and
            values are unpacked for attention.
        unpacked_bytes: bytes of a layer's packed matrices once they are unpacked for
            the products of many rows.
        loading_bytes: the most bytes held while the model is loaded, including its
            weights; 0 if it is loaded already.
        feature_bytes: for a draft head, bytes of the target's hidden states of one
            token that it reads: recorded, joined and normed.
        proposes_blocks: whether one forward computes the logits of all proposals.
        in_place: whether rounds write caches in place; elsewhere writes may copy them.
        tail, tail_from: as for :class:`~specdec.cache.core.CacheCore`; 0, unless every
            cache can have a tail.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    caches: tuple[CacheGeometry, ...]
    dense_caches: tuple[CacheGeometry, ...] = ()
    vocab_size: int
    elem_bytes: int
    token_bytes: int
    score_bytes: int
    pair_bytes: int = 0
    column_bytes: int = 0
    unpacked_column_bytes: int = 0
    unpacked_bytes: int = 0
    loading_bytes: int = 0
    feature_bytes: int = 0
    proposes_blocks: bool = False
    in_place: bool = False
    tail: int = 0
    tail_from: int = 0

    def layer_bytes(
        self,
        rows: int,
        length: int,
        *,
        max_length: int | None = None,
        max_write: int = 1,
        dense: bool = False,
        takes_back: bool = True,
    ) -> list[int]:
        """Bytes that each cache has allocated for ``rows`` rows.

        Args:
            length: tokens of the longest row, including tokens that were taken back.
            max_length: the most tokens of a row that the caches were made for.
            max_write: the most tokens of one write that rings were made for.
            dense: count the caches as they are before they are quantized.
            takes_back: whether tokens are taken back in rounds.
        """
        states = (STATE_COPIES - (not takes_back)) * (length > 0)
        caches = self.dense_caches if dense else self.caches

        def of_row(cache: CacheGeometry) -> int:
            slots = cache_slots(
                length,
                max_length=max_length,
                window=cache.window,
                keep=cache.keep,
                max_write=max_write,
            )
            return cache.slot_bytes * slots + cache.state_bytes * states

        # A model has few kinds of layers.
        sizes = {cache: rows * of_row(cache) for cache in set(caches)}
        return [sizes[cache] for cache in caches]

    def columns(self, extent: int, max_write: int) -> int:
        """The most keys that a layer reads of ``extent`` in a cache."""
        rings = [(c.window, c.keep) for c in set(self.caches)]
        most = [extent if w is None else ring_slots(w, max_write, k) for w, k in rings]
        return min(extent, max(most, default=0))

    def workspace_bytes(
        self, rows: int, tokens: int, columns: int, layers: int | None = None
    ) -> int:
        """The most bytes that a forward holds besides weights, caches and logits.

        Args:
            rows: rows of the batch.
            tokens: how many tokens each row feeds.
            columns: how many keys each row has, its newest included.
            layers: layers that are under way at once; ``None``: the host runs ahead.
        """
        ahead = min(layers or UNDER_WAY, len(self.caches))
        per_token = (layers or 1) * self.token_bytes + columns * self.score_bytes
        per_token += min(tokens, SCAN_PART) * self.pair_bytes
        per_column = self.column_bytes + ahead * self.unpacked_column_bytes
        unpacked = self.unpacked_bytes if rows * tokens >= TIMED_ROWS[0] else 0
        forward = rows * (tokens * per_token + columns * per_column)
        # Matrices of the layer before are freed a little later.
        return forward + (ahead + 1) * unpacked


@dataclass(frozen=True)
class Moment:
    """One moment of a run: its bytes by part, see :data:`PARTS`."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of a run, computed before it begins.

    The figures are upper bounds of ``mx.get_peak_memory()``: they assume that all rows
    join together and reach their full lengths at once. What MLX holds for reuse
    (``mx.get_cache_memory()``) is not counted: MLX gives that up when memory runs
    short.

    Args:
        target, draft: the models; without a draft ``num_draft_tokens`` is 0.
        num_draft_tokens: k, the most tokens proposed in a round.
        pauses: whether rounds may draft nothing, so that the draft has to catch up
            later.
        prefill_step_size: prompt tokens per row in one forward.
        backend: how the backend shapes rounds.
        quantized_kv_start: tokens of a row from which on caches are packed, if they
            ever are.
        prefix_bytes: bytes of prefixes that are kept in memory besides the rows.
        lookup_bytes: bytes of the tokens that n-grams are looked up in, and of the
            look-up.
        tower: embeds images; ``None``: the target takes none.
    """

    target: ModelGeometry
    draft: ModelGeometry | None = None
    num_draft_tokens: int = 0
    pauses: bool = False
    prefill_step_size: int
    backend: BackendDefaults
    quantized_kv_start: int = 0
    prefix_bytes: int = 0
    lookup_bytes: int = 0
    tower: TowerMemory | None = None

    # -- the moments -------------------------------------------------------

    def peak(self, rows: Sequence[RowNeeds]) -> int:
        """The most bytes that a run of these rows holds at any moment."""
        return max(moment.total for moment in self.moments(rows))

    def moments(self, rows: Sequence[RowNeeds]) -> tuple[Moment, ...]:
        """Loading, prefill, decoding and measuring, each at its peak."""
        moments = [self._loading(), self._prefill(rows), self._decoding(rows)]
        if self.pauses and self.num_draft_tokens and rows:
            moments.append(self._calibration(len(rows)))
        return tuple(moments)

    @property
    def weight_bytes(self) -> int:
        """Weights of target and draft."""
        return sum(model.weight_bytes for model in self._models.values())

    def _loading(self) -> Moment:
        most = self.target.loading_bytes
        if self.draft:
            most = max(most, self.target.weight_bytes + self.draft.loading_bytes)
        return self._moment("loading", {"loading": max(0, most - self.weight_bytes)})

    def _prefill(self, rows: Sequence[RowNeeds]) -> Moment:
        """The last chunk of the longest prompt."""
        prompt, backend = self._longest_prompt(rows), self.backend
        width = chunk_width(prompt, self._step(rows), backend.read_bucket)
        parts, layers = dict[str, int](), None
        if backend.prefills_by_layers:
            layers = 1 + backend.layers_ahead(len(rows) * width)
        for name in self._models:
            self._add(parts, name, rows, prompt, width, self._max_write, layers)
        parts["activations"] += self._features(len(rows), width)
        if scored := sum(r.params.prompt_logprobs is not None for r in rows):
            # In float32, a slice's logits, and what Logprobs.of makes of them.
            chunk = logits_bytes(scored, width - 1, self.target.vocab_size, 4)
            parts["logits"] = SCORE_COPIES * min(chunk, SCORED_SLICES * SCORED_BYTES)
        return self._moment("prefill", parts | self._others(rows))

    def _decoding(self, rows: Sequence[RowNeeds]) -> Moment:
        """A round in which every row is as long as it can become."""
        length, k, backend = self._longest(rows), self.num_draft_tokens, self.backend
        parts, inputs, copies = dict[str, int](), 0, 0
        for name, model in self._models.items():
            held, width, writes = length, self._wide, self._wide
            # A draft catches up in pieces; with static shapes the last piece is padded.
            if name == "draft" and self.pauses:
                held += CATCH_UP_STEP if backend.static_shapes else 0
                width = max(width, min(CATCH_UP_STEP, held))
                writes = width + backend.pad_single_token
            self._add(parts, name, rows, held, width, writes)
            if not model.in_place:
                times = max(1, k) if name == "draft" else self._ahead
                times = min(times, backend.copied_layers // max(1, len(model.caches)))
                copied = float(times)
                if model.tail:
                    # Full ones are written at times; short rows, whose slots may be
                    # twice their tokens, have none.
                    columns = 2 * (model.tail + model.tail_from / max(1, len(rows)))
                    copied = 1 + times * min(1, columns / held)
                copies += int(copied * parts[f"{name} KV cache"])
            if k:
                inputs += len(rows) * width * sum(c.held_bytes for c in model.caches)
        # Rows that leave and rows that join in one step copy a layer twice more.
        parts["growth and joins"] *= 3 if len(rows) > 1 else 1
        parts["activations"] += self._features(len(rows), self._wide)
        heads = [(self.target, max(k, backend.pad_single_token))]
        if self.draft:
            # A draft model's first forward of a round takes two tokens.
            heads.append((self.draft, k if self.draft.proposes_blocks else 1))
        parts["logits"] = sum(
            logits_bytes(len(rows), n, m.vocab_size, m.elem_bytes) for m, n in heads
        ) + max(choosing_bytes(rows, n, m.vocab_size) for m, n in heads)
        if inputs:
            parts["rollback inputs"] = inputs
        if flying := copies + self._ahead * (parts["activations"] + parts["logits"]):
            parts["rounds in flight"] = flying
        return self._moment("decoding", parts | self._others(rows))

    def _calibration(self, num_rows: int) -> Moment:
        """Measuring costs before the first round, at ``num_rows`` rows."""
        # One row is measured where time grows with tokens. Two runs overlap.
        num_rows = 1 if self.backend.costs_by_token else num_rows
        ahead = replace(self, backend=replace(self.backend, costs_by_token=False))
        row = RowNeeds(1, SamplingParams(max_tokens=CATCH_UP_STEP + 4 * self._round))
        return replace(ahead._decoding([row] * num_rows), name="measuring")

    def _features(self, rows: int, tokens: int) -> int:
        """Bytes of the target's hidden states that the draft reads after a forward."""
        return rows * tokens * self.draft.feature_bytes if self.draft else 0

    def _add(
        self,
        parts: dict[str, int],
        name: str,
        rows: Sequence[RowNeeds],
        length: int,
        width: int,
        max_write: int,
        layers: int | None = None,
    ) -> None:
        """Add a model's caches, and what a forward of ``width`` tokens a row holds.

        Args:
            layers: as for :meth:`ModelGeometry.workspace_bytes`.
        """
        model = self._models[name]
        held = self._layers(model, rows, length, max_write)
        parts[f"{name} KV cache"] = sum(held)
        # Caches grow one layer at a time, while its old arrays are still held. Rings
        # then have the size that prefill gave them.
        if max_write != self._max_write:
            held = self._layers(model, rows, length, self._max_write)
        extent = round_up(length, self.backend.read_bucket)
        columns = model.columns(extent, max_write)
        forward = model.workspace_bytes(len(rows), width, columns, layers)
        for part, size in (
            ("growth and joins", max(held, default=0)),
            ("activations", forward),
        ):
            parts[part] = max(parts.get(part, 0), size)

    def _layers(
        self,
        model: ModelGeometry,
        rows: Sequence[RowNeeds],
        length: int,
        max_write: int,
    ) -> list[int]:
        """Bytes of each cache once the longest row has ``length`` tokens."""
        limit = self._max_length(rows)

        def sizes(n: int, *, dense: bool) -> list[int]:
            return model.layer_bytes(
                len(rows),
                min(n, limit),
                max_length=limit,
                max_write=max_write,
                dense=dense,
                takes_back=self.num_draft_tokens > 0,
            )

        now = sizes(length, dense=False)
        if not model.dense_caches:
            return now
        # Caches are dense until the longest row has this many tokens, which is checked
        # between two writes.
        most = min(length, self.quantized_kv_start - 1 + self._max_write)
        return max(now, sizes(most, dense=True), key=sum)

    def _moment(self, name: str, parts: dict[str, int]) -> Moment:
        weights = {f"{n} weights": m.weight_bytes for n, m in self._models.items()}
        return Moment(name, weights | parts)

    def _others(self, rows: Sequence[RowNeeds]) -> dict[str, int]:
        """What is held besides the models from the first prompt on."""
        images = 0
        if self.tower is not None:  # one image at a time, while other rows decode
            largest = max((row.image_tokens for row in rows), default=0)
            images = self.tower.held_bytes + self.tower.peak(largest)
        others = {
            "n-gram lookup": self.lookup_bytes,
            "prefix cache": self.prefix_bytes,
            "images": images,
        }
        return {name: size for name, size in others.items() if size}

    # -- the engine's own sizes ----------------------------------------------

    @property
    def _models(self) -> dict[str, ModelGeometry]:
        return {"target": self.target} | ({"draft": self.draft} if self.draft else {})

    @property
    def _ahead(self) -> int:
        """Rounds in flight after the one that is read."""
        at_once = self.backend.costs_by_token and self.num_draft_tokens
        return 0 if at_once else LOOKAHEAD

    @property
    def _round(self) -> int:
        """The most tokens that a round writes."""
        return max(2 if self.draft else 1, self.num_draft_tokens + 1)

    @property
    def _wide(self) -> int:
        """The same with padding, which a ring must be able to undo."""
        return self._round + self.backend.pad_single_token

    def _step(self, rows: Sequence[RowNeeds]) -> int:
        return self.backend.prefill_step(self.prefill_step_size, len(rows))

    @property
    def _max_write(self) -> int:
        return max(self.prefill_step_size, self._wide)

    @staticmethod
    def _longest_prompt(rows: Sequence[RowNeeds]) -> int:
        """The most tokens of a prompt that are prefilled: all but the last."""
        return max((r.prompt_tokens - 1 for r in rows), default=0)

    def _longest(self, rows: Sequence[RowNeeds]) -> int:
        """Slots that the longest row is written to, rejected tokens included.

        Its last token is never cached; a round may keep k tokens more than were
        wanted, and rounds in flight write after them.
        """
        context = max((r.context for r in rows), default=0)
        written = (self._ahead + 1) * self._round + self.backend.pad_single_token
        return context - 2 + written if context else 0

    def _max_length(self, rows: Sequence[RowNeeds]) -> int:
        """The bound that the engine gives its caches (DecodeBatch, ModelRunner)."""
        context, prompt = (
            max((r.context for r in rows), default=0),
            self._longest_prompt(rows),
        )
        padded = padded_length(prompt, self._step(rows), self.backend.read_bucket)
        if self.prefix_bytes:  # a chunk can begin after any prefix
            padded = prompt + self._step(rows)
        most = max(context + (LOOKAHEAD + 2) * self._round, padded)
        return round_up(most, self.backend.read_bucket)


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n from 1 to ``limit`` for which ``fits(n)``; 0 if there is none.

    ``fits`` must be true up to some n and false from there on.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
