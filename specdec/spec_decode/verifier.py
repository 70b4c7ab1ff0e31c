"""Decides what every row of a round commits, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import mlx.core as mx

from ..models.runner import ModelRows
from ..request import Request, TokenLogprobs
from ..sampling import Draws, GrammarMasks, RowSampling
from ..sampling.noise import ACCEPT, RESIDUAL, gumbel_noise, round_draws, uniform_draws
from ..sampling_params import SamplingParams
from . import rejection_sampler
from .commit import Accepted, Committed, Compute, after, committer
from .custom_samplers import choose_stepwise
from .drafter import Proposals, Round
from .rejection_sampler import AcceptedPrefix, Proposed

#: Parameters for idle slots.
IDLE = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of a round's tokens, for the rows that asked for them.

    Args:
        chosen: those of the chosen tokens, shape (B, S).
        top_ids, top: the likeliest tokens and theirs, best first, shape (B, S, n).
    """

    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, num_top: int) -> Logprobs:
        """Log-probabilities of ``tokens`` (B, S) under ``logits`` (B, S, V)."""
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        vocab_size = logits.shape[-1]
        chosen = mx.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        num_top = min(num_top, vocab_size)
        ids = mx.zeros((*tokens.shape, 0), mx.int32)
        if num_top:
            # On GPUs, MLX sorts the whole vocabulary for a partition as well.
            ids = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[..., :num_top]
            order = mx.argsort(-mx.take_along_axis(logprobs, ids, axis=-1), axis=-1)
            ids = mx.take_along_axis(ids, order, axis=-1)
        return cls(chosen, ids, mx.take_along_axis(logprobs, ids, axis=-1))

    def read(self, tops: Sequence[int | None]) -> list[list[TokenLogprobs]]:
        """For each row an entry for each position.

        Args:
            tops: how many alternatives each row wants; ``None``: no entries either.
        """
        arrays: list[Any] = [self.chosen, self.top_ids, self.top]
        each = zip(tops, *(array.tolist() for array in arrays), strict=True)
        read = list[list[TokenLogprobs]]()
        for top, *row in each:
            read.append([])
            for logprob, ids, values in (
                zip(*row, strict=True) if top is not None else ()
            ):
                likeliest = zip(ids, values, strict=True)
                # A token that bias or a processor forbids is not an alternative.
                possible = [(t, p) for t, p in likeliest if p > -inf][:top]
                read[-1].append(TokenLogprobs(logprob, possible))
        return read


@dataclass(frozen=True)
class Decision(Accepted):
    """What a round decided, on the device: what rows accept, and what follows from it.

    Args:
        committed: what is committed after the round.
        packed: for the host, shape (B, k + 3), int32: how many tokens each row keeps;
            the most draft tokens that it could accept, of those proposed for it, or -1
            if it keeps nothing; and the k + 1 chosen tokens.
        peaks: the largest logit of every position, shape (B, k + 1): NaN if any of
            its logits is NaN, minus infinity if no token is possible.
        logprobs: log-probabilities, if a row asked for them.
        errors: by row, why the user's functions or the grammar failed after the tokens
            that the row keeps.
    """

    committed: Committed = field(kw_only=True)
    packed: mx.array = field(kw_only=True)
    peaks: mx.array = field(kw_only=True)
    logprobs: Logprobs | None = None
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verifier:
    """Decides what the rows of a batch accept.

    Args:
        rows: the rows; ``None`` for idle slots.
        sampling: how the rows choose tokens.
        rejection, block: which rows have that verification, shape (B,), boolean;
            ``None`` if there are none.
        stepwise: running rows whose tokens the user's functions choose, and how each
            samples after those functions.
        grammars: running rows that follow a grammar.
        num_top: the most alternatives that any row wants reported; ``None`` if no row
            wants log-probabilities.
        compute: computes what follows from a round.
    """

    rows: tuple[Request | None, ...]
    sampling: RowSampling
    rejection: mx.array | None
    block: mx.array | None
    stepwise: tuple[tuple[int, RowSampling], ...]
    grammars: tuple[int, ...]
    num_top: int | None
    compute: Compute

    @classmethod
    def of(cls, rows: Sequence[Request | None], vocab_size: int) -> Verifier:
        """The verifier of ``rows``; ``None`` stands for an idle slot."""
        params = [IDLE if s is None else s.params for s in rows]

        def verified_by(name: str) -> mx.array | None:
            # At temperature 0 all rules agree, and the coupled one is cheapest.
            follow = [p.verification == name and p.temperature > 0 for p in params]
            return mx.array(follow) if any(follow) else None

        asked = [p.top_logprobs for p in params if p.logprobs or p.top_logprobs]
        return cls(
            rows=tuple(rows),
            sampling=RowSampling.of(
                params,
                vocab_size=vocab_size,
                prompt_lengths=[len(s.prompt_tokens) if s else 0 for s in rows],
                end_tokens=[s.end_tokens if s else frozenset() for s in rows],
            ),
            rejection=verified_by("rejection"),
            block=verified_by("block"),
            stepwise=tuple(
                (i, RowSampling.of([p], vocab_size=vocab_size, adjust=False))
                for i, (s, p) in enumerate(zip(rows, params, strict=True))
                if s and p.stepwise and s.finish_reason is None
            ),
            grammars=tuple(
                i
                for i, s in enumerate(rows)
                if s and s.grammar is not None and s.finish_reason is None
            ),
            num_top=max(asked) if asked else None,
            compute=committer(),
        )

    @cached_property
    def clients(self) -> tuple[str | None, ...]:
        """See :attr:`~specdec.spec_decode.drafter.Round.clients`."""
        return tuple(None if s is None else s.drafted_as for s in self.rows)

    @cached_property
    def needs_probabilities(self) -> bool:
        """Whether some row's verification needs what proposals were drawn from."""
        return self.rejection is not None or self.block is not None

    @cached_property
    def needs_draws(self) -> bool:
        """Whether the choice of some row's token reads draws or positions."""
        sampling = self.sampling
        chosen_by_logits = sampling.greedy and sampling.adjustments is None
        return not chosen_by_logits or bool(self.stepwise)

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether the host must know every committed token before a round."""
        return bool(self.stepwise or self.grammars)

    def draws(self, first: mx.array, num_tokens: int) -> Draws:
        """The random draws of a round, see :meth:`RowSampling.draws`."""
        draws = self.sampling.draws(first, num_tokens)
        if self.block is None or draws.gumbel is None:
            return draws
        gumbel, _ = round_draws(
            self.sampling.seed, first, num_tokens, self.sampling.vocab_size
        )
        its_own = mx.where(self.block[:, None, None], gumbel, draws.gumbel)
        return replace(draws, gumbel=its_own)

    def round_of(
        self,
        limits: Sequence[int],
        committed: Committed,
        active: mx.array,
        target: ModelRows | None = None,
    ) -> Round:
        """The round that a drafter is asked to propose for.

        Args:
            limits: the most draft tokens that each row may accept.
            committed: what is committed before it.
            active: rows still being decoded, shape (B,), boolean.
            target: the target's caches.
        """
        k = max(0, *limits)
        grammar = self._masks(limits, k + 1) if self.grammars else None
        forced = None
        if k and grammar is not None:
            tokens, lengths = grammar.forced()
            if any(lengths):
                forced = Proposals(
                    mx.array(tokens, mx.int32), lengths=mx.array(lengths, mx.int32)
                )
        return Round(
            k,
            committed.recent,
            active,
            self.sampling,
            self.draws(committed.lengths, k + 1) if self.needs_draws else None,
            self.needs_probabilities,
            forced,
            lengths=committed.lengths,
            grammar=grammar,
            target=target,
            clients=self.clients,
        )

    def _masks(self, limits: Sequence[int], num_tokens: int) -> GrammarMasks:
        """The grammars' masks for a round; all tokens before it have been read."""
        states, ends = {}, {}
        for i in self.grammars:
            row = self.rows[i]
            assert row is not None
            assert row.grammar is not None
            row.grammar.commit(row.tokens)
            states[i], ends[i] = row.grammar, row.end_tokens
        return GrammarMasks(states, ends, limits, num_tokens)

    def decide(
        self,
        round_: Round,
        inputs: mx.array,
        proposals: Proposals | None,
        logits: mx.array,
        limit: mx.array,
        *,
        hidden: mx.array | None = None,
        checks: bool = False,
    ) -> Decision:
        """Decide what every row commits.

        Args:
            round_: the round.
            inputs: the target's inputs: the newest token, then the proposals, shape
                (B, k + 1).
            proposals: ``None`` if k is 0.
            logits: the target's logits, shape (B, k + 1, V).
            limit: the most draft tokens that each row may accept, -1 for rows that
                have ended, shape (B,), int32.
            hidden: the target's hidden states, for the drafter.
            checks: a row with a logit that is NaN or infinity keeps nothing.
        """
        draws, proposed = round_.draws, inputs[:, 1:]
        if draws is not None:
            logits = self.sampling.adjusted(logits, round_.recent, proposed, draws)
        if round_.grammar is not None:
            logits = round_.grammar.mask(logits, proposed)
        peaks = logits.max(axis=-1)
        meant = None if proposals is None else proposals.lengths
        chosen = self.sampling.choose(logits, draws)
        before = round_.recent, round_.lengths
        # The keys and values of a draft token may not be finite. They reach the logits
        # of the tokens before it, as 0 times NaN.
        sound = peaks if checks else None
        kept, *follows = self.compute(inputs, chosen, limit, meant, *before, sound)
        limit, equal = follows[0], kept
        if proposals is not None and draws is not None and self.needs_probabilities:
            chosen, kept = self._by_ratio(chosen, kept, proposals, logits, draws, limit)
        errors = {} if round_.grammar is None else dict(round_.grammar.errors)
        if self.stepwise and draws is not None:
            chosen, kept, logits = self._stepwise(
                chosen, kept, proposed, logits, draws, limit, errors
            )
            peaks = logits.max(axis=-1)
        if kept is not equal:  # another rule than equality has decided
            follows = list(after(chosen, kept, limit, *before))
        _, rejected, packed, recent, lengths = follows
        if checks and proposals is None:  # rows that keep nothing may go on
            recent = mx.where(limit[:, None] < 0, round_.recent, recent)
        logprobs = None
        if self.num_top is not None:
            logprobs = Logprobs.of(logits, chosen, self.num_top)
        return Decision(
            chosen,
            kept,
            hidden,
            logprobs,
            errors,
            rejected=rejected,
            committed=Committed(recent, lengths),
            packed=packed,
            peaks=peaks,
        )

    def _by_ratio(
        self,
        chosen: mx.array,
        kept: mx.array,
        proposals: Proposals,
        logits: mx.array,
        draws: Draws,
        limit: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """``chosen`` and ``kept``, where rows with a ratio rule follow that rule."""
        sampling, k = self.sampling, proposals.tokens.shape[1]
        if proposals.probabilities is not None:
            # A broken draft's proposals (NaN, say) are not accepted.
            sound = mx.isfinite(proposals.probabilities.sum(axis=-1)).all(axis=-1)
            limit = mx.where(sound, limit, mx.minimum(limit, 0))
        proposed = Proposed(
            proposals.tokens,
            proposals.drawn_from(sampling.vocab_size),
            sampling.probabilities(logits, draws),
            limit,
        )
        seed, first = sampling.seed, draws.positions[:, 0]

        def by_position() -> mx.array:
            return uniform_draws(seed, draws.positions[:, :k], use=ACCEPT)

        def by_round() -> mx.array:
            return round_draws(seed, first, k, vocab_size=1)[1]

        for rows, rule, uniform in (
            (self.rejection, rejection_sampler.rejection, by_position),
            (self.block, rejection_sampler.block, by_round),
        ):
            if rows is None:
                continue
            prefix: AcceptedPrefix = rule(proposed, uniform())
            at = first[:, None] + mx.maximum(prefix.count, 0)[:, None]
            noise = gumbel_noise(sampling.seed, at, sampling.vocab_size, use=RESIDUAL)
            ruled = rejection_sampler.with_extra_token(proposed, prefix, noise[:, 0])
            # A row that may accept nothing decides as in a round of k = 0.
            rows = rows & (limit > 0)
            chosen = mx.where(rows[:, None], ruled.chosen, chosen)
            kept = mx.where(rows, ruled.kept, kept)
        return chosen, kept

    def _stepwise(
        self,
        chosen: mx.array,
        kept: mx.array,
        proposed: mx.array,
        logits: mx.array,
        draws: Draws,
        limit: mx.array,
        errors: dict[int, str],
    ) -> tuple[mx.array, mx.array, mx.array]:
        """``chosen``, ``kept`` and the logits, where the user's functions choose.

        Args:
            errors: takes up the errors of these functions, by row.
        """
        limits: list[int] = limit.tolist()  # type: ignore[assignment]
        tokens = [mx.array(row) for row in chosen]
        counts = [mx.array(n) for n in kept]
        by_row: list[list[int]] = proposed.tolist()  # type: ignore[assignment]
        for i, sampling in self.stepwise:
            if limits[i] < 0:
                continue
            row = self.rows[i]
            assert row is not None
            stepped = choose_stepwise(
                row,
                logits[i : i + 1],
                draws.row(i),
                by_row[i][: limits[i]],
                sampling,
            )
            if stepped.error is not None:
                errors[i] = stepped.error
            n = len(stepped.tokens)
            counts[i] = mx.array(n, mx.int32)
            if n == 0:
                continue
            padding = [0] * (chosen.shape[1] - n)
            tokens[i] = mx.array([*stepped.tokens, *padding], mx.int32)
            rows = mx.concatenate(stepped.logits)[None].astype(logits.dtype)
            logits = mx.slice_update(logits, rows, mx.array([i, 0, 0]), axes=(0, 1, 2))
        return mx.stack(tokens), mx.stack(counts), logits
