"""Shows a command's progress: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from .output import note, show

# Seconds between lines: a log of an hour stays readable.
LINE_SECONDS = 10.0
# Seconds between checks whether a line is due while nothing is done.
LOOK_SECONDS = 1.0
# Seconds for which an estimate of the time left is reused.
_LEFT_SECONDS = 0.5
# Without tqdm's own time left, which depends on the last update alone.
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def announce(work: str, *, quiet: bool) -> None:
    """Say what a command is about to do, once its models are loaded.

    Args:
        work: all that will be done, in a few words.
        quiet: say nothing.
    """
    if quiet:
        return
    from ..backend import defaults

    slow = "; on a CPU this can take minutes" if defaults().name == "cpu" else ""
    note(f"{work}{slow}")


class Progress:
    """Shows on standard error how much is done, and the time left.

    It is also updated while nothing is done for long, as in a prefill of many rows.

    Args:
        unit: the unit that is counted, in the singular.
        total: how many there are; :meth:`show` may change it.
        done: how many an earlier run has done.
        quiet: show nothing.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        unit: str,
        total: int | None = None,
        *,
        done: int = 0,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from tqdm import tqdm

        self.total, self.done = total, done
        self.on_terminal = sys.stderr.isatty()
        self.unit, self._quiet, self._clock = unit, quiet, clock
        self._what = ""
        self._note: str | Callable[[], str] = ""
        self._share: Callable[[], float | None] | None = None
        self._shown = clock()
        self._mid_line = False  # standard output's line has not ended yet
        self._begin()
        self._bar: Any = tqdm(
            total=total,
            initial=done,
            unit=unit,
            miniters=0,  # a new note moves the bar as well as what is done
            bar_format=None if total is None else _BAR,
            leave=False,
            disable=quiet or not self.on_terminal,
        )
        self._showing, self._closed = threading.Lock(), threading.Event()
        self._looking: threading.Thread | None = None
        if not quiet:
            self._looking = threading.Thread(target=self._look, daemon=True)
            self._looking.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        self._closed.set()
        if self._looking is not None:
            self._looking.join()
        self._bar.close()

    def aside(self, text: str) -> AbstractContextManager[Any]:
        """Keep out of the way while ``text`` is written to standard output.

        On a terminal this hides the bar. Elsewhere both may go to one stream: no line
        comes while ``text`` is written, nor before the line that it has begun ends.
        """
        if not self.on_terminal:
            return self._between_lines(text)
        if not sys.stdout.isatty():
            return nullcontext()
        context: AbstractContextManager[Any] = self._bar.external_write_mode(
            file=sys.stdout
        )
        return context

    @contextmanager
    def _between_lines(self, text: str) -> Iterator[None]:
        with self._showing:
            if text:
                self._mid_line = not text.endswith("\n")
            yield

    def add(
        self,
        n: int,
        *,
        what: str = "",
        note: str | Callable[[], str] = "",
        share: Callable[[], float | None] | None = None,
    ) -> None:
        """Count ``n`` more as done; see :meth:`show`."""
        self.show(self.done + n, what=what, note=note, share=share)

    def show(
        self,
        done: int,
        total: int | None = None,
        *,
        what: str = "",
        note: str | Callable[[], str] = "",
        share: Callable[[], float | None] | None = None,
    ) -> None:
        """Show how many are done.

        Args:
            total: the new total, if it has changed.
            what: what is being done.
            note: anything else worth showing, or a function that returns it.
            share: gives the share of the work that is done, if units differ in size.
        """
        anew = (total is not None and total != self.total) or done < self.done
        self.done, self.total = done, self.total if total is None else total
        self._note = note
        if anew:
            self._begin()
        self._share = share
        if not self.on_terminal:
            self._what = what
            self._line()
            return
        if anew:
            self._bar.bar_format = _BAR
            self._bar.reset(self.total)
        self._bar.set_description_str(what, refresh=False)
        self._bar.set_postfix_str(self._notes(self._clock()), refresh=False)
        self._bar.update(done - self._bar.n)
        if what != self._what:  # the next update may be far away
            self._what = what
            self._bar.refresh()

    def _begin(self) -> None:
        """Count the time from here."""
        self._began, self._before = self._clock(), self.done
        self._share = None
        self._left, self._left_at = "", float("-inf")

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if self.on_terminal:
                self._bar.set_postfix_str(self._notes(self._clock()))
            else:
                self._line()

    def _line(self) -> None:
        if self._quiet:
            return
        with self._showing:
            now = self._clock()
            if self._mid_line or now - self._shown < LINE_SECONDS:
                return
            self._shown = now
            total = f" of {self.total}" if self.total is not None else ""
            units = self.unit + "s" * (self.total != 1)
            parts = [self._what, f"{self.done}{total} {units}", self._notes(now)]
            show(f"specdec: {', '.join(filter(None, parts))}", err=True)

    def _notes(self, now: float) -> str:
        if now - self._left_at >= _LEFT_SECONDS:
            self._left, self._left_at = _left(self.seconds_left(now)), now
        note = self._note if isinstance(self._note, str) else self._note()
        return ", ".join(filter(None, [note, self._left]))

    def seconds_left(self, now: float) -> float | None:
        """Seconds left at the mean speed so far; ``None`` while that is not known."""
        share = None
        if self._share is not None:
            share = self._share()
        elif self.total is not None and self.total > self._before:
            share = (self.done - self._before) / (self.total - self._before)
        if not share or share >= 1 or self.done == self.total:
            return None
        return (now - self._began) / share * (1 - share)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"about {max(2, round(seconds))} seconds left"
    return f"about {minutes} minutes left"


class Share:
    """The share of a run that is done: tokens so far over all tokens in the end.

    The latter are estimated from the lengths of outputs so far. Finished prompts alone
    would give too little, since short ones finish first. So running prompts count as
    longer than they are now (Kaplan and Meier 1958). Beyond the longest finished one,
    prompts end at the mean rate so far.

    Args:
        num_prompts: number of prompts in the run.
        most: the most tokens that a prompt can emit.
    """

    def __init__(self, num_prompts: int, most: int) -> None:
        self._waiting, self._most = num_prompts, most
        self._finished: list[int] = []
        self._running: dict[int, int] = {}

    def take(self, index: int, num_tokens: int, *, done: bool) -> None:
        """Count tokens that a prompt emitted."""
        self._waiting -= index not in self._running
        tokens = self._running.pop(index, 0) + num_tokens
        if done:
            self._finished.append(tokens)
        else:
            self._running[index] = tokens

    def drop(self, num_prompts: int) -> None:
        """Note that ``num_prompts`` prompts will not run."""
        self._waiting -= num_prompts

    def __call__(self) -> float | None:
        """The share, from 0 to 1; ``None`` while no prompt has finished."""
        finished, running = sorted(self._finished), sorted(self._running.values())
        so_far = sum(finished) + sum(running)
        if not so_far or not finished:
            return None
        # The share of prompts that are longer than each length, in steps.
        steps: list[tuple[int, float]] = []
        longer = 1.0
        for length, n in Counter(finished).items():
            shorter = bisect_left(finished, length) + bisect_left(running, length)
            longer *= 1 - n / (len(finished) + len(running) - shorter)
            steps.append((length, longer))
        beyond = so_far / len(finished)

        def after(start: int) -> float:
            """Tokens that a prompt is expected to emit after its first ``start``."""
            first = next((s for n, s in reversed(steps) if n <= start), 1.0)
            at, alive, tokens = start, 1.0, 0.0
            for length, share in steps:
                if length > start:
                    tokens += alive * (length - at)
                    at, alive = length, share / first
            return tokens + alive * min(beyond, max(0, self._most - at))

        return so_far / (so_far + sum(map(after, running)) + self._waiting * after(0))
