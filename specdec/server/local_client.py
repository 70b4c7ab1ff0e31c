"""An HTTP client for a process that listens at a Unix socket of this machine.

No mlx here.

httpx's own transport reads through AnyIO, which took half of the router's time for an
event of a stream. This one reads by asyncio alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

# Seconds for which an idle connection is kept. A replica closes those that are idle for
# five.
_IDLE_SECONDS = 2.0
# Seconds between two tries to connect, while too many others wait to be accepted.
_AGAIN_SECONDS = 0.01


def local_client(path: str, read_seconds: float) -> httpx.AsyncClient:
    """A client whose requests go to the socket at ``path``.

    Args:
        read_seconds: how long any part of an answer may take.
    """
    return httpx.AsyncClient(
        transport=_Transport(path),
        timeout=httpx.Timeout(None, read=read_seconds),
        base_url="http://localhost",
        trust_env=False,
    )


class _Transport(httpx.AsyncHTTPTransport):
    def __init__(self, path: str):
        self._pool = httpcore.AsyncConnectionPool(
            uds=path,
            max_connections=None,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=_Sockets(),
        )


class _Sockets(httpcore.AsyncNetworkBackend):
    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.AsyncNetworkStream:
        """Connect; the socket may not accept at once.

        Raises:
            httpcore.ConnectError: nobody listens.
            httpcore.ConnectTimeout: it does not accept in time.
        """
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            with _errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                async with asyncio.timeout(timeout):
                    # asyncio would take a connection that has to wait for a made one.
                    while not _connected(end, path):
                        await asyncio.sleep(_AGAIN_SECONDS)
                    return _Stream(*await asyncio.open_unix_connection(sock=end))
        except BaseException:
            end.close()
            raise


def _connected(end: socket.socket, path: str) -> bool:
    try:
        end.connect(path)
    except BlockingIOError:
        return False
    return True


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _errors(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _errors(httpcore.WriteTimeout, httpcore.WriteError):
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> Any:
        # An idle connection that can be read has ended. One that was reset is closing.
        ended = self._reader.at_eof() or self._writer.is_closing()
        return ended if info == "is_readable" else None


@contextmanager
def _errors(late: type[Exception], failed: type[Exception]) -> Iterator[None]:
    """Raise httpcore's errors, for which the pool closes the connection."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise failed(str(error)) from error
