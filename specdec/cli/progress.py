"""How far a command is: a bar on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from .streams import show

# Seconds between lines: a log of an hour stays readable.
LINE_SECONDS = 10.0
# Seconds after which is looked whether a line is due though nothing was done.
LOOK_SECONDS = 1.0


class Progress:
    """Shows on standard error what is done of how much.

    Time goes on there though nothing is done for long, as in a prefill of many rows.

    Args:
        unit: what is counted, in the singular.
        total: how many there are; :meth:`show` may tell another number.
        quiet: show nothing.
        time_left: lines tell it too, from the mean of what is done, as a bar does.
        clock: seconds.
    """

    def __init__(
        self,
        unit: str,
        total: int | None = None,
        *,
        quiet: bool = False,
        time_left: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from tqdm import tqdm

        on_terminal = sys.stderr.isatty()
        self._unit, self._total, self._done = unit, total, 0
        self._what = self._note = ""
        self._clock, self._told = clock, clock()
        self._began, self._time_left = self._told, time_left
        self._in_lines = not quiet and not on_terminal
        self._bar: Any = tqdm(
            total=total,
            unit=unit,
            miniters=0,  # a new note moves the bar as well as what is done
            leave=False,
            disable=quiet or not on_terminal,
        )
        self._telling, self._closed = threading.Lock(), threading.Event()
        self._looking: threading.Thread | None = None
        if not quiet:
            self._looking = threading.Thread(target=self._look, daemon=True)
            self._looking.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._closed.set()
        if self._looking is not None:
            self._looking.join()
        self._bar.close()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if self._in_lines:
                self._tell()
            else:
                self._bar.refresh()

    def aside(self) -> AbstractContextManager[Any]:
        """Take the bar off the terminal while standard output is written to it."""
        if not sys.stdout.isatty():
            return nullcontext()
        context: AbstractContextManager[Any] = self._bar.external_write_mode(
            file=sys.stdout
        )
        return context

    def add(self, n: int, *, what: str = "", note: str = "") -> None:
        """So many more are done."""
        self.show(self._done + n, what=what, note=note)

    def show(
        self, done: int, total: int | None = None, *, what: str = "", note: str = ""
    ) -> None:
        """So many are done.

        Args:
            total: of how many, where that changes.
            what: is being done.
            note: what else there is to tell.
        """
        anew = total is not None and total != self._total
        self._done, self._total = done, self._total if total is None else total
        if self._in_lines:
            self._what, self._note = what, note
            self._tell()
            return
        self._bar.set_description_str(what, refresh=False)
        self._bar.set_postfix_str(note, refresh=False)
        if anew or done < self._bar.n:
            self._bar.reset(self._total)
        self._bar.update(done - self._bar.n)
        if what != self._what:  # it may be long before there is more to show
            self._what = what
            self._bar.refresh()

    def _tell(self) -> None:
        with self._telling:
            now = self._clock()
            if now - self._told < LINE_SECONDS:
                return
            self._told = now
        total = f" of {self._total}" if self._total is not None else ""
        units = self._unit + "s" * (self._total != 1)
        told = [self._what, f"{self._done}{total} {units}", self._note, self._left(now)]
        show(f"specdec: {', '.join(filter(None, told))}", err=True)

    def _left(self, now: float) -> str:
        if not self._time_left or not self._total or not 0 < self._done < self._total:
            return ""
        seconds = (now - self._began) / self._done * (self._total - self._done)
        minutes = round(seconds / 60)
        if minutes < 2:
            return f"about {max(2, round(seconds))} seconds left"
        return f"about {minutes} minutes left"
