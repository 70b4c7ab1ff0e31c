"""How each row of a batch chooses its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from ..sampling_params import SamplingParams
from .adjustments import Adjustments
from .filters import Filter
from .noise import XTC, Draws, gumbel_noise, uniform_draws

# A round's first draft forward takes a row's last two tokens.
TAIL = 2


def largest(logits: mx.array) -> mx.array:
    """The token of the largest logit at each position: (B, S, V) to (B, S), int32."""
    # A view has the same bytes; a conversion would need a kernel.
    return mx.argmax(logits, axis=-1).view(mx.int32)


@dataclass(frozen=True)
class RowSampling:
    """The settings of the rows of a batch.

    Args:
        temperature: shape (B,), float32; 0 is greedy.
        seed: shape (B,), uint32.
        greedy: no row samples, so no noise is needed.
        filters: each filter in use, with the rows that it applies to; ``None``: all.
        adjustments: bias, penalties, min_tokens; ``None`` if no row has any.
        context_size: how many of a row's newest tokens the next choice needs.
        vocab_size: V, the target's number of logits.
    """

    temperature: mx.array
    seed: mx.array
    greedy: bool
    filters: tuple[tuple[Filter, mx.array | None], ...]
    adjustments: Adjustments | None
    context_size: int
    vocab_size: int

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        *,
        vocab_size: int,
        prompt_lengths: Sequence[int] | None = None,
        end_tokens: Sequence[AbstractSet[int]] | None = None,
        adjust: bool = True,
    ) -> RowSampling:
        """The settings of several requests, in row order.

        Args:
            prompt_lengths, end_tokens: each row's, for ``min_tokens``.
            adjust: whether to include bias, penalties and ``min_tokens``.
        """
        lengths = prompt_lengths or [0] * len(params)
        contexts = [
            # No row can have more tokens than this.
            min(p.context_size, n + p.max_tokens) if prompt_lengths else p.context_size
            for p, n in zip(params, lengths, strict=True)
        ]
        rows: dict[Filter, list[int]] = {}
        for row, p in enumerate(params):
            if p.temperature > 0:
                rows.setdefault(Filter.of(p), []).append(row)
        rows.pop(Filter(), None)
        return cls(
            temperature=mx.array([p.temperature for p in params], mx.float32),
            seed=mx.array([p.seed_key for p in params], mx.uint32),
            greedy=all(p.temperature == 0 for p in params),
            filters=tuple(
                (f, None if len(r) == len(params) else mx.array(r))
                for f, r in rows.items()
            ),
            adjustments=Adjustments.of(
                params, lengths, end_tokens or [frozenset()] * len(params), vocab_size
            )
            if adjust
            else None,
            context_size=max([TAIL, *contexts]),
            vocab_size=vocab_size,
        )

    def draws(self, first: mx.array, num_tokens: int) -> Draws:
        """The random draws of every row's next tokens.

        Args:
            first: position of each row's first token to choose, shape (B,).
        """
        positions = first[:, None] + mx.arange(num_tokens)
        gumbel = xtc = None
        if not self.greedy:
            gumbel = gumbel_noise(self.seed, positions, self.vocab_size)
            if any(f.xtc_probability > 0 for f, _ in self.filters):
                xtc = uniform_draws(self.seed, positions, use=XTC)
        return Draws(positions, gumbel, xtc)

    def adjusted(
        self, logits: mx.array, recent: mx.array, following: mx.array, draws: Draws
    ) -> mx.array:
        """Logits after bias, penalties and ``min_tokens``.

        Args:
            logits: shape (B, S, V).
            recent: each row's newest tokens before the first of the positions,
                shape (B, W), W at least ``context_size``; -1 where there is none.
            following: the tokens supposed to stand at the positions, shape
                (B, S - 1) or more.
            draws: the positions' draws.
        """
        if self.adjustments is None:
            return logits
        num_tokens, width = logits.shape[1], recent.shape[1]
        tokens = mx.concatenate([recent, following], axis=1)
        windows = tokens[:, mx.arange(num_tokens)[:, None] + mx.arange(width)]
        return self.adjustments.apply(logits, windows, draws.positions)

    def choose(self, logits: mx.array, draws: Draws | None) -> mx.array:
        """One token for each position: the arg-max, or a draw at the temperature.

        ``argmax(logits / temperature + noise)`` is a draw from
        ``softmax(logits / temperature)`` (the Gumbel-max trick). It is computed as
        ``argmax(logits + temperature * noise)``: equal for every temperature above 0,
        and the arg-max of the logits at 0. Tokens that a row's filter refuses are
        never drawn.

        Args:
            logits: from :meth:`adjusted`, shape (B, S, V' <= V).
            draws: the positions' draws; ``None``: no row samples.

        Returns:
            Token ids, shape (B, S), int32.
        """
        if draws is not None and draws.gumbel is not None:
            noise = draws.gumbel[..., : logits.shape[-1]]
            scaled = self.temperature[:, None, None] * noise
            logits = self.filtered(logits, draws) + scaled
        return largest(logits)

    def filtered(self, logits: mx.array, draws: Draws) -> mx.array:
        """``logits`` in float32, minus infinity for tokens that a row filters out."""
        logits = logits.astype(mx.float32)
        for which, rows in self.filters:
            if rows is None:
                return which.apply(logits, draws.xtc)
            # Only the rows that use the filter, since sorting a vocabulary takes long.
            xtc = None if draws.xtc is None else draws.xtc[rows]
            logits[rows] = which.apply(logits[rows], xtc)
        return logits

    def probabilities(self, logits: mx.array, draws: Draws) -> mx.array:
        """The rows' distributions, shape (B, S, V), float32; zero for filtered tokens.

        A row at temperature 0 has probability 1 at the arg-max. A draft with fewer
        logits than the target has probability 0 for the rest.
        """
        cold = (self.temperature == 0)[:, None, None]
        warm = mx.where(cold, 1.0, self.temperature[:, None, None])
        drawn = mx.softmax(self.filtered(logits, draws) / warm, axis=-1)
        best = mx.argmax(logits, axis=-1, keepdims=True)
        one_hot = (mx.arange(logits.shape[-1]) == best).astype(mx.float32)
        probabilities = mx.where(cold, one_hot, drawn)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            probabilities = mx.pad(probabilities, [(0, 0), (0, 0), (0, missing)])
        return probabilities
