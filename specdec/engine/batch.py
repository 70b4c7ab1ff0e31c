"""Rows that come and go: slots, prefill, joins, resizing.

A batch has a fixed number of slots. A row that ends leaves its slot idle. A row that
joins is written into an idle slot; no other row is copied, and no shape changes.
:mod:`specdec.engine.round` takes its rows through rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..models.runner import EndedRow, ModelRunner
from ..request import Request
from ..spec_decode import Drafter, DraftRows
from ..spec_decode.commit import Committed
from ..spec_decode.prompt_scores import PromptScores
from ..spec_decode.verifier import Verifier
from .round import BatchRound, DraftChoice, RoundObserver, Rounds

NO_TOKENS: tuple[int, ...] = ()


class DecodeBatch(Rounds):
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of the next verification. The cache of an idle slot
    is empty.

    Args:
        target: runs the target model.
        drafter: proposes tokens; ``None`` decodes plainly.
        rows: the first rows, one or more; none has tokens yet.
        choice: chooses k, the number of tokens that a round proposes.
        backend: how to shape rounds.
        observer: sees every round, if there is one.
        in_flight: rounds that were dispatched and not read yet. Batches that join each
            other share this queue.
        num_slots: as many as ``rows`` or more.

    Attributes:
        slots: the request in each slot; ``None`` where the slot is idle.
        expected: requests that will take the places of rows that end.
        alone: whether no other batch decodes meanwhile. Then the first tokens are read
            before the drafter's prefill.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        rows: Sequence[Request],
        choice: DraftChoice,
        backend: BackendDefaults,
        observer: RoundObserver | None,
        in_flight: deque[BatchRound],
        num_slots: int,
    ):
        self.slots: list[Request | None] = [*rows, *[None] * (num_slots - len(rows))]
        self.expected = 0
        self.alone = True
        super().__init__(drafter, choice, backend, observer, in_flight)
        prompts = [s.prompt_tokens if s else NO_TOKENS for s in self.slots]
        # A prompt's last token is fed alone, so that no chunk computes logits in vain.
        self._target = target.rows(
            [p[:-1] for p in prompts],
            max_round=self.most + 1,
            max_length=self._max_length(),
            last=[p[-1] if p else 0 for p in prompts],
            single_stays=True,
            images=[s.images if s else () for s in self.slots],
        )
        if self._is_separate:
            self._target.separate(*self._sharing)
        self._drafter = drafter
        self._draft: DraftRows | None = None
        if self._wants_draft():
            self._draft = self._begin_draft()
            self._target.beside = self._draft.context
        self._note_rows()
        # On the device, after all rounds that were dispatched.
        self._committed = Committed.of(prompts, self._rules.sampling.context_size)

    def _max_length(self) -> int:
        """The most tokens that a row can ever hold, rejected ones included."""
        longest = max(s.max_length for s in self.slots if s)
        # Rounds in flight may have taken a row past its end.
        return longest + (LOOKAHEAD + 2) * (self.most + 1)

    def _is_drafted(self, request: Request) -> bool:
        """Whether a row is drafted for when it begins."""
        return self.most_for(request, len(request.prompt_tokens)) > 0

    def _is_shown(self, request: Request) -> bool:
        """Whether the drafter reads a row's prompt.

        A prefix is stored with a head's context: without it, nothing would be stored.
        """
        fits = len(request.prompt_tokens) <= self._longest
        return self._is_drafted(request) or (self._has_context_stored and fits)

    @property
    def _has_context_stored(self) -> bool:
        """Whether prefixes are stored with the context of a draft head."""
        runner = self._target.runner
        return runner.beside is not None and runner.prefixes is not None

    def _wants_draft(self) -> bool:
        """Whether the drafter needs to know the rows.

        The context of a draft head is needed to find prefixes, which have it beside.
        """
        return self._drafter is not None and (
            self._has_context_stored
            or any(s is not None and self._is_drafted(s) for s in self.slots)
        )

    def _begin_draft(self) -> DraftRows:
        """The drafter's rows; a row that it is not shown has only its last token."""
        assert self._drafter is not None
        texts = []
        for s in self.slots:
            prompt = NO_TOKENS if s is None else s.prompt_tokens
            texts.append(prompt[0 if s and self._is_shown(s) else -1 :] or (0,))
        most = self._max_length()
        if self._target.runner.recorder is not None:
            # The drafter is shown chunks of all rows, and gets the stored prefix of
            # each.
            most = self._target.max_length
        rows = self._drafter.rows(texts, max_length=most)
        if self._is_separate:
            rows.separate(*self._sharing)
        return rows

    @property
    def _sharing(self) -> tuple[list[str | None], list[str | None]]:
        """The salt of each slot, and the client whose answers it may reuse."""
        params = [None if s is None else s.params for s in self.slots]
        salts = [None if p is None else p.cache_salt for p in params]
        return salts, [None if p is None else p.draft_corpus for p in params]

    @property
    def _is_separate(self) -> bool:
        return any(any(names) for names in self._sharing)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens prefilled so far: computed, or found in the prefix store."""
        return sum(self._target.done)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's caches and of the drafter's state."""
        draft = 0 if self._draft is None else self._draft.nbytes
        return self._target.nbytes + draft

    # -- prefill -----------------------------------------------------------

    def prefill(self) -> Iterator[None]:
        """Hand the prompts to the device, yielding between chunks.

        First come the target's chunks, then the step that gives every row its first
        token (added to the rounds in flight), then the drafter's chunks.
        """
        scores = self._scores()
        shown = any(s is not None and self._is_shown(s) for s in self.slots)
        self._target.records = shown
        for more in self._target.prefill(scores):
            self._observe(self._following(), self._target.written)
            if more:
                yield
        for i, (request, reused) in enumerate(
            zip(self.slots, self._target.reused, strict=True)
        ):
            if request is not None:
                request.prefix_tokens = reused
                if scores is not None and i in scores.rows:
                    request.prompt_logprobs = scores.of(i)
        running = [s is not None and s.finish_reason is None for s in self.slots]
        first = BatchRound(0, tuple([r - 1 for r in running]), first=True)
        self.dispatch(first)
        self._observe(first.decision.chosen, [1] * len(self.slots))
        self._target.records = self._serves
        if self._draft is not None:
            if not shown:
                self._observe_padding()
            if self.alone:
                yield
            yield from self._draft.prefill()

    def _scores(self) -> PromptScores | None:
        """What scores the prompts of the rows that asked for it."""
        tops = [s.params.prompt_logprobs if s else None for s in self.slots]
        if all(top is None for top in tops):
            return None
        prompts = [s.prompt_tokens if s else NO_TOKENS for s in self.slots]
        return PromptScores(self._target.runner, prompts, tops)

    def _following(self) -> mx.array:
        """The token after each of the prompts' last chunk, (B, S), if one is read."""
        target, drafter = self._target, self._drafter
        reads = self._draft is not None and drafter and drafter.reads_following
        if target.hidden is None or not reads:
            return self._committed.recent[:, -1:]
        width, tokens = target.hidden.shape[1], []
        for s, n, end in zip(self.slots, target.written, target.done, strict=True):
            after = NO_TOKENS if s is None else s.prompt_tokens[end - n + 1 : end + 1]
            tokens.append([*after[:n], *[0] * (width - n)])
        return mx.array(tokens, mx.int32)

    def _observe(self, following: mx.array, lengths: Sequence[int]) -> None:
        """Show the drafter the hidden states that it asked for, of rows that it reads.

        Args:
            lengths: tokens of each row.
        """
        if self._target.hidden is not None and self._draft is not None:
            shown = [
                n if s and self._is_shown(s) else 0
                for s, n in zip(self.slots, lengths, strict=True)
            ]
            if any(shown):
                self._draft.observe(self._target.hidden, following, shown)

    def _observe_padding(self) -> None:
        """Give a head whose rows are not drafted for caches that can be joined."""
        recorder, num_rows = self._target.runner.recorder, len(self.slots)
        if recorder is not None and self._draft is not None:
            following = mx.zeros((num_rows, 1), mx.int32)
            hidden = recorder.of_padding(num_rows)
            self._draft.observe(hidden, following, [0] * num_rows)

    # -- rows --------------------------------------------------------------

    def _note_lengths(self) -> None:
        """Tell the caches how long their rows are, as far as the host knows."""
        bounds = [(0, 1, 1)] * (None in self.slots)  # an idle slot
        bounds += map(self._bounds, filter(None, self.slots))
        _, shortest, longest = zip(*bounds, strict=True)
        least, most = min(shortest), max(longest)
        # The target's cache lacks the newest token.
        self._target.note_lengths(most - 1, least - 1)
        if self._draft is not None:
            # It may have less of a row that is not drafted for.
            self._draft.note_lengths(most, least if self._all_drafted else 0)

    def _note_rows(self) -> None:
        """Update the fields that depend on the rows."""
        running = [s is not None and s.finish_reason is None for s in self.slots]
        self._active = mx.array(running, mx.bool_)
        # Whether a row is drafted for: else the drafter need not follow them.
        self._serves = any(s is not None and self._is_drafted(s) for s in self.slots)
        self._target.records = self._serves
        self._rests = -1, False
        self._all_drafted = all(s and self._is_drafted(s) for s in self.slots)
        self._rules = Verifier.of(self.slots, self._target.runner.vocab_size)
        self._spoiled.mark(self.slots)

    def retire(self) -> bool:
        """Remove rows that have ended; return whether any is left.

        Their slots stay idle if other requests wait for them. Otherwise the batch
        shrinks, where fewer slots are faster.
        """
        ended, running, size = [], 0, len(self.slots)
        for i, s in enumerate(self.slots):
            running += s is not None and s.finish_reason is None
            if s is not None and s.finish_reason is not None:
                ended.append(i)
        if ended:
            self._store(ended)
            for i in ended:
                self._remember(self.slots[i])
                self.slots[i] = None
        if not running:
            return False
        if ended and not self._wants_draft():
            self._draft = None
        if running < size:
            wanted = min(size, running + self.expected)
            size = self._backend.rows_to_keep(size, wanted)
        if size < len(self.slots):
            self._resize(size)
        elif ended:
            self._target.reset(ended)
            if self._draft is not None:
                self._draft.reset(ended)
            self._note_rows()
        self._note_lengths()
        return True

    def stop_drafting(self) -> None:
        """Draft no more for the rows that are here; those that join later may be."""
        for s in self.slots:
            if s is not None:
                s.drafts = False
        self._note_rows()
        if not self._wants_draft():
            self._draft = None

    def _store(self, ended: Sequence[int]) -> None:
        """Keep the columns of rows that have ended, in the prefix store."""
        rows, draft = [], self._draft
        if self._target.runner.prefixes is None:
            return
        for slot in ended:
            s = self.slots[slot]
            if s is None or s.finish_reason == "error":
                continue
            if self._target.beside is not None and not self._is_drafted(s):
                continue  # the drafter has not followed it
            rounds = [f.num_draft_tokens for f in self._in_flight if s in f.rows]
            last, begin = s.prompt_tokens[-1], len(s.prompt_tokens) - 1
            shown = [last, *s.tokens, *([] if s.stop_token is None else [s.stop_token])]
            tokens = [last, *s.tokens, *s.unshown]
            excess = max(0, len(tokens) - 1 - len(shown))
            # Only tokens of the last round can be taken back, and not all of them.
            excess *= not rounds and excess < s.newest
            rows.append(EndedRow(slot, begin, tokens, excess, rounds))
        if self._target.beside is None or (draft is not None and draft.context):
            self._target.store(rows)
        if draft is not None:
            draft.store([r for r in rows if (s := self.slots[r.slot]) and s.drafts])

    def _remember(self, request: Request | None) -> None:
        """Show the drafter a finished answer."""
        if self._drafter is not None and request is not None and request.answered:
            client = request.drafted_as
            if client is not None:
                self._drafter.remember(request.tokens, client)

    def join(self, other: DecodeBatch, num_slots: int) -> None:
        """Take over the running rows of ``other``, in idle slots or in new ones.

        Idle slots of ``other`` after its rows are left out. Removing them would wait
        for the device: for the rounds in flight, and for the whole prefill.

        Args:
            other: a batch that was prefilled and has dispatched no round.
            num_slots: slots to have afterwards, if there are too few now.
        """
        rows = [i for i, s in enumerate(other.slots) if s and s.finish_reason is None]
        free = [i for i, s in enumerate(self.slots) if s is None]
        if (self._draft is None) != (other._draft is None):
            plain = self if self._draft is None else other
            plain._draft = plain._begin_draft()
            plain._observe_padding()
            for _ in plain._draft.prefill():  # last tokens only, so there is little
                pass
            self._idle = 0  # rows have joined that are drafted for
        if rows[-1] >= len(free) >= len(rows):  # rows that ended take no slots then
            other._resize(len(rows))
            rows = list(range(len(rows)))
        if len(free) > rows[-1]:
            self._place(free[: rows[-1] + 1], other)
        else:
            self.compact()
            if (size := max(len(rows), num_slots - len(self.slots))) < len(other.slots):
                other._resize(size)
            self._extend(other)
            if len(self.slots) < num_slots and self._backend.static_shapes:
                self._resize(num_slots)
        self._note_rows()
        self._note_lengths()

    def _place(self, slots: Sequence[int], other: DecodeBatch) -> None:
        """Put the first rows of ``other`` into idle slots; no other row is touched."""
        self._target.place(slots, other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.place(slots, other._draft, len(self.slots))
        self._committed = self._committed.placed(slots, other._committed)
        for i, slot in enumerate(slots):
            self.slots[slot] = other.slots[i]

    def _extend(self, other: DecodeBatch) -> None:
        """Append the slots of ``other``; this copies all rows."""
        self._target.extend(other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.extend(other._draft)
        self._committed = self._committed.joined(other._committed)
        self.slots += other.slots

    def compact(self) -> None:
        """Drop all idle slots, to free their memory."""
        if len(running := self.unfinished) < len(self.slots):
            self._resize(len(running))

    def widen(self, num_slots: int) -> None:
        """Have at least ``num_slots`` slots."""
        if num_slots > len(self.slots):
            self._resize(num_slots)
            self._note_lengths()

    def _resize(self, size: int) -> None:
        """Have ``size`` slots, at least as many as running rows; this copies all."""
        runs = [s is not None and s.finish_reason is None for s in self.slots]
        running = [i for i, r in enumerate(runs) if r]
        idle = [i for i, r in enumerate(runs) if not r]
        rows = sorted(running + idle[: max(0, size - len(running))])
        self.slots = [self.slots[i] if runs[i] else None for i in rows]
        # A new slot is a copy of slot 0, which is then reset.
        added = size - len(rows)
        rows += [0] * added
        self.slots += [None] * added
        self._note_rows()
        self._committed = self._committed.only(rows)
        empty = [i for i, s in enumerate(self.slots) if s is None]
        for part in (self._target, self._draft):
            if part is not None:
                part.filter(rows)
                part.reset(empty)
