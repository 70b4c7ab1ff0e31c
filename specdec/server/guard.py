"""What a server does for connections, whatever its application does. No mlx here.

Anybody who reaches the port can open connections and send nothing. So their number is
limited, a request has to arrive in time, and what goes wrong takes one line of the log.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import reason_of
from ..utils.printable import one_line
from .errors import RequestError

log = logging.getLogger("specdec.server")

#: Seconds in which the head of a request, and a whole request, have to arrive.
HEAD_SECONDS, BODY_SECONDS = 20.0, 60.0
_NO_HTTP = (
    "the request is no HTTP/1.1: call http:// and not https://, with a head of at most "
    "64 KiB"
)
#: A body that is late is answered before its connection is closed.
_GRACE = 5.0
#: The most connections, and descriptors that a server needs for other things.
_MOST, _RESERVED = 4096, 256
#: Connections that may wait to be accepted; each takes a descriptor at once.
BACKLOG = 128
#: Lines of a kind that the log takes in this many seconds.
_LINES, _LINES_SECONDS = 5, 60.0


def max_connections(each: int) -> int:
    """How many connections the limit of descriptors allows, if each takes ``each``.

    The soft limit is raised first, as far as the hard one allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST * each + BACKLOG + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return min(_MOST, max(8, (soft - BACKLOG - _RESERVED) // each))


class Connection(H11Protocol):
    """A connection whose requests have to arrive in time.

    While there are too many, the one that has waited longest for a whole request gives
    way. So idle ones keep nobody out.
    """

    most = _MOST  # connections at once
    most_body = 0  # bytes of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = time.monotonic()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        try:
            super().data_received(data)
        except Exception as error:  # of the parser, in the midst of an answer
            log.error("a connection failed: %s", reason_of(error))
            self.transport.abort()
        self._check_chunk()
        if before is h11.IDLE and self.conn.their_state is not h11.IDLE:
            self.since = time.monotonic()

    def _check_chunk(self) -> None:
        """Refuse a body of which a part is announced that is too large."""
        announced = getattr(self.conn._reader, "_bytes_in_chunk", 0)
        if self.conn.our_state is h11.SEND_RESPONSE:
            try:
                check_size(announced, self.most_body)
            except RequestError as error:
                self._refuse(error)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(RequestError(_NO_HTTP, code="invalid_http"))
        else:  # an answer has begun
            self.transport.abort()

    def on_response_complete(self) -> None:
        if self.conn.their_state is not h11.SEND_BODY:  # else its time goes on
            self.since = time.monotonic()
        super().on_response_complete()

    @property
    def limit(self) -> float | None:
        """Seconds that its present state may last; ``None`` while an answer is due."""
        if self.transport.is_closing():  # its client has to take the last bytes
            return BODY_SECONDS
        states = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS + _GRACE}
        return states.get(self.conn.their_state)

    def _make_room(self) -> None:
        waiting = [
            each
            for each in self.connections
            if isinstance(each, Connection)
            and each is not self
            and each.limit is not None
        ]
        log.warning("there are %d connections, which is the limit", self.most)
        if waiting:
            oldest = min(waiting, key=lambda each: each.since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            text = "the server has too many connections"
            self._refuse(RequestError.later("busy", text))

    def _refuse(self, error: RequestError) -> None:
        """Answer an error, whatever the application does, and close the connection."""
        from .web import error_response

        path = "/"
        if self.scope:
            path, self.scope["state"]["refused"] = self.scope["path"], error
        response = error_response(error, path)
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        pairs = [(b"connection", b"close"), *response.raw_headers]
        head += [b"%s: %s" % pair for pair in pairs]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()


def check_size(size: int, most: int) -> None:
    """Refuse a body of more than ``most`` bytes.

    Raises:
        RequestError: it has more.
    """
    if size > most:
        text = f"the body has more than {most} bytes: shorten it"
        raise RequestError(text, status=413, code="request_too_large")


def close_late(connections: Iterable[Any]) -> None:
    """Close the connections whose requests, or readers, are late."""
    now = time.monotonic()
    for each in list(connections):
        limit = each.limit if isinstance(each, Connection) else None
        if limit is not None and now - each.since > limit:
            each.transport.abort()


class _Lines(logging.Filter):
    """Makes each record one line, and leaves out the rest of too many of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._since = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), str(record.msg)
        if now > self._since + _LINES_SECONDS:
            self._counts.clear()
            self._since = now
        self._counts[kind] += 1
        if self._counts[kind] > _LINES:
            return False
        text = record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text.partition(chr(10))[0]}: {reason_of(record.exc_info[1])}"
        if self._counts[kind] == _LINES:
            text += f" (no more lines of this kind for {_LINES_SECONDS:.0f} seconds)"
        record.msg, record.args = one_line(text), ()
        record.exc_info = record.exc_text = None
        return True


_LINES_FILTER = _Lines()
_LOGGERS = ("asyncio", "specdec.server", "uvicorn.error")


def limit_log() -> None:
    """Let the log of a serving process have few lines, and no tracebacks."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_LINES_FILTER)
