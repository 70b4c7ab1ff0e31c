"""Runs a serving process: socket, signals, shutdown. No mlx here."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from ..errors import ConfigError
from ..utils.printable import quoted
from .guard import BACKLOG, Connection, close_late, limit_log, max_connections

#: Seconds that connections have to close once all answers have ended.
_LAST_BYTES = 5
#: Seconds in which a second SIGTERM is ignored: ``timeout`` sends two at once.
_ONE_REQUEST = 0.5


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any free port."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no name of a host"
        raise ConfigError(
            f"host is {quoted(host)}: {why}: name an address of this machine, such as "
            "127.0.0.1"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{host} port {port} cannot be used ({error.strerror}): name another --port"
        ) from error
    return bound


def url_of(listener: socket.socket) -> str:
    """The URL for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://[{host}]:{port}" if host.count(":") > 1 and host[0] != "[" else (
        f"http://{host}:{port}"
    )  # fmt: skip


class Serving(Protocol):
    """What an application's ``state.service`` must offer to a serving process."""

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""

    @property
    def failure(self) -> BaseException | None:
        """Why no more requests will be answered; ``None`` while they will."""

    @property
    def pending(self) -> int:
        """How many answers have not ended."""

    async def drain(self) -> None:
        """Accept no more requests; let running ones end, or cut them after a while."""


def run(
    app: Starlette,
    stop_timeout: float,
    listener: socket.socket,
    started: Callable[[], None] = lambda: None,
    stopping: Callable[[int], None] = lambda running: None,
    *,
    descriptors: int = 1,
) -> BaseException | None:
    """Serve until SIGINT or SIGTERM; then let answers end, or cut them after a while.

    A second signal ends the process at once.

    Args:
        app: made by :func:`~specdec.server.web.application`; its ``state.service`` is a
            :class:`Serving` while its lifespan runs.
        stop_timeout: seconds that running answers have to end.
        started: called once requests are answered.
        stopping: called when the server stops, with the number of running answers.
        descriptors: how many a connection takes.

    Returns:
        The service's error, if it failed.
    """
    # asyncio warns of every write to a client that has left, which is expected here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    limit_log()
    limits = {"most": max_connections(descriptors), "most_body": app.state.bodies.most}
    web = _Web(
        uvicorn.Config(
            app,
            http=type("Connection", (Connection,), limits),
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            # Anybody on this machine could pose as another client by X-Forwarded-For.
            proxy_headers=False,
            timeout_graceful_shutdown=int(stop_timeout) + _LAST_BYTES,
        ),
        app,
        started,
        stopping,
    )
    web.run(sockets=[listener])
    return web.failure


class _Web(uvicorn.Server):
    """A web server that ends when its service does."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        started: Callable[[], None],
        stopping: Callable[[int], None],
    ):
        super().__init__(config)
        self._app = app
        self._report_started: Callable[[], None] | None = started
        self._stopping = stopping
        self.failure: BaseException | None = None
        self._asked = 0.0  # when the first signal came

    @property
    def _service(self) -> Serving:
        service: Serving = self._app.state.service
        return service

    async def on_tick(self, counter: int) -> bool:
        if self._report_started is not None and self._service.healthy:
            self._report_started()
            self._report_started = None
        self.failure = self._service.failure
        if counter % 10 == 0:  # once a second
            close_late(self.server_state.connections)
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping(self._service.pending)
        drained = asyncio.create_task(self._service.drain())
        await super().shutdown(sockets)
        await drained

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method would send the signals again at the end, but stopping by
        # a signal is no failure here.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A script's background process starts with SIGINT ignored, but one sent to the
        # server must stop it.
        heard = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; at the second signal, end at once."""
        now = time.monotonic()
        if not self.should_exit:
            self.should_exit, self._asked = True, now
        elif sig == signal.SIGINT or now > self._asked + _ONE_REQUEST:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
