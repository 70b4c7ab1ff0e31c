"""Rows that decode in lockstep, and the round that they go through together.

    propose -> verify -> accept -> trim -> commit -> read

What decides the next round's inputs (kept counts, last tokens, offsets) stays
on the device; the host reads a round's tokens while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from .backend import BackendDefaults
from .drafters import Drafter, DraftRows, Round
from .models.runner import ModelRunner
from .sampling import RowSampling, choose
from .sequence import Sequence
from .verification import count_kept, next_tail


@dataclass(frozen=True)
class RowOutput:
    """The tokens that a row emitted in one step; ``ended`` by the last of them."""

    sequence: Sequence
    token_ids: list[int]
    ended: bool

    @classmethod
    def of(cls, sequence: Sequence, token_ids: list[int]) -> RowOutput:
        """What ``sequence`` has just committed."""
        return cls(sequence, token_ids, sequence.finish_reason is not None)


@dataclass(frozen=True)
class InFlight:
    """A round that was handed to the device and not read yet.

    ``packed`` has shape (B, k + 2): how many tokens each row keeps, and the k + 1
    that the target chose.
    """

    rows: tuple[Sequence, ...]
    num_draft_tokens: int
    packed: mx.array

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.rows))

    def has(self, sequence: Sequence) -> bool:
        """Whether the row takes part."""
        return id(sequence) in self._ids


class RowBatch:
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of its next verification.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly.
        sequences: the rows, one or more, none of them begun.
        num_draft_tokens: k, how many tokens are proposed in a round.
        backend: how to shape rounds.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        sequences: AbstractSequence[Sequence],
        num_draft_tokens: int,
        backend: BackendDefaults,
    ):
        self.rows = tuple(sequences)
        self.num_draft_tokens = num_draft_tokens if drafter else 0
        self._repeat_shapes = backend.repeat_shapes
        # A round that turns out to be of no use is dear where tokens, not
        # launches, cost time: then speculative rounds are read at once.
        patient = backend.repeat_shapes or not self.num_draft_tokens
        self._lookahead = backend.lookahead if patient else 0
        prompts = [s.request.prompt_tokens for s in self.rows]
        max_length = self._max_length()
        # The last token is fed alone: no chunk then computes logits it drops.
        self._target = target.rows(
            [p[:-1] for p in prompts],
            max_round=self.num_draft_tokens + 1,
            max_length=max_length,
        )
        self._draft: DraftRows | None = None
        if drafter is not None:
            self._draft = drafter.rows(prompts, max_length=max_length)
        self._vocab_size = target.vocab_size
        self._note_rows()
        self._tail = mx.array([p[-1:] for p in prompts], mx.int32)
        # Tokens in the target's cache per row, as far as the host has read.
        self._cached = [len(p) for p in prompts]
        self._in_flight: deque[InFlight] = deque()

    def _max_length(self) -> int:
        """Tokens that the longest row can ever hold, rejected ones included."""
        requests = [s.request for s in self.rows]
        longest = max(len(r.prompt_tokens) + r.params.max_tokens for r in requests)
        # A row that has ended may be past its end by the rounds that the host had
        # not read; while it stays, every round writes behind it, then trims.
        return longest + (self._lookahead + 2) * (self.num_draft_tokens + 1)

    @property
    def unfinished(self) -> list[Sequence]:
        """Rows that are still being decoded."""
        return [s for s in self.rows if s.finish_reason is None]

    # -- prefill -----------------------------------------------------------

    def prefill(self) -> Iterator[list[RowOutput]]:
        """Run the prompts, yielding behind each chunk; last, the first tokens."""
        for _ in self._target.prefill():
            yield []
        noise = self._sampling.noise(self._target.offset + 1, 1, self._vocab_size)
        logits = self._target.forward(self._tail)
        first = choose(logits, self._sampling, noise)
        self._tail = mx.concatenate([self._tail, first], axis=1)
        mx.async_eval(self._tail, self._target.offset)
        if self._draft is not None:
            for _ in self._draft.prefill():
                yield []
        tokens: list[list[int]] = first.tolist()  # type: ignore[assignment]
        outputs = [
            RowOutput.of(s, s.commit(t)) for s, t in zip(self.rows, tokens, strict=True)
        ]
        self._retire()
        self._note_lengths()
        yield outputs

    # -- rounds ------------------------------------------------------------

    def step(self) -> list[RowOutput]:
        """Hand a round to the device, if one is of use; read the one before it.

        Returns nothing while the first rounds are on their way.
        """
        if self._worth_a_round():
            self._in_flight.append(self._dispatch(self._choose_k()))
            if len(self._in_flight) <= self._lookahead:
                return []
        return self._read(self._in_flight.popleft()) if self._in_flight else []

    def _worth_a_round(self) -> bool:
        """Whether a row can need more than the rounds in flight surely bring."""
        return any(s.remaining > self._pending(s) for s in self.unfinished)

    def _pending(self, sequence: Sequence) -> int:
        """Rounds in flight that the row takes part in: each brings a token or more."""
        return sum(f.has(sequence) for f in self._in_flight)

    def _choose_k(self) -> int:
        if self._repeat_shapes:
            return self.num_draft_tokens
        # Nothing behind the last token that any row may emit is of use.
        remaining = max(s.remaining - self._pending(s) for s in self.unfinished)
        return min(self.num_draft_tokens, remaining - 1)

    def _dispatch(self, k: int) -> InFlight:
        """Build one round and hand it to the device; nothing here waits for it."""
        # 1. propose
        first = self._target.offset + 1
        noise = self._sampling.noise(first, k + 1, self._vocab_size)
        round_ = Round(k, self._tail, self._active, self._sampling, noise)
        inputs = self._tail[:, 1:]
        if k and self._draft is not None:
            inputs = mx.concatenate([inputs, self._draft.propose(round_)], axis=1)
        # 2. verify: the target chooses for each proposal and one behind the last
        chosen = choose(self._target.forward(inputs), self._sampling, noise)
        # 3. accept; a plain round keeps one token of every running row
        plain = k == 0
        kept = self._one if plain else count_kept(inputs[:, 1:], chosen, self._active)
        # 4. trim, unless all rows keep all that was written
        if not plain or len(self.unfinished) < len(self.rows):
            self._target.trim_per_sequence(k + 1 - kept, k + 1)
        # 5. commit
        if self._draft is not None:
            self._draft.commit(round_, chosen, kept)
        if plain:  # the tail of a row that has ended is never read
            self._tail = mx.concatenate([inputs, chosen], axis=1)
        else:
            self._tail = next_tail(self._tail, chosen, kept)
        packed = mx.concatenate([kept[:, None], chosen], axis=1)
        mx.async_eval(packed, self._tail, self._target.offset)
        return InFlight(self.rows, k, packed)

    def _read(self, in_flight: InFlight) -> list[RowOutput]:
        """Wait for a round; append its tokens to the rows and retire those that end."""
        outputs = []
        cached = dict(zip(map(id, self.rows), self._cached, strict=True))
        packed: list[list[int]] = in_flight.packed.tolist()  # type: ignore[assignment]
        for sequence, (kept, *chosen) in zip(in_flight.rows, packed, strict=True):
            if id(sequence) in cached:
                cached[id(sequence)] += kept
            if sequence.finish_reason is None:
                k = in_flight.num_draft_tokens
                tokens = sequence.commit_round(chosen[:kept], k)
                outputs.append(RowOutput.of(sequence, tokens))
        self._cached = [cached[id(s)] for s in self.rows]
        self._retire()
        self._note_lengths()
        return outputs

    def _note_lengths(self) -> None:
        """Rows are as long as was read, plus what the rounds in flight may add."""
        if not self.rows:
            return
        longest, shortest = [], []
        for sequence, cached in zip(self.rows, self._cached, strict=True):
            widths = [
                f.num_draft_tokens + 1 for f in self._in_flight if f.has(sequence)
            ]
            # Every round adds a token to a running row, none to one that has ended.
            least = len(widths) if sequence.finish_reason is None else 0
            longest.append(cached + sum(widths))
            shortest.append(cached + least)
        self._target.note_lengths(max(longest), min(shortest))
        if self._draft is not None:
            self._draft.note_lengths(max(longest) + 1, min(shortest) + 1)

    # -- rows --------------------------------------------------------------

    def extend(self, other: RowBatch) -> None:
        """Append the rows of ``other``, which has been prefilled and not stepped.

        Rows that have ended are dropped; one of each batch must be running.
        """
        self._keep_running()
        other._keep_running()
        self._target.extend(other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.extend(other._draft)
        self.rows += other.rows
        self._cached += other._cached
        self._note_rows()
        self._tail = mx.concatenate([self._tail, other._tail])
        self._note_lengths()

    def _note_rows(self) -> None:
        """Tell the device which rows there are, how they sample, which are running."""
        running = [s.finish_reason is None for s in self.rows]
        self._active = mx.array(running, mx.bool_)
        # What a plain round keeps.
        self._one = mx.array(running, mx.int32)
        self._sampling = RowSampling.of([s.request.params for s in self.rows])

    def _retire(self) -> None:
        """Stop decoding rows that have ended; drop them where that saves work."""
        running = len(self.unfinished)
        if running == len(self.rows):
            return
        # A new batch size is a new shape: where those are dear, wait for half.
        if not self._repeat_shapes or 2 * running <= len(self.rows):
            self._keep_running()
        else:
            self._note_rows()

    def _keep_running(self) -> None:
        """Drop the rows that have ended."""
        rows = [i for i, s in enumerate(self.rows) if s.finish_reason is None]
        if len(rows) == len(self.rows):
            return
        self.rows = tuple(self.rows[i] for i in rows)
        self._cached = [self._cached[i] for i in rows]
        self._note_rows()
        if not rows:
            return
        index = mx.array(rows, mx.int32)
        self._tail = self._tail[index]
        self._target.filter(rows)
        if self._draft is not None:
            self._draft.filter(rows)
