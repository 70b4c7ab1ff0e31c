"""Proposals of drafters that are not ours are looked at before anything reads them.

A token outside of the vocabulary reads memory that is not the model's, and what a
drafter left to be computed fails where it is computed: both would end more than drafts.
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
    """Mark a class whose proposals are in range by construction, whatever happens.

    Of a class derived from it, nobody knows what it does.
    """
    _OURS.add(rows)
    return rows


def check_proposals(rows: DraftRows, round_: Round, proposals: Proposals) -> None:
    """See that proposals have the shapes and types of their protocol.

    Looks at no values, and so waits for nothing.

    Args:
        rows: whose they are.
        round_: what they are for.

    Raises:
        DrafterError: they have not.
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
            found = f"of type {type(array).__name__}"
        elif array.shape == wanted and mx.issubdtype(array.dtype, kind):
            continue
        else:
            found = _described(array.shape, str(array.dtype))
        dtype = "of integers" if kind is mx.integer else "of floats"
        raise DrafterError(
            f"drafter {name}: the {part} that it proposed are {found}: they must be "
            f"{_described(wanted, 'an array ' + dtype)}"
        )


def _described(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype.removeprefix('mlx.core.')} of shape {tuple(shape)}"


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
    # Without `inputs`, and of no other class.
    clean = None if lengths is None else lengths.astype(mx.int32)
    return Proposals(tokens.astype(mx.int32), proposals.probabilities, clean)
