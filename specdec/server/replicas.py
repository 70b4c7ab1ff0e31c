"""Runs processes that serve the same model, one per device, and restarts them.

A replica listens on a Unix socket in a folder that only this user can enter, so it asks
for no key. It ends when its standard input closes, so no replica outlives its parent.
No mlx here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from ..errors import ServerError
from .local_client import local_client
from .routing import ReplicaLoad

log = logging.getLogger("specdec.server")

#: Seconds between two checks that a replica answers, and seconds that a check may take
#: before the replica gets no requests, and before it is killed.
_LOOK_SECONDS = 5.0
_SUSPECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
#: Seconds before a replica that did not become ready restarts: doubled each time.
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 60.0
#: Limit of the time to become ready: a multiple of the first replica's time, and at
#: least this many seconds. The first has no limit, as it may have to download a model.
_TIMES_AS_LONG, _LEAST_LOADING = 4, 300.0
#: Seconds that a replica gets to end, in addition to the time for its answers.
_LAST_SECONDS = 15.0


@dataclass(frozen=True)
class ReplicaCommand:
    """How a replica's process is started.

    Args:
        arguments: the program and its arguments.
        environment: variables in addition to those of this process.
        greeting: bytes that it reads first from its standard input.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    greeting: bytes


#: Gives the command for replica ``i``, which listens at a path. Once it answers, it
#: writes a line to its standard output that says what it serves. It may write
#: ``LOADABLE`` before, and then waits for a line before it takes memory.
Start = Callable[[int, str], ReplicaCommand]
LOADABLE = "loadable"


class Replica(ReplicaLoad):
    """A serving process, or its successor.

    Attributes:
        index: its number, from 0.
        name: what it is called in the log.
        client: the HTTP client for it; ``None`` while it does not answer.
        starts: how often it was started.
        described: its own description of what it serves.
        process: its process, while there is one.
        patience: seconds that it may take to become ready; ``None``: any number.
        suspect: it has not answered a check in time.
        doubt: set to have it checked now.
    """

    def __init__(self, index: int):
        super().__init__()
        self.index = index
        self.name = f"replica {index}"
        self.client: httpx.AsyncClient | None = None
        self.starts = 0
        self.described = ""
        self.process: asyncio.subprocess.Process | None = None
        self.patience: float | None = None
        self.suspect = False
        self.doubt = asyncio.Event()
        self._abandoned = 0

    @property
    def status(self) -> str:
        """Its state, in one word."""
        if self.client is None:
            return "starting"
        return "suspect" if self.suspect else "ok"

    def abandon(self) -> None:
        """Note that the client of a request has left before the answer.

        The request counts until the replica answers a check: one that hangs would else
        seem idle, and get the next request, too.
        """
        self._abandoned += 1
        self.doubt.set()

    async def check(self, client: httpx.AsyncClient) -> None:
        """Ask whether it answers.

        Raises:
            httpx.TimeoutException: it does not.
            httpx.TransportError: it is about to end.
        """
        abandoned = self._abandoned
        asked = asyncio.create_task(client.get("/health", timeout=_ANSWER_SECONDS))
        try:
            await asyncio.wait({asked}, timeout=_SUSPECT_SECONDS)
            self.suspect = not asked.done()
            await asked
            self._answered(abandoned)
        finally:
            asked.cancel()

    def begin_anew(self) -> None:
        """Note that a new process has taken its place."""
        self.forget()
        self._answered(self._abandoned)

    def _answered(self, abandoned: int) -> None:
        self.suspect = False
        self.running -= abandoned
        self._abandoned -= abandoned

    def signal(self, number: int) -> None:
        """Send a signal to its process, if there is one."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class FirstReplicaError(ServerError):
    """The first replica ended before it was ready.

    Args:
        code: its exit code, if it reported itself why it ended; else ``None``.
    """

    def __init__(self, message: str, code: int | None):
        super().__init__(message)
        self.code = code


class Replicas:
    """Starts replicas, and restarts those that end.

    The others start when the first is ready: so a model that cannot be loaded is
    reported once, and a model is downloaded once.

    Args:
        count: number of replicas.
        start: gives the command for each.
        answer_seconds: the longest time that an answer takes.

    Attributes:
        failure: why there are no replicas: the first one did not become ready.
    """

    def __init__(self, count: int, start: Start, answer_seconds: float = 600.0):
        self.all = [Replica(i) for i in range(count)]
        self.failure: FirstReplicaError | None = None
        self._start = start
        self._answer_seconds = answer_seconds
        self._folder = ""
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def _make_folder(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="specdec-")  # only this user can enter

    async def __aenter__(self) -> Self:
        self._make_folder()
        self._tasks = [asyncio.create_task(self._keep(each)) for each in self.all]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self.stop(0)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that answer; if none does in time, those that may."""
        there = [each for each in self.all if each.client is not None]
        return [each for each in there if not each.suspect] or there

    async def stop(self, seconds: float) -> None:
        """End all replicas; running answers have ``seconds`` to end."""
        self._stopping = True
        for each in self.all:
            each.signal(signal.SIGTERM)
        for task, each in zip(self._tasks, self.all, strict=True):
            if each.process is None:  # it waits to be started
                task.cancel()
        try:
            async with asyncio.timeout(seconds + _LAST_SECONDS):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except TimeoutError:
            log.warning("replicas did not end in time, and are killed")
        finally:
            for each in self.all:
                each.signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, replica: Replica) -> None:
        """Keep a replica running until all stop."""
        pause = _LEAST_PAUSE
        if replica.index:
            await self._first.wait()
        while not self._stopping:
            try:
                was_ready, code = await self._run(replica)
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            except OSError as error:  # the system cannot start a process
                was_ready, code, how = False, 0, str(error)
            if self._stopping:
                return
            if not self._first.is_set():
                message = f"the first replica ended before it was ready ({how})"
                self.failure = FirstReplicaError(message, code if code > 0 else None)
                return
            pause = _LEAST_PAUSE if was_ready else min(2 * pause, _MOST_PAUSE)
            log.warning("%s ended (%s): it starts again", replica.name, how)
            if not was_ready:
                await asyncio.sleep(pause)

    def _like(self, replica: Replica) -> Sequence[Replica]:
        """The replicas that load what this one has loaded."""
        return self.all

    async def _room(self, replica: Replica) -> None:
        """Wait until there is memory for a replica that can be loaded."""

    async def _run(self, replica: Replica) -> tuple[bool, int]:
        """Run a replica until it ends; return whether it was ready, and exit code."""
        path = os.path.join(self._folder, f"{replica.index}-{replica.starts}")
        replica.starts += 1
        command = self._start(replica.index, path)
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **command.environment},
            # Ctrl-C at a terminal must reach only this process, which stops replicas.
            start_new_session=True,
        )
        replica.process = process
        was_ready = False
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(command.greeting)
            if self._stopping:
                process.terminate()
            start, line = time.monotonic(), b""
            try:
                async with asyncio.timeout(replica.patience):
                    line = await process.stdout.readline()
                if line.decode().strip() == LOADABLE:
                    await self._room(replica)
                    start = time.monotonic()
                    process.stdin.write(b"\n")
                    async with asyncio.timeout(replica.patience):
                        line = await process.stdout.readline()
            except TimeoutError:
                log.warning("%s does not become ready", replica.name)
                process.kill()
            if line:
                was_ready = True
                if replica.patience is None:
                    took = time.monotonic() - start
                    patience = max(_LEAST_LOADING, _TIMES_AS_LONG * took)
                    for each in self._like(replica):
                        each.patience = patience
                replica.described = line.decode().strip()
                replica.begin_anew()
                if replica.starts > 1:
                    log.warning("%s is ready again", replica.name)
                async with local_client(
                    path, self._answer_seconds + _ANSWER_SECONDS
                ) as client:
                    replica.client = client
                    self._first.set()
                    try:
                        await self._watch(replica, process, client)
                    finally:
                        replica.client = None  # set before the client is closed
        finally:
            if process.returncode is None and not was_ready:
                with suppress(TimeoutError):  # it has closed its output, and is ending
                    await asyncio.wait_for(process.wait(), _LAST_SECONDS)
            if process.returncode is None:
                process.kill()
            code = await process.wait()
            replica.process = None
        return was_ready, code

    async def _watch(
        self,
        replica: Replica,
        process: asyncio.subprocess.Process,
        client: httpx.AsyncClient,
    ) -> None:
        """Wait until a replica ends; kill it if it no longer answers."""
        ended = asyncio.create_task(process.wait())
        try:
            while True:
                doubt = asyncio.create_task(replica.doubt.wait())
                await asyncio.wait(
                    {ended, doubt},
                    timeout=_LOOK_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                doubt.cancel()
                if ended.done():
                    return
                replica.doubt.clear()
                try:
                    await replica.check(client)
                except httpx.TimeoutException:
                    log.warning("%s does not answer, and is killed", replica.name)
                    process.kill()
                except httpx.TransportError:
                    pass  # it is about to end
        finally:
            ended.cancel()
