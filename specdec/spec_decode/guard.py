"""Guards the engine against drafters that fail: decoding goes on without a draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import DrafterError
from ..models.runner import ModelRows
from .draft_length import BatchState, DraftLength, RoundTiming
from .drafter import Drafter, DraftRows, Proposals, Round
from .vetting import vetted

log = logging.getLogger("specdec.spec_decode")

T = TypeVar("T")


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
        return _Guarded(drafter, self)

    def length(self, length: DraftLength) -> DraftLength:
        """The choice of k, guarded: 0 after a failure."""
        return _GuardedLength(length, self)

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


class _Guarded(Drafter):
    def __init__(self, drafter: Drafter, guard: DraftGuard):
        self._drafter, self._guard = drafter, guard
        self.context_length = drafter.context_length
        self.hidden_layers = drafter.hidden_layers
        self.context = drafter.context
        self.reads_prompts = drafter.reads_prompts

    def remember(self, answer: Sequence[int], client: str) -> None:
        if self._guard.error is None:
            try:
                self._drafter.remember(answer, client)
            except Exception as error:
                self._guard.fail(error, self._drafter)

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> _GuardedRows:
        rows = None
        if self._guard.error is None:
            try:
                rows = self._drafter.rows(prompts, max_length=max_length)
                if not isinstance(rows, DraftRows):
                    raise DrafterError(
                        f"drafter {type(self._drafter).__qualname__}: its rows are of "
                        f"type {type(rows).__name__}: derive them from DraftRows"
                    )
            except Exception as error:
                self._guard.fail(error, self._drafter)
        return _GuardedRows(rows, self._guard)


def _asking(name: str) -> Callable[..., None]:
    """A method that calls the rows' method, unless one has failed."""

    def call(self: _GuardedRows, *args: Any) -> None:
        self._ask(lambda rows: getattr(rows, name)(*args), None)

    return call


class _GuardedRows(DraftRows):
    """Rows of a drafter that may fail; after a failure they are ``None``."""

    def __init__(self, rows: DraftRows | None, guard: DraftGuard):
        self._rows, self._guard = rows, guard

    def _ask(self, ask: Callable[[DraftRows], T], otherwise: T) -> T:
        """What ``ask`` returns for the rows; ``otherwise`` if drafting has ended."""
        rows = self._rows
        if rows is None or self._guard.error is not None:
            self._rows = None  # this frees their memory
            return otherwise
        try:
            return ask(rows)
        except Exception as error:
            self._rows = None
            self._guard.fail(error, rows)
            return otherwise

    observe, commit = _asking("observe"), _asking("commit")
    separate, store = _asking("separate"), _asking("store")
    note_lengths = _asking("note_lengths")
    filter, reset = _asking("filter"), _asking("reset")

    @property
    def backlog(self) -> int:
        return self._ask(lambda rows: rows.backlog, 0)

    @property
    def context(self) -> ModelRows | None:
        return self._ask(lambda rows: rows.context, None)

    @property
    def nbytes(self) -> int:
        return self._ask(lambda rows: rows.nbytes, 0)

    @property
    def new_shapes(self) -> int:
        return self._ask(lambda rows: rows.new_shapes, 0)

    def prefill(self) -> Iterator[None]:
        none: Iterator[None] = iter(())
        chunks = self._ask(lambda rows: iter(rows.prefill()), none)
        while self._ask(lambda _: next(chunks, _THROUGH), _THROUGH) is not _THROUGH:
            yield

    def peek(self, round_: Round) -> Proposals | None:
        def checked(rows: DraftRows) -> Proposals | None:
            found = rows.peek(round_)
            return found and vetted(rows, round_, found)

        return self._ask(checked, None)

    def propose(self, round_: Round) -> Proposals:
        def checked(rows: DraftRows) -> Proposals:
            return vetted(rows, round_, rows.propose(round_))

        num_rows, k = round_.recent.shape[0], round_.num_draft_tokens
        nothing = Proposals(
            mx.zeros((num_rows, k), mx.int32), lengths=mx.zeros((num_rows,), mx.int32)
        )
        return self._ask(checked, nothing)

    def extend(self, other: _GuardedRows) -> None:
        theirs = other._rows
        if theirs is not None:
            self._ask(lambda rows: rows.extend(theirs), None)

    def place(self, rows: Sequence[int], other: _GuardedRows, num_rows: int) -> None:
        theirs = other._rows
        if theirs is not None:
            self._ask(lambda own: own.place(rows, theirs, num_rows), None)


_THROUGH = object()


class _GuardedLength:
    def __init__(self, length: DraftLength, guard: DraftGuard):
        self._length, self._guard = length, guard

    @property
    def max_draft_tokens(self) -> int:
        return self._length.max_draft_tokens

    def prepare(self, num_rows: int) -> None:
        if self._guard.error is not None:
            return
        try:
            self._length.prepare(num_rows)
        except DrafterError as error:  # its steps are timed there
            self._guard.fail(error, self._length)

    def may_pay(self, state: BatchState) -> bool:
        return self._guard.error is None and self._length.may_pay(state)

    def choose(self, state: BatchState) -> int:
        return 0 if self._guard.error is not None else self._length.choose(state)

    def observe(self, timing: RoundTiming) -> None:
        if self._guard.error is None:
            self._length.observe(timing)
