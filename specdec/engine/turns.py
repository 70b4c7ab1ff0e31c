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
from contextlib import suppress
from types import TracebackType
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


class Turns:
    """A lock that threads get in the order in which they ask; a thread may nest it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._closed = False

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for this thread's turn; return whether it came in time."""
        me, gate = threading.get_ident(), threading.Lock()
        with self._lock:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return True
            gate.acquire()
            self._waiting.append((me, gate))
        came = False
        try:
            came = gate.acquire(timeout=timeout)
        finally:  # an interrupt, too, must not leave the turn with nobody
            if not came:
                self._give_up(me, gate)
        return came

    def _give_up(self, me: int, gate: threading.Lock) -> None:
        with self._lock:
            if (me, gate) in self._waiting:
                self._waiting.remove((me, gate))
                return
        self.release()

    def release(self) -> None:
        """End a turn: the thread that has waited longest is next."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                (self._owner, gate), self._depth = self._waiting.popleft(), 1
                gate.release()

    def close(self) -> None:
        """End threads that decode when the process ends.

        Python does not wait for daemons. A process that ends while MLX computes for
        them aborts.
        """
        self._closed = True
        start = time.monotonic()
        for thread in list(_borrowers):
            with self._lock:
                busy = {self._owner, *(ident for ident, _ in self._waiting)}
            most = _PATIENCE if thread.ident in busy else _LITTLE
            thread.join(max(0.0, start + most - time.monotonic()))

    def __enter__(self) -> None:
        self.acquire()
        try:
            _lend_stream()
            if self._closed and threading.current_thread() in _borrowers:
                raise SystemExit  # ends the thread, quietly
        except BaseException:
            self.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


#: Held by whoever steps a session.
turns = Turns()
atexit.register(turns.close)
