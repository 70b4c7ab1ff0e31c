"""Writing in the background: a thread, and a queue with an end. No mlx here."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from .entries import Kind
from .files import write_atomically

# Files of a 27B-like model have about 16 MB.
QUEUE_LENGTH = 16

Job = tuple[Kind, str, bytes]


class Writer:
    """Writes entries one after another, in the order in which they were given.

    Who gives more than the queue takes waits: nothing is dropped, and memory stays
    bounded. The first error ends writing for good, since what comes behind may
    stand on what is missing.

    Args:
        folder: where to.
        written: a method, called in the thread with the kind and place of each
            job that was written.
        failed: a method, called in the thread with the error.
    """

    def __init__(
        self,
        folder: Path,
        written: Callable[[Kind, str], None],
        failed: Callable[[OSError], None],
    ):
        self._folder = folder
        # The thread must not keep its owner alive.
        self._written = weakref.WeakMethod(written)
        self._failed = weakref.WeakMethod(failed)
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._given_up = False

    def put(self, job: Job) -> None:
        """Queue a job; waits while the queue is full."""
        if self._given_up:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="specdec-prefix-writer", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait until everything that was given is written, or given up."""
        self._jobs.join()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            # The thread may have been the last to know the owner.
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._given_up:
                    write_atomically(self._folder, *job)
                    self._tell(self._written, *job[:2])
            except OSError as error:
                self._given_up = True
                self._tell(self._failed, error)
            finally:
                job = None  # a whole file: not to be held while waiting
                self._jobs.task_done()
        self._jobs.task_done()

    @staticmethod
    def _tell(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
        bound = method()
        if bound is not None:
            bound(*args)
