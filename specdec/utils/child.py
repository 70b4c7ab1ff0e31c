"""Processes that run a module of this package, and answer lines. No mlx here.

What a model's files ask for (a template, a grammar, a tokenizer) may take all memory,
never end, or end the process. So it is tried in a child that has limits.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

#: Additional seconds for a child's start: it takes one or two, or many if busy.
_START_SECONDS = 60
# The most seconds to wait for the end of a process that was killed.
_STOP_SECONDS = 5


def module_process(
    name: str, arguments: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The program that runs a module as ``python -m``, and its environment."""
    return [sys.executable, "-P", "-m", name, *arguments], child_environment()


def child_environment() -> dict[str, str]:
    """The environment of a Python program that finds modules as this process does.

    With ``-P`` it finds none in the current folder. That may be a model's folder, whose
    code must not run.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, package])}


class ChildError(Exception):
    """A child has no answer.

    Attributes:
        kind: it took too long or too much memory, its work raised an error, it ended
            twice, or it could not be started.
    """

    def __init__(
        self, kind: Literal["late", "memory", "error", "ended", "start"], text: str
    ):
        super().__init__(text)
        self.kind = kind


class Child:
    """A process that answers requests, one at a time; started at first use.

    It lives as long as its parent. If it ends for another reason than a limit, it is
    replaced once. Several threads may call it.

    Args:
        module: its program, which calls :func:`serve`.
        again: ask a second process if the first one ends.
    """

    def __init__(self, module: str, *, again: bool = True):
        self._module = module
        self._attempts = 2 if again else 1
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        _CHILDREN.add(self)

    def ask(
        self,
        request: object,
        seconds: float,
        default: Callable[[object], object] | None = None,
    ) -> Any:
        """What the child makes of a request.

        Args:
            request: a value for JSON.
            seconds: the longest time for the work; the child's start is added.
            default: makes a value for JSON of others.

        Raises:
            ChildError: there is no answer.
        """
        data = json.dumps(request, default=default).encode()
        line = b"%f %s\n" % (seconds, data)
        with self._lock:
            try:
                answer = self._ask(line, seconds)
            except BaseException:  # perhaps interrupted: the next answer is stale
                self._stop()
                raise
        if "kind" in answer:
            raise ChildError(answer["kind"], answer["text"])
        return answer["answer"]

    def start(self) -> None:
        """Start the process early: it takes a second, in which other work can go on."""
        with self._lock, suppress(ChildError):
            self._started()

    def kill(self) -> None:
        """End the process, and the work of whoever waits for it."""
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()

    def close(self) -> None:
        """End the process once nobody waits for it."""
        with self._lock:
            self._stop()

    def _ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        for _ in range(self._attempts):  # something else may have ended the first one
            process = self._started()
            answer = exchange(process, line, seconds + _START_SECONDS)
            if answer is not None and answer.endswith(b"\n"):
                return dict(json.loads(answer))
            if answer is not None:  # it is ending, and its exit code says why
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_START_SECONDS)
            self._stop()
            if process.returncode == -signal.SIGALRM:
                raise ChildError("late", f"it takes longer than {seconds:g} seconds")
        twice = " twice" * (self._attempts - 1)
        text = f"its process ended{twice} ({process.returncode})"
        raise ChildError("ended", text)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._stop()
        program, environment = module_process(self._module)
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=os.sep,  # imports would fail if its folder were removed
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except (OSError, MemoryError) as error:
            text = getattr(error, "strerror", None) or "not enough memory"
            raise ChildError("start", f"Python cannot be started ({text})") from error
        self._owner = os.getpid()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():  # a fork's
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a device may keep it for long
            process.wait(_STOP_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


_CHILDREN: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for each in list(_CHILDREN):
        each.kill()  # nobody waits for its answer any more
        each.close()


def exchange(
    process: subprocess.Popen[bytes], line: bytes, seconds: float
) -> bytes | None:
    """Send a line, and read the line that answers it.

    Returns:
        The answer: less than a line if the process ended; ``None`` if it did not
        answer in time.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + seconds
    answer = bytearray()
    left = memoryview(line)
    with selectors.DefaultSelector() as ready:
        os.set_blocking(process.stdin.fileno(), False)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ)
        while not answer.endswith(b"\n"):
            if not (events := ready.select(end - time.monotonic())):
                return None
            for key, _ in events:
                if key.fileobj is process.stdout:
                    if not (data := os.read(key.fd, 1 << 16)):
                        return bytes(answer)
                    answer += data
                    continue
                try:
                    left = left[os.write(key.fd, left) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    ready.unregister(process.stdin)
    return bytes(answer)


# -- in the child -------------------------------------------------------------------


def serve(work: Callable[[Any], Any], *, memory: int) -> None:
    """Answer the requests of a parent, as :meth:`Child.ask` sends them, until it ends.

    Args:
        work: makes an answer for JSON; it may raise any error, or end the process.
        memory: bytes that the process may allocate from now on. macOS has no such
            limit.
    """
    answers = os.fdopen(os.dup(1), "wb")
    # Output that libraries print must not be taken for an answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory)
    for line in sys.stdin.buffer:
        seconds, _, request = line.partition(b" ")
        # The signal has no handler, so it ends the process, whatever that is doing.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            answer = {"answer": work(json.loads(request))}
        except MemoryError:
            answer = {"kind": "memory", "text": "it takes too much memory"}
        except Exception as error:  # foreign data may raise anything
            answer = {"kind": "error", "text": str(error)}
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(data + b"\n")
        answers.flush()


def _limit_memory(memory: int) -> None:
    with suppress(OSError, ValueError):  # there is no /proc, or no such limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + memory
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            most = min(most, soft)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
