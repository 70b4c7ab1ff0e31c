"""The peak memory of a run: a pure function of shapes and lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backend import LOOKAHEAD, SCORED_BYTES, BackendDefaults
from ..cache.capacity import CATCH_UP_STEP, chunk_width, padded_length, round_up
from .formulas import logits_bytes
from .geometry import ModelGeometry
from .sampling_memory import GREEDY, Choosing, choosing_bytes

# A search for the largest context ends here, beyond any model's positions.
MAX_CONTEXT = 1 << 22
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


@dataclass(frozen=True)
class RowNeeds:
    """What decides how much memory one request needs.

    Args:
        prompt_tokens: tokens of its prompt.
        max_tokens: the most tokens that it may generate.
        choosing: how its tokens are chosen.
        scored: whether log-probabilities of its prompt are reported.
    """

    prompt_tokens: int
    max_tokens: int
    choosing: Choosing = GREEDY
    scored: bool = False

    @property
    def context(self) -> int:
        """Tokens, prompt and generated."""
        return self.prompt_tokens + self.max_tokens


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
        image_bytes: bytes of the tower that embeds images, and of the embeddings that
            are kept.
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
    image_bytes: int = 0

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
        return self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0)

    def _weights(self) -> dict[str, int]:
        parts = {"target weights": self.target.weight_bytes}
        if self.draft:
            parts["draft weights"] = self.draft.weight_bytes
        return parts

    def _loading(self) -> Moment:
        most = self.target.loading_bytes
        if self.draft:
            most = max(most, self.target.weight_bytes + self.draft.loading_bytes)
        more = max(0, most - self.weight_bytes)
        return Moment("loading", {**self._weights(), "loading": more})

    def _prefill(self, rows: Sequence[RowNeeds]) -> Moment:
        """The last chunk of the longest prompt."""
        prompt = max((r.prompt_tokens - 1 for r in rows), default=0)
        width = chunk_width(prompt, self._step(rows), self.backend.read_bucket)
        parts, layers = self._weights(), None
        if self.backend.prefills_by_layers:
            layers = 1 + self.backend.layers_ahead(len(rows) * width)
        for name, model in self._models():
            self._add(parts, name, model, rows, prompt, width, self._max_write, layers)
        parts["activations"] += self._features(len(rows), width)
        if scored := sum(r.scored for r in rows):
            # In float32, a slice's logits, and what Logprobs.of makes of them.
            chunk = logits_bytes(scored, width - 1, self.target.vocab_size, 4)
            parts["logits"] = SCORE_COPIES * min(chunk, SCORED_SLICES * SCORED_BYTES)
        return Moment("prefill", self._with_others(parts))

    def _decoding(self, rows: Sequence[RowNeeds]) -> Moment:
        """A round in which every row is as long as it can become."""
        length, k = self._longest(rows), self.num_draft_tokens
        parts, inputs = self._weights(), 0
        for name, model in self._models():
            held, width, writes = length, self._wide, self._wide
            # A draft catches up in pieces; with static shapes the last piece is padded.
            if name == "draft" and self.pauses:
                held += CATCH_UP_STEP if self.backend.static_shapes else 0
                width = max(width, min(CATCH_UP_STEP, held))
                writes = width + self.backend.pad_single_token
            self._add(parts, name, model, rows, held, width, writes)
            if k:
                inputs += model.held_bytes(len(rows), width)
        # Rows that leave and rows that join in one step copy a layer twice more.
        parts["growth and joins"] *= 3 if len(rows) > 1 else 1
        parts["activations"] += self._features(len(rows), self._wide)
        heads = [(self.target, max(k, self.backend.pad_single_token))]
        if self.draft:
            # A draft model's first forward of a round takes two tokens.
            heads.append((self.draft, k if self.draft.proposes_blocks else 1))
        choosing = [r.choosing for r in rows]
        parts["logits"] = sum(
            logits_bytes(len(rows), n, m.vocab_size, m.elem_bytes) for m, n in heads
        ) + max(choosing_bytes(choosing, n, m.vocab_size) for m, n in heads)
        if inputs:
            parts["rollback inputs"] = inputs
        if ahead := self._ahead:
            parts["rounds in flight"] = ahead * (parts["activations"] + parts["logits"])
        return Moment("decoding", self._with_others(parts))

    def _features(self, rows: int, tokens: int) -> int:
        """Bytes of the target's hidden states that the draft reads after a forward."""
        return rows * tokens * self.draft.feature_bytes if self.draft else 0

    def _add(
        self,
        parts: dict[str, int],
        name: str,
        model: ModelGeometry,
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
        limit, n = self._max_length(rows), len(rows)
        kept = self._layers(model, n, limit, length, max_write)
        parts[f"{name} KV cache"] = sum(kept)
        # Caches grow one layer at a time, while its old arrays are still held. Rings
        # then have the size that prefill gave them.
        if max_write != self._max_write:
            kept = self._layers(model, n, limit, length, self._max_write)
        layer = max(kept, default=0)
        columns = model.columns(
            length, max_write=max_write, read_bucket=self.backend.read_bucket
        )
        forward = model.workspace_bytes(n, width, columns, layers)
        for part, size in ("growth and joins", layer), ("activations", forward):
            parts[part] = max(parts.get(part, 0), size)

    def _calibration(self, num_rows: int) -> Moment:
        """Measuring costs before the first round, at ``num_rows`` rows."""
        # One row is measured where time grows with tokens. Two runs overlap.
        num_rows = 1 if self.backend.costs_by_token else num_rows
        ahead = replace(self, backend=replace(self.backend, costs_by_token=False))
        rows = [RowNeeds(1, CATCH_UP_STEP + 4 * self._round)] * num_rows
        return replace(ahead._decoding(rows), name="measuring")

    def _with_others(self, parts: dict[str, int]) -> dict[str, int]:
        others = {
            "n-gram lookup": self.lookup_bytes,
            "prefix cache": self.prefix_bytes,
            "images": self.image_bytes,
        }
        return parts | {name: size for name, size in others.items() if size}

    # -- the engine's own sizes ----------------------------------------------

    def _models(self) -> list[tuple[str, ModelGeometry]]:
        models = [("target", self.target)]
        return [*models, ("draft", self.draft)] if self.draft else models

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
        context = max((r.context for r in rows), default=0)
        prompt = max((r.prompt_tokens - 1 for r in rows), default=0)
        padded = padded_length(prompt, self._step(rows), self.backend.read_bucket)
        if self.prefix_bytes:  # a chunk can begin after any prefix
            padded = prompt + self._step(rows)
        most = max(context + (LOOKAHEAD + 2) * self._round, padded)
        return round_up(most, self.backend.read_bucket)

    def _layers(
        self,
        model: ModelGeometry,
        num_rows: int,
        limit: int,
        length: int,
        max_write: int,
    ) -> list[int]:
        """Bytes of each cache once the longest row has ``length`` tokens."""

        def sizes(n: int, *, dense: bool) -> list[int]:
            return model.layer_bytes(
                num_rows,
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


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n from 1 to ``limit`` for which ``fits(n)``; 0 if there is none.

    ``fits`` must be true up to some n and false from there on.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
