"""Draft heads as drafters: all kinds in one mechanism.

A row's context has one entry for each of its committed tokens but the last, in caches
like a model's. Entries are written from the target's hidden states, of the prompt or of
a round, and taken back for tokens that the round rejects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..cache import put_rows
from ..models.draft_heads import BlockHead, DraftHead
from ..models.draft_heads.layers import HeadAttention
from ..models.runner import ModelRows, ModelRunner
from .commit import Accepted
from .drafter import Drafter, DraftRows, Proposals, Round
from .guard import ours

# The least share of frequent tokens in the prompt of a row that is proposed only such.
_MOSTLY = 0.95


class HeadDrafter(Drafter):
    """Proposes with a draft head.

    Args:
        runner: the head.
        vocab_size: the target's number of logits.
        max_draft_tokens: largest k of any round.
        context_length: positions that the head was made for, if known.
        special: tokens that chat templates add, which say nothing of a row's language.

    Attributes:
        hidden_layers: layers of the target that the head reads.
        context: runs the head; ``None`` for one without caches.
        max_proposals: tokens of a block; ``None`` for a head that proposes in steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        context_length: int | None = None,
        special: Collection[int] = (),
    ):
        self.runner = runner = runner.with_tails()
        self._special = frozenset(special)
        self.vocab_size = vocab_size
        self.context_length = context_length
        head: Any = runner.model
        self.head: DraftHead = head
        self.hidden_layers = self.head.args.target_layers
        self.reads_prompts = self.head.reads_prompts
        self.reads_following = self.head.reads_following
        self.context = runner if self.reads_prompts else None
        self.max_round = max_draft_tokens + 1
        self.max_proposals = self.head.max_proposals
        self._least_computed = 0
        if isinstance(head, BlockHead) and not all(head.args.causal):
            self._least_computed = min(max_draft_tokens, head.args.max_draft_tokens)

    def num_computed(self, k: int) -> int:
        """Proposals to compute in a round of ``k``.

        Where slots see those after them, a block's width changes its first proposals.
        The rows of a round decide k, but must not change what each other is proposed:
        with the ratio rules, proposals decide what a row emits.
        """
        return max(k, self._least_computed)

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        if not self.reads_prompts:
            return AssistantRows(self, len(prompts))
        known = [p[:-1] for p in prompts]
        rows = self.runner.rows(
            known, max_round=self.max_round, max_length=max_length, reuses=False
        )
        if isinstance(self.head, BlockHead):
            return BlockRows(self, rows)
        if self.head.at_once:
            return ParallelRows(self, rows)
        return ChainedRows(self, rows, [self.mostly_frequent(p) for p in prompts])

    def mostly_frequent(self, prompt: Sequence[int]) -> bool:
        """Whether a row is proposed frequent tokens alone: its prompt's words are such.

        This depends on the row alone, as its text may depend on its proposals.
        """
        if not (first := self.head.num_frequent):
            return False
        words = [t for t in prompt if t not in self._special]
        return sum(t < first for t in words) >= _MOSTLY * len(words)


class StateRows(DraftRows):
    """Rows that keep a head's state, from which proposing starts.

    Args:
        drafter: the drafter that they belong to.
        num_rows: B.
        size: width of a state; 0: the head has none.
    """

    def __init__(self, drafter: HeadDrafter, num_rows: int, size: int):
        self._drafter = drafter
        # The head's output for each row's last token, if it has any, shape (B, 1, D).
        self._outputs = [mx.zeros((num_rows, 1, size))] if size else []

    @property
    def _state(self) -> mx.array:
        return self._outputs[0]

    def _keep(self, outputs: mx.array | None, kept: mx.array | Sequence[int]) -> None:
        """Keep the head's output for the last of each row's new tokens.

        Args:
            outputs: the head's output for all new tokens; ``None`` if it has none.
            kept: how many new tokens each row keeps, shape (B,).
        """
        if outputs is None:
            return
        if not isinstance(kept, mx.array):
            kept = mx.array(list(kept))
        last = mx.maximum(kept - 1, 0)[:, None, None]
        new = mx.take_along_axis(outputs, last, axis=1)
        state = self._state.astype(new.dtype)
        self._outputs = [mx.where((kept > 0)[:, None, None], new, state)]

    def filter(self, rows: Sequence[int]) -> None:
        self._outputs = [s[mx.array(list(rows), mx.int32)] for s in self._outputs]

    def make_finite(self, rows: Sequence[int]) -> None:
        # States of other rows that are not finite are of no more use.
        self._outputs = [
            mx.where(mx.isfinite(s), s, mx.zeros((), s.dtype)) for s in self._outputs
        ]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self._outputs)

    def extend(self, other: StateRows) -> None:
        both = zip(self._outputs, other._outputs, strict=True)
        self._outputs = [mx.concatenate([*pair]) for pair in both]

    def place(self, rows: Sequence[int], other: StateRows, num_rows: int) -> None:
        both = zip(self._outputs, other._outputs, strict=True)
        self._outputs = [put_rows(s, rows, new) for s, new in both]


@ours
class AssistantRows(StateRows):
    """Rows of a head without caches, which attends to the target's."""

    def __init__(self, drafter: HeadDrafter, num_rows: int):
        super().__init__(drafter, num_rows, drafter.head.args.target_size)

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        """Keep the state of the last token of a chunk of the prompts."""
        self._keep(self._drafter.head.absorb(hidden, following, []), lengths)
        mx.async_eval(self._outputs)

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Keep the target's state at the last token that its caches hold."""
        assert accepted.hidden is not None
        head = self._drafter.head
        self._keep(head.absorb(accepted.hidden, accepted.chosen, []), accepted.kept)
        if not round_.num_draft_tokens:
            mx.async_eval(self._outputs)

    def propose(self, round_: Round) -> Proposals:
        """Choose k tokens per row, each fed back with the state of the step before."""
        head: Any = self._drafter.head
        newest, state, target = round_.recent[:, -1:], self._state, round_.target
        assert target is not None
        position = mx.maximum(target.offset - 1, 0)
        each = {place: target.kept(place) for place in set(head.places)}

        def attending(place: int) -> Any:
            cache, (keys, values, mask) = each[place]

            def attend(attention: HeadAttention, x: mx.array, q: mx.array) -> mx.array:
                return attention.attend(x, q, keys, values, mask, cache)

            return attend

        attends = [attending(place) for place in head.places]
        output: mx.array | None = None

        def logits_after(proposed: Sequence[mx.array]) -> mx.array:
            nonlocal output, state
            if output is not None:
                state = head.following_state(output)
            before = proposed[-1] if proposed else newest
            output = head.output(before, state, position, attends)
            logits: mx.array = head.predict(output)
            return logits[..., : self._drafter.vocab_size]

        tokens, drawn_from = round_.choose_each(round_.num_draft_tokens, logits_after)
        inputs = mx.concatenate([newest, *tokens], axis=1)
        return Proposals.within(inputs, drawn_from)


class HeadRows(StateRows):
    """Rows of a draft head: their context, and the state that proposing starts from.

    Args:
        drafter: the drafter that they belong to.
        rows: the caches of the context.
    """

    def __init__(self, drafter: HeadDrafter, rows: ModelRows):
        head = drafter.head
        size = 0 if isinstance(head, BlockHead) else head.args.sizes.hidden_size
        super().__init__(drafter, rows.num_rows, size)
        self._rows = rows

    @property
    def context(self) -> ModelRows:
        """The caches of the context."""
        return self._rows

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        """Write the context of a chunk of the prompts."""
        outputs = self._rows.call("absorb", hidden, following, lengths=lengths)
        self._keep(outputs, lengths)
        self._evaluate()

    def _evaluate(self) -> None:
        """Start computing what was written, so that graphs do not grow."""
        self._rows.evaluate()
        mx.async_eval(self._outputs)

    def prefill(self) -> Iterator[None]:
        """Give back the memory that only prompts needed."""
        self._rows.resize(self._drafter.max_round)
        return iter(())

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Write the context of the tokens that the round has kept."""
        assert accepted.hidden is not None
        width = accepted.hidden.shape[1]
        outputs = self._rows.call("absorb", accepted.hidden, accepted.chosen)
        self._rows.trim_per_sequence(accepted.rejected, width)
        self._keep(outputs, accepted.kept)
        if not round_.num_draft_tokens:
            self._evaluate()

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Pass the lengths on; the context lacks the newest token."""
        self._rows.note_lengths(longest - 1, max(shortest - 1, 0))

    def filter(self, rows: Sequence[int]) -> None:
        self._rows.filter(rows)
        super().filter(rows)

    @property
    def new_shapes(self) -> int:
        return self._rows.new_shapes

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + super().nbytes

    def extend(self, other: StateRows) -> None:
        assert isinstance(other, HeadRows)
        self._rows.extend(other._rows)
        super().extend(other)

    def place(self, rows: Sequence[int], other: StateRows, num_rows: int) -> None:
        assert isinstance(other, HeadRows)
        self._rows.place(rows, other._rows)
        super().place(rows, other, num_rows)

    def reset(self, rows: Sequence[int]) -> None:
        self._rows.reset(rows)

    def make_finite(self, rows: Sequence[int]) -> None:
        self._rows.make_finite(rows)
        super().make_finite(rows)

    def _take_back(self, width: int) -> None:
        """Take the last ``width`` entries of every row back."""
        if width:
            self._rows.trim_per_sequence([width] * self._rows.num_rows, width)


@ours
class BlockRows(HeadRows):
    """Rows of a DFlash or DSpark head: all proposals in one forward."""

    def propose(self, round_: Round) -> Proposals:
        """Choose as many tokens as a block has; the rest are no proposals."""
        head: Any = self._drafter.head
        wanted, newest = round_.num_draft_tokens, round_.recent[:, -1:]
        k = min(wanted, head.max_proposals or wanted)
        vocab_size, probabilities = self._drafter.vocab_size, None
        if round_.is_greedy and isinstance(head, BlockHead):
            block, options = self._block(newest, k), (k, vocab_size)
            inputs = self._rows.call("greedy", block, options=options, keeps=False)
        else:
            states = self._states(newest, k)
            if head.in_order:
                walk = head.walk(states, newest)
                tokens, probabilities = round_.choose_each(
                    k, lambda proposed: walk(proposed)[..., :vocab_size]
                )
            else:
                logits = head.as_target(head.predict(states))
                chosen, probabilities = round_.choose_all(logits[..., :vocab_size])
                tokens = [chosen]
            inputs = mx.concatenate([newest, *tokens], axis=1)
        if k == wanted:
            return Proposals.within(inputs, probabilities)
        missing = [(0, 0), (0, wanted - k)]
        if probabilities is not None:
            probabilities = mx.pad(probabilities, [*missing, (0, 0)])
        lengths = mx.full((newest.shape[0],), k, mx.int32)
        return Proposals.within(mx.pad(inputs, missing), probabilities, lengths)

    def _block(self, newest: mx.array, k: int) -> mx.array:
        """The block whose slots give ``k`` proposals, and perhaps more."""
        head: Any = self._drafter.head
        width = self._drafter.num_computed(k) + (not head.args.from_anchor)
        block: mx.array = head.inputs(newest, width)
        return block

    def _states(self, newest: mx.array, k: int) -> mx.array:
        """What ``k`` proposals are predicted from, shape (B, k, D)."""
        head: Any = self._drafter.head
        first = int(not head.args.from_anchor)
        states = self._rows.call("states", self._block(newest, k), keeps=False)
        predicted: mx.array = states[:, first : first + k]
        return predicted


@ours
class ParallelRows(BlockRows):
    """Rows of a P-EAGLE head: the last entry and the masks give all proposals."""

    def _states(self, newest: mx.array, k: int) -> mx.array:
        if k == 1:
            return self._state
        head: Any = self._drafter.head
        masks = head.masks(newest.shape[0], k - 1)
        states = self._rows.call("states", masks, keeps=False)
        return mx.concatenate([self._state.astype(states.dtype), states], axis=1)


@ours
class ChainedRows(HeadRows):
    """Rows of an EAGLE-3 or MTP head: a step for each proposal.

    Args:
        drafter, rows: see :class:`HeadRows`.
        frequent: whether each row is proposed frequent tokens alone.
    """

    def __init__(self, drafter: HeadDrafter, rows: ModelRows, frequent: Sequence[bool]):
        super().__init__(drafter, rows)
        self._frequent = list(frequent)

    def filter(self, rows: Sequence[int]) -> None:
        super().filter(rows)
        self._frequent = [self._frequent[i] for i in rows]

    def extend(self, other: StateRows) -> None:
        assert isinstance(other, ChainedRows)
        super().extend(other)
        self._frequent += other._frequent

    def place(self, rows: Sequence[int], other: StateRows, num_rows: int) -> None:
        assert isinstance(other, ChainedRows)
        super().place(rows, other, num_rows)
        for i, frequent in zip(rows, other._frequent, strict=False):
            self._frequent[i] = frequent

    def reset(self, rows: Sequence[int]) -> None:
        super().reset(rows)
        for i in rows:  # idle slots ask for no others
            self._frequent[i] = self._drafter.mostly_frequent([])

    def _logits(self, state: mx.array) -> mx.array:
        """Logits (B, 1, V'); rows of frequent tokens have no others."""
        head: Any = self._drafter.head
        if all(self._frequent):
            return head.frequent.logits(state)  # type: ignore[no-any-return]
        logits: mx.array = head.as_target(head.predict(state))
        if any(self._frequent):
            rare = mx.arange(logits.shape[-1]) >= head.num_frequent
            rows = mx.array(self._frequent)[:, None, None]
            logits = mx.where(rows & rare, -mx.inf, logits)
        return logits[..., : self._drafter.vocab_size]

    def propose(self, round_: Round) -> Proposals:
        """Choose k tokens per row, each fed back with the state of the step before."""
        head: Any = self._drafter.head
        state = self._state
        self._rows.checkpoint()

        def logits_after(proposed: Sequence[mx.array]) -> mx.array:
            nonlocal state
            if proposed:
                name = head.step_name(len(proposed))
                state = self._rows.call(name, proposed[-1], state)
            return self._logits(state)

        k = round_.num_draft_tokens
        tokens, drawn_from = round_.choose_each(k, logits_after)
        self._take_back(k - 1)
        inputs = mx.concatenate([round_.recent[:, -1:], *tokens], axis=1)
        return Proposals.within(inputs, drawn_from)
