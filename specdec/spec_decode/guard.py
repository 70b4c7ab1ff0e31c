"""Guards the engine against drafters: decoding goes on without one that fails.

Proposals of drafters that are not specdec's are checked before anything reads them. A
token outside of the vocabulary would read foreign memory. An error in what a drafter
left to be computed would surface in the target's forward. Either would end the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import isroutine
from typing import Any, TypeVar, cast

import mlx.core as mx

from ..errors import DrafterError
from .drafter import Drafter, DraftRows, Proposals, Round

log = logging.getLogger("specdec.spec_decode")

T = TypeVar("T")

_OURS: set[type] = set()
_JOINING = frozenset(("extend", "place"))
# Methods whose answers the engine reads.
_CHECKED = frozenset(("propose", "prefill", "rows"))


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


class DraftGuard:
    """Stands between an engine and its drafters.

    Any error of a drafter ends drafting for all rows, since a drafter that missed a
    round no longer knows its rows. One warning reports the error. Its traceback is in a
    debug message of the logger ``specdec.spec_decode``.

    Attributes:
        error: the message of the first failure; ``None`` if there was none.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    def drafter(self, drafter: Drafter) -> Drafter:
        """The drafter, guarded: its rows propose nothing after a failure."""
        return cast(Drafter, _Guarded(drafter, NoDrafter(), self))

    def fail(self, error: Exception, what: object) -> None:
        """Stop drafting: ``what`` has raised ``error``."""
        if self.error is not None:
            return
        self.error = str(as_drafter_error(error, what))
        log.warning("%s: decoding goes on without a draft", self.error)
        log.debug("the drafter's failure", exc_info=error)


def as_drafter_error(error: Exception, what: object) -> DrafterError:
    """A DrafterError for an error that a drafter, or its rows, raised."""
    if isinstance(error, DrafterError):
        return error
    name, kind = type(what).__qualname__, type(error).__name__
    reason = f"{kind}: {error}" if str(error) else kind
    return DrafterError(f"drafter {name} failed ({reason})")


class NoDrafter(Drafter):
    """Proposes nothing."""

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        return NoDraftRows()


class NoDraftRows(DraftRows):
    """Rows for which nothing is proposed."""

    def propose(self, round_: Round) -> Proposals:
        num_rows, k = round_.recent.shape[0], round_.num_draft_tokens
        none = mx.zeros((num_rows,), mx.int32)
        return Proposals(mx.zeros((num_rows, k), mx.int32), lengths=none)

    def filter(self, rows: Sequence[int]) -> None:
        return

    def extend(self, other: DraftRows) -> None:
        return

    def place(self, rows: Sequence[int], other: DraftRows, num_rows: int) -> None:
        return


class _Guarded:
    """A drafter or its rows, until anything that the guard watches has failed."""

    def __init__(self, watched: Any, instead: Drafter | DraftRows, guard: DraftGuard):
        self._watched, self._instead, self._guard = watched, instead, guard

    def _current(self) -> Any:
        if self._guard.error is not None:
            self._watched = self._instead  # this frees the memory of what has failed
        return self._watched

    def _failed(self, error: Exception) -> Any:
        self._guard.fail(error, self._watched)
        return self._current()

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._current(), name)
        except Exception as error:
            if not hasattr(self._instead, name):  # it is not asked of any drafter
                raise
            value = getattr(self._failed(error), name)
        return partial(self._call, name) if isroutine(value) else value

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        watched = self._current()
        if name in _JOINING:  # these rows are guarded, too
            args = tuple([a._current() if type(a) is _Guarded else a for a in args])
        try:
            answer = getattr(watched, name)(*args, **named)
            return self._checked(name, args, answer) if name in _CHECKED else answer
        except Exception as error:
            return getattr(self._failed(error), name)(*args, **named)

    def _checked(self, name: str, args: tuple[Any, ...], answer: Any) -> Any:
        """What a method has returned, fit for the engine."""
        if name == "propose":
            return vetted(self._watched, args[0], answer)
        if name == "prefill":
            return self._chunks(iter(answer))
        if not isinstance(answer, DraftRows):
            raise DrafterError(
                f"drafter {type(self._watched).__qualname__}: its rows are of type "
                f"{type(answer).__name__}: derive them from DraftRows"
            )
        return _Guarded(answer, NoDraftRows(), self._guard)

    def _chunks(self, chunks: Iterator[None]) -> Iterator[None]:
        while self._guard.error is None:
            try:
                next(chunks)
            except StopIteration:
                return
            except Exception as error:
                self._failed(error)
                return
            yield
