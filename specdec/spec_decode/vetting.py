"""Checks proposals of drafters that are not specdec's before anything reads them.

A token outside of the vocabulary would read foreign memory. An error in what a drafter
left to be computed would surface in the target's forward. Either would end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx

from ..errors import DrafterError
from .drafter import DraftRows, Proposals, Round

T = TypeVar("T")

_OURS: set[type] = set()


def ours(rows: type[T]) -> type[T]:
    """Mark a class (not those derived from it) whose proposals are always in range."""
    _OURS.add(rows)
    return rows


def check_proposals(rows: DraftRows, round_: Round, proposals: Proposals) -> None:
    """Check that proposals have the right shapes and types, without waiting for them.

    Args:
        rows: the rows that proposed them.
        round_: the round that they are for.

    Raises:
        DrafterError: a shape or a type is wrong.
    """
    name = type(rows).__qualname__
    if not isinstance(proposals, Proposals):
        raise DrafterError(
            f"drafter {name}: propose returned a {type(proposals).__name__}: it must "
            "return Proposals"
        )
    shape = (round_.recent.shape[0], round_.num_draft_tokens)
    vocab_size = round_.sampling.vocab_size
    for part, array, wanted, kind in (
        ("tokens", proposals.tokens, shape, mx.integer),
        ("lengths", proposals.lengths, shape[:1], mx.integer),
        ("probabilities", proposals.probabilities, (*shape, vocab_size), mx.floating),
    ):
        if array is None and part != "tokens":
            continue
        if not isinstance(array, mx.array):
            actual = f"of type {type(array).__name__}"
        elif array.shape == wanted and mx.issubdtype(array.dtype, kind):
            continue
        else:
            actual = _described(array.shape, str(array.dtype))
        dtype = "of integers" if kind is mx.integer else "of floats"
        raise DrafterError(
            f"drafter {name}: the {part} that it proposed are {actual}: they must be "
            f"{_described(wanted, 'an array ' + dtype)}"
        )


def _described(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype.removeprefix('mlx.core.')} of shape {tuple(shape)}"


def vetted(rows: DraftRows, round_: Round, proposals: Proposals) -> Proposals:
    """Checked proposals. Those of classes that are not marked are waited for.

    Args:
        rows: the rows that proposed them.
        round_: the round that they are for.

    Raises:
        DrafterError: a shape, a type or a value is not allowed.
        Exception: computing them raised it.
    """
    check_proposals(rows, round_, proposals)
    if type(rows) in _OURS:
        return proposals
    vocab_size = round_.sampling.vocab_size
    tokens, lengths = proposals.tokens, proposals.lengths
    ranges = [("tokens", tokens, vocab_size - 1)]
    if lengths is not None:
        ranges.append(("lengths", lengths, tokens.shape[1]))
    # In their own type, the bound might overflow.
    wide = [(part, each.astype(mx.int64), most) for part, each, most in ranges]
    extrema = [(part, mx.stack([a.min(), a.max()]), most) for part, a, most in wide]
    mx.eval(proposals.probabilities, [extremes for _, extremes, _ in extrema])
    for part, extremes, most in extrema:
        least, largest = int(extremes[0]), int(extremes[1])
        if least < 0 or largest > most:
            raise DrafterError(
                f"drafter {type(rows).__qualname__}: among the {part} that it "
                f"proposed, one is {least if least < 0 else largest}: they must be 0 "
                f"to {most}"
            )
    # A plain record, without `inputs`.
    clean = None if lengths is None else lengths.astype(mx.int32)
    return Proposals(tokens.astype(mx.int32), proposals.probabilities, clean)
