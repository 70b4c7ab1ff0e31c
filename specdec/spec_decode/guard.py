"""Guards the engine against drafters that fail: decoding goes on without a draft."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from inspect import isroutine
from typing import Any, cast

import mlx.core as mx

from ..errors import DrafterError
from .drafter import Drafter, DraftRows, Proposals, Round
from .vetting import vetted

log = logging.getLogger("specdec.spec_decode")


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
        if not isroutine(value):
            return value

        def call(*args: Any, **named: Any) -> Any:
            watched = self._current()
            # Rows that join are guarded, too.
            args = tuple([a._current() if type(a) is _Guarded else a for a in args])
            try:
                return self._checked(name, args, getattr(watched, name)(*args, **named))
            except Exception as error:
                return getattr(self._failed(error), name)(*args, **named)

        return call

    def _checked(self, name: str, args: tuple[Any, ...], answer: Any) -> Any:
        """What a method has returned, fit for the engine."""
        if name == "propose" or (name == "peek" and answer is not None):
            return vetted(self._watched, args[0], answer)
        if name == "prefill":
            return self._chunks(iter(answer))
        if name != "rows":
            return answer
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
