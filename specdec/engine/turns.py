"""Threads that decode take turns: the sessions of a process step one at a time.

Sessions of a decoder share its models, compiled forwards, recorded hidden states and
draft-length policy, and MLX does not let two threads work on shared arrays. A device
computes one forward at a time anyway.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

import mlx.core as mx

#: Streams that no thread uses. MLX keeps a thread for each stream until the process
#: ends, so streams are reused. They are found by name, as equal devices have different
#: hashes.
idle_streams: defaultdict[str, list[mx.Stream]] = defaultdict(list)
# Seconds that a process waits at its end for threads in a step, and for others that
# have decoded.
_PATIENCE, _LITTLE = 10.0, 0.5


def take_stream(device: mx.Device) -> mx.Stream:
    """A stream that no other thread uses; only in a turn of :data:`turns`.

    MLX looks streams up in a table without a lock, in each operation on a GPU. A new
    stream changes that table.
    """
    try:
        return idle_streams[str(device)].pop()
    except IndexError:
        return mx.new_thread_unsafe_stream(device)


class _Loan:
    """A stream of a thread, until the thread ends."""

    def __init__(self, stream: mx.Stream):
        self._stream = stream

    def __del__(self) -> None:
        with suppress(Exception):  # a device's failure was reported before
            mx.synchronize(self._stream)
            idle_streams[str(self._stream.device)].append(self._stream)
            mx.clear_streams()


class _Mine(threading.local):
    has_stream = False
    loan: _Loan | None = None


_borrowers: WeakSet[threading.Thread] = WeakSet()
#: Says whether the current thread has a stream that it was given.
mine = _Mine()


def _lend_stream() -> None:
    """Give this thread a stream for as long as it lives.

    A process that ends while a thread has a stream of MLX's own aborts.
    """
    if mine.has_stream or threading.current_thread() is threading.main_thread():
        return
    stream = take_stream(mx.default_device())
    mx.set_default_stream(stream)
    mine.has_stream, mine.loan = True, _Loan(stream)
    _borrowers.add(threading.current_thread())


class _Turn:
    """A thread that has its turn, or waits for it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.depth = 0
        self.came = threading.Event()


class Turns:
    """A lock that threads get in the order in which they ask; a thread may nest it.

    Whoever is first in the queue has the turn, and stays first until it leaves. Each
    operation on the queue is atomic, and only its thread changes a :class:`_Turn`.
    """

    def __init__(self) -> None:
        self._queue: deque[_Turn] = deque()
        self._closed = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for this thread's turn, which lasts as long as the block."""
        # An interrupt may come anywhere, in the first call of _leave, too. A turn that
        # nobody ends would keep all other threads waiting for ever.
        depth = self._depth
        try:
            try:
                self._take()
                _lend_stream()
                if self._closed and threading.current_thread() in _borrowers:
                    raise SystemExit  # ends the thread, quietly
                yield
            finally:
                self._leave(depth)
        finally:
            self._leave(depth)

    @property
    def _depth(self) -> int:
        """How many turns this thread holds, one within the other."""
        turn = self._find()
        return 0 if turn is None else turn.depth

    def _find(self) -> _Turn | None:
        me = threading.get_ident()
        return next((turn for turn in list(self._queue) if turn.thread == me), None)

    def _take(self) -> None:
        turn = self._find()
        if turn is None:
            turn = _Turn()
            self._queue.append(turn)
        turn.depth += 1
        self._call()
        turn.came.wait()

    def _leave(self, depth: int) -> None:
        """Hold ``depth`` turns at most; doing it again changes nothing."""
        turn = self._find()
        if turn is not None:
            turn.depth = min(turn.depth, depth)
            if not depth:
                self._queue.remove(turn)
        self._call()

    def _call(self) -> None:
        """Tell the first that it has the turn, once more or for the first time."""
        for turn in list(self._queue)[:1]:
            turn.came.set()

    def close(self) -> None:
        """End threads that decode when the process ends.

        Python does not wait for daemons. A process that ends while MLX computes for
        them aborts.
        """
        self._closed = True
        start = time.monotonic()
        for thread in list(_borrowers):
            busy = {turn.thread for turn in list(self._queue)}
            most = _PATIENCE if thread.ident in busy else _LITTLE
            thread.join(max(0.0, start + most - time.monotonic()))


#: Held by whoever steps a session.
turns = Turns()
atexit.register(turns.close)
