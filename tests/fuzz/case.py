"""What a case is, and what must hold of every answer."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

from specdec.cli import main
from specdec.errors import SpecdecError
from specdec.utils.printable import LONGEST

T = TypeVar("T")

# How lines of standard error begin, under --quiet.
OWN_LINES = ("specdec: ", "wrote ")
LONGEST_LINE = LONGEST + len("specdec: warning: ")
# The command line's exit codes: done, failed, used wrongly.
CODES = (0, 1, 2)


class FaultError(AssertionError):
    """Something that must hold for every input did not."""


@dataclass
class World:
    """What the cases of one process share: a folder, and what was made once."""

    folder: Path
    _made: dict[Any, Any] = field(default_factory=dict)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def once(self, make: Callable[[World], T]) -> T:
        """What ``make`` returned, when it was first asked for."""
        if make not in self._made:
            self._made[make] = make(self)
        value: T = self._made[make]
        return value

    def at_end(self, close: Callable[[], object]) -> None:
        """Have something closed when the process has run its cases."""
        self._closing.callback(close)

    def close(self) -> None:
        self._closing.close()
        self._made.clear()


@dataclass(frozen=True)
class Case:
    """One input: all that is random in it comes from ``rng``.

    Args:
        place: a folder of the case's own, empty.
    """

    rng: random.Random
    place: Path
    world: World


Kind = Callable[[Case], None]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Enter a kind of input under its function's name."""
    KINDS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


def specdec(*arguments: str | Path, quietly: bool = False) -> Answer:
    """Run a command in this process.

    Args:
        quietly: it may fail with what it says on standard output alone.

    Raises:
        FaultError: it ended in another way than with a code and lines of its own.
    """
    out, err = _Captured(), _Captured()
    # Whoever asks a question here is answered yes: nothing may ask.
    source = io.TextIOWrapper(io.BytesIO(b"1\ny\n" * 10), "utf-8")
    code: Any = 0
    with (
        mock.patch("sys.stdin", source),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(list(map(str, arguments)))
        except SystemExit as end:
            code = 0 if end.code is None else end.code
            check_chain(end)
        # What a prefix store still has to write, and to warn of, comes when it goes.
        gc.collect()
    answer = Answer(code, out.text(), err.text())
    check_answer(answer, quietly=quietly)
    return answer


def specdec_works(*arguments: str | Path) -> Answer:
    """Run a command whose input is sound: what others are compared with."""
    answer = specdec(*arguments)
    if answer.code != 0:
        fail(f"a command with sound input fails: {answer}")
    return answer


def check_answer(answer: Answer, *, quietly: bool = False) -> None:
    """Refuse what no command may say."""
    if answer.code not in CODES:
        raise FaultError(f"the exit code is {answer.code}: {answer.err[-500:]}")
    lines = answer.err.split("\n")
    if lines.pop():
        raise FaultError(
            f"standard error does not end with a line: {answer.err[-500:]!r}"
        )
    for line in lines:
        if not line.startswith(OWN_LINES):
            raise FaultError(f"standard error has a line of others: {line[:500]!r}")
        check_line(line)
    reported = any(line.startswith("specdec: error: ") for line in lines)
    if reported != (answer.code != 0) and not (quietly and answer.out):
        raise FaultError(f"code {answer.code} with {answer.err[-500:]!r}")


def check_line(line: str) -> None:
    """Refuse a message that is not one short line of printable characters."""
    if not line.isprintable():
        raise FaultError(f"not printable: {line[:500]!r}")
    if len(line) > LONGEST_LINE:
        raise FaultError(f"a line of {len(line)} characters: {line[:300]!r}...")
    if "SPECDEC_DEBUG" in line or re.search(r"\bunexpected [A-Z]\w+:", line):
        raise FaultError(f"nobody expected it: {line}")
    if "Traceback" in line:
        raise FaultError(f"a traceback: {line}")


def check_error(error: Exception) -> None:
    """Refuse an error that is none of specdec's, or not one line.

    What else it is must lie in the tree of :mod:`specdec.errors`: a plain TypeError is
    re-raised, to be shown with its traceback.
    """
    if not isinstance(error, SpecdecError):
        raise error
    check_line(str(error))
    check_chain(error)


def check_chain(error: BaseException | None) -> None:
    """Refuse an error that came of asking for more memory than there is."""
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if re.search(r"MemoryError|bad_alloc|[Uu]nable to allocate", text):
            raise FaultError(f"memory was asked for without a bound: {text[:500]}")
        error = error.__cause__ or error.__context__


def fail(what: str) -> NoReturn:
    raise FaultError(what)


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Have a failure say of which part of the input it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of: {what[:1000]}")
        raise


class _Captured(io.TextIOWrapper):
    """Standard output or error: texts and bytes, as a process has it."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, "utf-8", "backslashreplace", newline="")

    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode("utf-8", "backslashreplace")
