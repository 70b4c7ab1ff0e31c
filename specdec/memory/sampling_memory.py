"""Computes the memory that choosing tokens takes besides the logits."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from .formulas import logits_bytes

#: The most float32 copies of all logits of a round, and of one position's logits, that
#: each step holds. Measured with MLX's CPU backend, steps one by one and together, in
#: float32 and bfloat16, for 1, 2, 4 and 8 positions, and rounded up.
COPIES = {
    "noise": (3, 0),
    "top_p": (6, 0),
    "min_p": (2, 0),
    "xtc": (5, 2),
    "top_k": (4, 0),
    "logit_bias": (1, 2),
    "min_tokens": (1, 2),
    "repetition_penalty": (4, 0),
    "presence_penalty": (3, 0),
    "frequency_penalty": (2, 0),
    "grammar": (1, 0),
    "logprobs": (2, 1),
    "top_logprobs": (1, 0),
    # What draft and target draw from, and the residual of the two.
    "ratio": (5, 3),
}
#: The same for filters that take some rows out and put them back.
APART = (5, 0)


@dataclass(frozen=True)
class Choosing:
    """How the tokens of a row are chosen, as far as memory goes.

    Args:
        steps: keys of :data:`COPIES` that are computed once for all rows.
        filter: such keys with their settings, computed separately for each group of
            rows with equal ones.
    """

    steps: frozenset[str] = frozenset()
    filter: frozenset[tuple[str, Hashable]] = frozenset()


#: Only the largest logit is looked for.
GREEDY = Choosing()
#: A temperature with the usual filters, for when they are not known.
FILTERED = Choosing(
    frozenset({"noise"}), frozenset({("top_p", 0), ("min_p", 0), ("top_k", 0)})
)


def choosing_bytes(
    rows: Collection[Choosing], num_draft_tokens: int, vocab_size: int
) -> int:
    """The most bytes that choosing the tokens of a round holds besides the logits."""
    steps = {name for row in rows for name in row.steps}
    copies = [(COPIES[name], len(rows)) for name in steps]
    copies += [(COPIES[name], 1) for row in rows for name, _ in row.filter]
    if len({row.filter for row in rows}) > 1:
        copies.append((APART, len(rows)))
    return sum(
        of_round * logits_bytes(n, num_draft_tokens, vocab_size, 4)
        + of_one * logits_bytes(n, 0, vocab_size, 4)
        for (of_round, of_one), n in copies
    )
