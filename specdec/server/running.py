"""A process that serves: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from ..decoder import SpecDecoder
from ..errors import ConfigError, RankError, ServerError, reason_of
from ..parallel import Leader, say_error
from .app import make_app
from .config import ServerConfig
from .service import Service

#: Seconds that connections have to close once all answers have ended.
_LAST_BYTES = 5
#: Seconds that answers have where a rank of the target has ended.
_ANSWERING = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens soon; port 0 is any free one.

    Raises:
        ConfigError: the address is in use, or none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host is {host!r}: {error.strerror}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"{host} port {port} cannot be used ({error.strerror}): name another --port"
        ) from error
    return made


def url_of(listener: socket.socket) -> str:
    """What a browser on this machine opens."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://[{host}]:{port}" if host.count(":") > 1 and host[0] != "[" else (
        f"http://{host}:{port}"
    )  # fmt: skip


def serve(
    decoder: SpecDecoder,
    config: ServerConfig,
    listener: socket.socket,
    started: Callable[[], None] = lambda: None,
    stopping: Callable[[int], None] = lambda running: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then answers end, or are cut when it is time.

    Args:
        started: called when requests are answered.
        stopping: called with the number of answers that still run when it stops.

    Raises:
        ServerError: the engine failed.
    """
    app = make_app(decoder, config)
    # asyncio warns of every write to a client that has gone, which is no news here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    web = _Web(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=int(config.stop_timeout) + _LAST_BYTES,
        ),
        app,
        started,
        stopping,
    )
    ranks = decoder.target.ranks
    if isinstance(ranks, Leader):
        ranks.last_words = web.last_words
    web.run(sockets=[listener])
    if web.failure is not None:
        raise ServerError(
            f"the engine failed ({reason_of(web.failure)}): start the server again"
        ) from web.failure


class _Web(uvicorn.Server):
    """A web server whose end is the service's."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        started: Callable[[], None],
        stopping: Callable[[int], None],
    ):
        super().__init__(config)
        self._app = app
        self._started, self._stopping = started, stopping
        self.failure: BaseException | None = None

    @property
    def _service(self) -> Service:
        service: Service = self._app.state.service
        return service

    def last_words(self, error: RankError) -> None:
        """Answer what is open: the engine waits for a rank that has ended."""
        self._service.engine.fail(error)
        time.sleep(_ANSWERING)
        say_error(error)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    async def on_tick(self, counter: int) -> bool:
        self.failure = self._service.engine.failure
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping(self._service.engine.pending)
        drained = asyncio.create_task(self._service.drain())
        await super().shutdown(sockets)
        await drained

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own would send them again at the end, which is no failure here.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
