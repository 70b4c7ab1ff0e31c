"""Writing in the background: a thread, and a queue with an end. No mlx here."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .entries import Kind
from .files import write_entry

# Files of a 27B-like model have about 16 MB.
QUEUE_LENGTH = 16


@dataclass(frozen=True)
class Job:
    """An entry to write: a whole file. ``parent`` is ``None`` where it is the first."""

    kind: Kind
    place: str
    parent: str | None
    data: bytes


class Owner(Protocol):
    """Hears, in the thread, what becomes of jobs."""

    def wanted(self, job: Job) -> bool:
        """Whether a job is still to be done, now that its turn has come."""

    def written(self, job: Job) -> None:
        """It was done."""

    def failed(self, error: Exception) -> None:
        """It could not be done, nor will be what comes after it."""


class Writer:
    """Writes entries one after another, in the order in which they were given.

    Who gives more than the queue takes waits: nothing is dropped, and memory stays
    bounded. The first error ends writing for good, since what comes after may
    stand on what is missing.

    Args:
        folder: where to.
        owner: hears of jobs; the thread keeps it alive.
    """

    def __init__(self, folder: Path, owner: Owner):
        self._folder = folder
        self._owner = owner
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
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._given_up:
                self._do(job)
            job = None  # a whole file: not to be held while waiting
            self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, job: Job) -> None:
        try:
            if self._owner.wanted(job):
                write_entry(self._folder, job.kind, job.place, job.data)
                self._owner.written(job)
        except Exception as error:  # whatever it is, no run may wait for this thread
            self._given_up = True
            self._owner.failed(error)
