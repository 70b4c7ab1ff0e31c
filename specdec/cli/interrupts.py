"""Ctrl-C, also while the device is at work, and SIGTERM.

Python acts on a signal between two of its own steps, and a step can wait for a forward
of a whole chunk. So a thread listens too. If the main thread has not reacted soon, the
thread ends the process. A second Ctrl-C ends it at once.
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

from .output import INTERRUPTED, show_interrupted

# Seconds that the main thread has to hear of it: some rounds, of most models.
PATIENCE = 1.0


class Interrupts:
    """Ends the process on Ctrl-C, at the latest ``PATIENCE`` seconds after the first.

    The first raises KeyboardInterrupt in the main thread as soon as Python is at work
    there, and from then on a second has the system's own effect. Where that is not
    soon, the thread says the last words in its place; a command that has set a handler
    of its own is given all the time it takes. Nothing happens in a process that
    ignores Ctrl-C (``nohup``), or outside the main thread.

    Attributes:
        heard: whether the main thread has heard of the first.
    """

    def __init__(self) -> None:
        self.heard = False
        self._last_words = show_interrupted
        # The thread that holds it ends the process.
        self._ending = threading.Lock()
        self._came = threading.Event()
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours and threading.current_thread() is threading.main_thread():
            self._pipe = reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.signal(signal.SIGINT, self._hear)
            # Written to as the signal comes, whatever the main thread is doing.
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        # After the first, the second ends even an interpreter that is ending.
        second = signal.SIG_DFL if self._came.is_set() else signal.default_int_handler
        signal.signal(signal.SIGINT, second)
        os.close(self._pipe[1])  # which ends the thread

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
            threading.Event().wait()  # the thread has begun to speak
        self._came.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.heard = True
        raise KeyboardInterrupt

    def _listen(self, reader: int) -> None:
        if self._next(reader):
            self._came.set()
            threading.Thread(target=self._wait, daemon=True).start()
            if self._next(reader):
                os._exit(INTERRUPTED)
        os.close(reader)

    @staticmethod
    def _next(reader: int) -> bool:
        """Wait for a Ctrl-C; there is none where the pipe is closed."""
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                return True
        return False

    def _wait(self) -> None:
        # The lock is free as long as the main thread has not heard.
        time.sleep(PATIENCE)
        if signal.getsignal(signal.SIGINT) not in (self._hear, signal.SIG_DFL):
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

    Python drops exceptions raised while an object is deleted (``__del__``, a weak
    reference's callback), those of signal handlers too. So a request is remembered, and
    long loops call :meth:`check`.

    A SIGTERM after another request does nothing: saving, which the first has set off,
    goes on (``timeout`` sends it twice). Ctrl-C is impatience: after a SIGTERM it
    breaks saving off, and a second one ends the process at once.
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
        # A Ctrl-C counts once it was heard: its own exception would come later, into
        # the saving that the check's has set off.
        return self._asked or (self._interrupts is not None and self._interrupts.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            return
        self._asked = True
        raise KeyboardInterrupt


def _running() -> Interrupts | None:
    """What listens for the command line that runs, if anything does."""
    return click.get_current_context().find_object(Interrupts)


@contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """:meth:`Interrupts.last_words` of the command line that runs, if it listens."""
    found = _running()
    if found is None:
        yield
        return
    with found.last_words(say):
        yield
