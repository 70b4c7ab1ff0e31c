"""One decode round, and the rows that go through it together.

    prefill (chunked) -> propose -> verify -> accept -> trim -> commit -> finish

What decides the next round's inputs (kept counts, last tokens, offsets) stays
on the device; the host reads a round's tokens while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import mlx.core as mx

from .backend import BackendDefaults
from .config import EngineConfig
from .drafters import Drafter, Round
from .models.runner import ModelRunner
from .sampling import RowSampling, choose
from .sequence import Sequence
from .verification import count_kept, next_tail


@dataclass(frozen=True)
class RowOutput:
    """The tokens that a row emitted in one step."""

    sequence: Sequence
    token_ids: list[int]


@dataclass(frozen=True)
class InFlight:
    """A round that was handed to the device and not read yet.

    ``packed`` has shape (B, k + 2): how many tokens each row keeps, and the k + 1
    that the target chose.
    """

    rows: tuple[Sequence, ...]
    num_draft_tokens: int
    packed: mx.array


class RowBatch:
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of its next verification.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly.
        sequences: the rows, none of them begun.
        config: how many draft tokens.
        backend: how to shape rounds.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        sequences: AbstractSequence[Sequence],
        config: EngineConfig,
        backend: BackendDefaults,
    ):
        self.target = target
        self.drafter = drafter
        self.rows = tuple(sequences)
        self.backend = backend
        self.num_draft_tokens = config.num_draft_tokens if drafter else 0
        self._sampling = RowSampling.of([s.request.params for s in self.rows])
        self._active = mx.ones((len(self.rows),), mx.bool_)
        # Cached tokens per row, as far as the host has read.
        self._cached = [len(s.request.prompt_tokens) for s in self.rows]
        self._in_flight: deque[InFlight] = deque()
        self._tail: mx.array

    def max_length(self) -> int:
        """Slots that the longest row can ever need, padding included."""
        width = self.num_draft_tokens + 1
        requests = [s.request for s in self.rows]
        decode = max(len(r.prompt_tokens) + r.params.max_tokens for r in requests)
        longest = max(len(r.prompt_tokens) for r in requests)
        prefill = self.target.prefill_slots(longest)
        # Rounds the host has not read may have gone past a row's end.
        return max(prefill, decode + (self.backend.lookahead + 1) * width)

    def prefill(self) -> list[RowOutput]:
        """Run the prompts; every row's first token comes from here."""
        prompts = [s.request.prompt_tokens for s in self.rows]
        max_length = self.max_length()
        self.target.start(
            len(prompts), max_round=self.num_draft_tokens + 1, max_length=max_length
        )
        # The last token is fed alone: no chunk then computes logits it drops.
        self.target.prefill([p[:-1] for p in prompts])
        self.target.end_prefill()
        last = mx.array([p[-1:] for p in prompts])
        vocab_size = self.target.vocab_size
        noise = self._sampling.noise(self.target.offset + 1, 1, vocab_size)
        first = choose(self.target.forward(last), self._sampling, noise)
        self._tail = mx.concatenate([last.astype(mx.int32), first], axis=1)
        mx.async_eval(self._tail, self.target.offset)
        if self.drafter is not None:
            self.drafter.start(len(prompts), max_length)
            self.drafter.prefill(prompts)
        tokens: list[list[int]] = first.tolist()  # type: ignore[assignment]
        outputs = [
            RowOutput(s, s.commit(t)) for s, t in zip(self.rows, tokens, strict=True)
        ]
        self._retire()
        return outputs

    def run(self) -> Iterator[list[RowOutput]]:
        """Rounds until every row has ended; yields what each emitted."""
        while True:
            if self._worth_a_round():
                self._in_flight.append(self._dispatch(self._choose_k()))
                if len(self._in_flight) <= self.backend.lookahead:
                    continue
            if not self._in_flight:
                return
            yield self._read(self._in_flight.popleft())

    def _unfinished(self) -> list[Sequence]:
        return [s for s in self.rows if s.finish_reason is None]

    def _worth_a_round(self) -> bool:
        """Whether a row can need more than the rounds in flight surely bring."""
        pending = len(self._in_flight)
        return any(s.remaining > pending for s in self._unfinished())

    def _choose_k(self) -> int:
        if self.backend.repeat_shapes:
            return self.num_draft_tokens
        # Nothing behind the last token that any row may emit is of use.
        remaining = max(s.remaining for s in self._unfinished())
        return min(self.num_draft_tokens, remaining - len(self._in_flight) - 1)

    def _dispatch(self, k: int) -> InFlight:
        """Build one round and hand it to the device; nothing here waits for it."""
        # 1. propose
        first = self.target.offset + 1
        noise = self._sampling.noise(first, k + 1, self.target.vocab_size)
        round_ = Round(k, self._tail, self._active, self._sampling, noise)
        inputs = self._tail[:, 1:]
        if k and self.drafter is not None:
            inputs = mx.concatenate([inputs, self.drafter.propose(round_)], axis=1)
        # 2. verify: the target chooses for each proposal and one behind the last
        chosen = choose(self.target.forward(inputs), self._sampling, noise)
        # 3. accept
        kept = count_kept(inputs[:, 1:], chosen, self._active)
        # 4. trim; a plain round of running rows keeps all it wrote
        if k or not all(s.finish_reason is None for s in self.rows):
            self.target.trim_per_sequence(k + 1 - kept, k + 1)
        # 5. commit
        if self.drafter is not None:
            self.drafter.commit(round_, chosen, kept)
        self._tail = next_tail(self._tail, chosen, kept)
        packed = mx.concatenate([kept[:, None], chosen], axis=1)
        mx.async_eval(packed, self._tail, self.target.offset)
        return InFlight(self.rows, k, packed)

    def _read(self, in_flight: InFlight) -> list[RowOutput]:
        """Wait for a round; append its tokens to the rows and retire those that end."""
        outputs = []
        lengths = dict(zip(map(id, self.rows), self._cached, strict=True))
        packed: list[list[int]] = in_flight.packed.tolist()  # type: ignore[assignment]
        for sequence, (kept, *chosen) in zip(in_flight.rows, packed, strict=True):
            if id(sequence) in lengths:
                lengths[id(sequence)] += kept
            tokens = sequence.commit_round(chosen[:kept], in_flight.num_draft_tokens)
            outputs.append(RowOutput(sequence, tokens))
        self._cached = [lengths[id(s)] for s in self.rows]
        self._retire()
        self._note_lengths()
        return outputs

    def _note_lengths(self) -> None:
        """Rows are as long as was read, plus what the rounds in flight may add."""
        if not self.rows:
            return
        ahead = sum(f.num_draft_tokens + 1 for f in self._in_flight)
        longest = max(self._cached) + ahead
        shortest = min(self._cached) if not self._in_flight else 0
        self.target.note_lengths(longest, shortest)
        if self.drafter is not None:
            self.drafter.note_lengths(longest + 1, shortest + 1 if shortest else 0)

    def _retire(self) -> None:
        """Stop decoding rows that have ended; drop them where that saves work."""
        running = [i for i, s in enumerate(self.rows) if s.finish_reason is None]
        if len(running) == len(self.rows):
            return
        # A new batch size is a new shape: where those are dear, wait for half.
        if not self.backend.repeat_shapes or 2 * len(running) <= len(self.rows):
            self._keep(running)
        self._active = mx.array([s.finish_reason is None for s in self.rows], mx.bool_)

    def _keep(self, rows: list[int]) -> None:
        self.rows = tuple(self.rows[i] for i in rows)
        self._cached = [self._cached[i] for i in rows]
        if not rows:
            return
        index = mx.array(rows, mx.int32)
        self._tail = self._tail[index]
        self._sampling = self._sampling.take(index)
        self.target.filter(rows)
        if self.drafter is not None:
            self.drafter.filter(rows)
