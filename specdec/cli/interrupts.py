"""Handles SIGTERM, and Ctrl-C even while the device is computing.

Python handles a signal between two of its own steps, and a step can wait for the
forward of a whole chunk. So a thread listens, too. If the main thread does not react
soon, the thread ends the process. A second Ctrl-C ends it at once. In each case one
line says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

import click

from ..utils.ctrl_c import INTERRUPTED, end
from .output import interrupt_shown, show_interrupted

# Seconds that the main thread has to react: several rounds of most models.
PATIENCE = 1.0


class Interrupts:
    """Ends the process on Ctrl-C, at the latest ``PATIENCE`` seconds after the first.

    The first Ctrl-C raises KeyboardInterrupt in the main thread as soon as Python runs
    there; a second one then ends the process. If this takes too long, the thread says
    the last words instead and ends the process. A command that has set its own handler
    gets all the time it needs. This does nothing in a process that ignores Ctrl-C
    (``nohup``), or outside the main thread.

    Attributes:
        heard: whether the main thread has handled the first Ctrl-C.
    """

    def __init__(self) -> None:
        self.heard = False
        self._last_words: Callable[[], None] = show_interrupted
        # Whichever thread holds this lock ends the process.
        self._ending = threading.Lock()
        self._final = threading.Lock()  # the same for the second Ctrl-C
        self._came = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        ours = self._before in (signal.default_int_handler, end)
        if ours and threading.current_thread() is threading.main_thread():
            interrupt_shown.clear()
            self._pipe = reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.signal(signal.SIGINT, self._hear)
            # The signal is written here at once, whatever the main thread is doing.
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        # After a first Ctrl-C, a second one ends even an interpreter that is exiting.
        second = signal.SIG_DFL if self._came.is_set() else self._before
        signal.signal(signal.SIGINT, second)
        os.close(self._pipe[1])  # this ends the thread

    @contextmanager
    def last_words(self, say: Callable[[], None]) -> Iterator[None]:
        """Within the block, the thread calls ``say`` if the main thread cannot speak.

        Args:
            say: called in another thread, while the main thread is inside of a call
                that does not return soon.
        """
        before, self._last_words = self._last_words, say
        try:
            yield
        finally:
            self._last_words = before

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread is ending the process
        self._came.set()
        # Whichever thread hears of the second one ends the process.
        signal.signal(signal.SIGINT, self._end)
        self.heard = True
        raise KeyboardInterrupt

    def _listen(self, reader: int) -> None:
        if self._next(reader):
            self._came.set()
            threading.Thread(target=self._wait, daemon=True).start()
            if self._next(reader):
                self._end()
        os.close(reader)

    def _end(self, *_: object) -> None:
        """End the process at once; say so if the first Ctrl-C has not led to a line."""
        if self._final.acquire(blocking=False):
            if not interrupt_shown.is_set():
                end()
            os._exit(INTERRUPTED)

    @staticmethod
    def _next(reader: int) -> bool:
        """Wait for a Ctrl-C; return ``False`` once the pipe is closed."""
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                return True
        return False

    def _wait(self) -> None:
        # The lock is free until the main thread has handled the signal.
        time.sleep(PATIENCE)
        if signal.getsignal(signal.SIGINT) not in (self._hear, self._end):
            return
        if self._ending.acquire(blocking=False):
            with suppress(Exception):
                self._last_words()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(INTERRUPTED)


class RequestsToEnd:
    """Within the block SIGTERM acts like Ctrl-C, and neither can be lost.

    Python drops exceptions that are raised while an object is deleted (``__del__``, a
    weak reference's callback), also those of signal handlers. So a request to end is
    remembered, and long loops call :meth:`check`.

    A SIGTERM after another request does nothing (``timeout`` sends two): the saving
    that the first request has started goes on. A Ctrl-C after a SIGTERM breaks saving
    off, and a second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._interrupts = _running()
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def check(self) -> None:
        """Raise KeyboardInterrupt once SIGTERM or Ctrl-C has asked for an end."""
        if self._came:
            raise KeyboardInterrupt

    @property
    def _came(self) -> bool:
        # A Ctrl-C counts only once it was handled. Otherwise its exception would come
        # later, and break off the saving that check()'s exception has started.
        return self._asked or (self._interrupts is not None and self._interrupts.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            return
        self._asked = True
        raise KeyboardInterrupt


def _running() -> Interrupts | None:
    """The :class:`Interrupts` of the running command line, if there is one."""
    return click.get_current_context().find_object(Interrupts)


@contextmanager
def concluding(say: Callable[[], None]) -> Iterator[None]:
    """Call ``say`` if the block is interrupted, and end the command."""
    try:
        with last_words(say):
            yield
    except KeyboardInterrupt:
        say()
        sys.exit(INTERRUPTED)


@contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """:meth:`Interrupts.last_words` of the running command line, if it has one."""
    running = _running()
    if running is None:
        yield
        return
    with running.last_words(say):
        yield
