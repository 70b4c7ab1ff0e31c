"""Proposals of drafters that are not ours are looked at before anything reads them.

A token outside of the vocabulary reads memory that is not the model's, and what a
drafter left to be computed fails where it is computed: both would end more than drafts.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from ..errors import DrafterError
from .drafter import DraftRows, Proposals, Round, check_proposals

T = TypeVar("T")

_OURS: set[type] = set()


def ours(rows: type[T]) -> type[T]:
    """Mark a class whose proposals are in range by construction, whatever happens.

    Of a class derived from it, nobody knows what it does.
    """
    _OURS.add(rows)
    return rows


def vetted(rows: DraftRows, round_: Round, proposals: Proposals) -> Proposals:
    """Proposals that may be handed on; those of other classes are waited for.

    Args:
        rows: whose they are.
        round_: what they are for.

    Raises:
        DrafterError: a shape, a type or a value is none that its protocol allows.
        Exception: what computing them raised.
    """
    check_proposals(rows, round_, proposals)
    if type(rows) in _OURS:
        return proposals
    vocab_size = round_.sampling.vocab_size
    tokens, lengths = proposals.tokens, proposals.lengths
    ranges = [("tokens", tokens, vocab_size - 1)]
    if lengths is not None:
        ranges.append(("lengths", lengths, tokens.shape[1]))
    # Of its own type, a value may have no room for the bound.
    wide = [(part, each.astype(mx.int64), most) for part, each, most in ranges]
    found = [(part, mx.stack([a.min(), a.max()]), most) for part, a, most in wide]
    mx.eval(proposals.probabilities, [extremes for _, extremes, _ in found])
    for part, extremes, most in found:
        least, largest = int(extremes[0]), int(extremes[1])
        if least < 0 or largest > most:
            raise DrafterError(
                f"drafter {type(rows).__qualname__}: of the {part} that it proposed "
                f"one is {least if least < 0 else largest}: they must be 0 to {most}"
            )
    # Whatever class it is of, and whatever else it holds.
    clean = None if lengths is None else lengths.astype(mx.int32)
    return Proposals(tokens.astype(mx.int32), proposals.probabilities, clean)
