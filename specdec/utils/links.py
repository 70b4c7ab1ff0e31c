"""Connections between ranks. Nothing of a peer is read before it has proven itself.

Ranks that share a secret meet at a port of rank 0::

    rank 0                             rank r
    a challenge                   ->
                                  <-   a challenge, r, proof
    proof                         ->

A challenge is random. A proof is an HMAC-SHA256 of both challenges with the secret, so
none serves twice. Each message has such a code, too, with a key of its connection and
the message's number. Nothing is encrypted. No mlx here.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

#: Seconds that ranks have to meet.
MEETING = 120.0
# Seconds that a connection has to prove itself, and the most that do so at once.
_GREETING, _MOST_GREETINGS = 5.0, 128
_CHALLENGE = _PROOF = 32
_RANK = 4
_ANSWER = _CHALLENGE + _RANK + _PROOF
# Bytes before a message: its length, and its code. Bytes of a message.
_LENGTH, _LARGEST = 8, 1 << 30
# Where rank 0 may listen: below the ports that systems give to outgoing connections.
_FIRST_PORT, _NUM_PORTS, _TRIES = 20_000, 12_000, 8


class Link:
    """A connection to another rank; messages arrive whole and in order.

    Args:
        connection: to a peer that is known: inherited, or proven.
        key: authenticates each message. Inherited connections need none.
        leads: whether this is rank 0.
    """

    def __init__(
        self, connection: socket.socket, key: bytes = b"", *, leads: bool = False
    ):
        connection.settimeout(None)
        self.connection = connection
        self._key, self._side = key, leads
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()
        self._sent = self._received = 0

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the peer has ended.
        """
        with self._sending:
            code = self._code(self._side, self._sent, message)
            self._sent += 1
            head = len(message).to_bytes(_LENGTH, "big") + code
            self.connection.sendall(head + message)

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message.

        Args:
            seconds: how long to wait; ``None``: for ever.

        Raises:
            EOFError: the peer has ended.
            OSError: the connection is lost, the time is over, or somebody else wrote.
        """
        self.connection.settimeout(seconds)
        size = int.from_bytes(self._exactly(_LENGTH), "big")
        code = self._exactly(_PROOF)
        if size > _LARGEST:
            raise ConnectionError(f"a message of {size} bytes")
        message = self._exactly(size)
        expected = self._code(not self._side, self._received, message)
        if not hmac.compare_digest(code, expected):
            raise ConnectionError("a message that the other rank did not send")
        self._received += 1
        return message

    @property
    def other_host(self) -> str:
        """The address of the peer's host; empty if it is this host."""
        if self.connection.family == socket.AF_UNIX:
            return ""
        theirs: str = self.connection.getpeername()[0]
        here = theirs == self.connection.getsockname()[0]
        return "" if here or ipaddress.ip_address(theirs).is_loopback else theirs

    def finish(self) -> None:
        """Tell the peer that this rank sends nothing more."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self.connection.close()

    def _exactly(self, size: int) -> bytes:
        data: bytes = self._reader.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def _code(self, by_leader: bool, number: int, message: bytes) -> bytes:
        head = bytes([by_leader]) + number.to_bytes(8, "big")
        return hmac.digest(self._key, head + message, "sha256")


# -- meeting at a port --------------------------------------------------------------


@dataclass
class _Greeting:
    """What a connection has said so far."""

    until: float
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(_CHALLENGE))
    answer: bytes = b""


def accept_ranks(
    host: str, secret: bytes, size: int, seconds: float = MEETING
) -> dict[int, Link]:
    """As rank 0, wait for the other ranks; connections of others are closed.

    Args:
        host: the address to listen at.
        size: number of ranks.
        seconds: how long to wait for all of them.

    Raises:
        OSError: the address is not this machine's, or the time is over.
    """
    deadline = time.monotonic() + seconds
    greetings: dict[socket.socket, _Greeting] = {}
    links: dict[int, Link] = {}
    with ExitStack() as open_here:
        server = open_here.enter_context(_listen(host, secret))
        selector = open_here.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)

        def leave(connection: socket.socket) -> None:
            selector.unregister(connection)
            del greetings[connection]

        def drop(connection: socket.socket) -> None:
            leave(connection)
            connection.close()

        @open_here.callback
        def drop_all() -> None:
            for connection in [*greetings]:
                drop(connection)
            if len(links) < size - 1:
                for link in links.values():
                    link.close()

        while len(links) < size - 1:
            now = time.monotonic()
            for connection in [c for c, g in greetings.items() if g.until < now]:
                drop(connection)
            if now > deadline:
                missing = sorted({*range(1, size)} - links.keys())
                raise TimeoutError(f"rank {missing[0]} did not come")
            for ready, _ in selector.select(min(1.0, deadline - now)):
                if ready.fileobj is server:
                    with suppress(OSError):
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        if len(greetings) == _MOST_GREETINGS:
                            drop(next(iter(greetings)))
                        greeting = _Greeting(now + _GREETING)
                        greetings[connection] = greeting
                        selector.register(connection, selectors.EVENT_READ)
                        connection.send(greeting.challenge)
                    continue
                connection = ready.fileobj  # type: ignore[assignment]
                if connection not in greetings:
                    continue
                greeting = greetings[connection]
                data = b""
                with suppress(OSError):
                    data = connection.recv(_ANSWER - len(greeting.answer))
                greeting.answer += data
                if not data:
                    drop(connection)
                elif len(greeting.answer) == _ANSWER:
                    rank, key, proof = _proven(secret, greeting)
                    if not 0 < rank < size:
                        drop(connection)
                        continue
                    leave(connection)
                    with suppress(OSError):
                        connection.send(proof)
                    _tune(connection)
                    if rank in links:
                        links[rank].close()
                    links[rank] = Link(connection, key, leads=True)
    return links


def reach_rank_0(host: str, secret: bytes, rank: int, seconds: float = MEETING) -> Link:
    """As another rank, connect to rank 0.

    Raises:
        OSError: nobody who knows the secret listens there.
    """
    deadline = time.monotonic() + seconds
    while True:
        for port in _ports(secret):
            with suppress(OSError, EOFError):
                return _greet(host, port, secret, rank)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no rank 0 with this secret at {host}")
        time.sleep(0.1)


def _greet(host: str, port: int, secret: bytes, rank: int) -> Link:
    until = time.monotonic() + _GREETING
    connection = socket.create_connection((host, port), _GREETING)
    try:
        theirs = _read(connection, _CHALLENGE, until)
        greeting = _Greeting(until, theirs)
        head = secrets.token_bytes(_CHALLENGE) + rank.to_bytes(_RANK, "big")
        greeting.answer = head + _proof(secret, b"rank", theirs + head)
        connection.sendall(greeting.answer)
        _, key, expected = _proven(secret, greeting)
        if not hmac.compare_digest(_read(connection, _PROOF, until), expected):
            raise ConnectionError("somebody else listens")
    except BaseException:
        connection.close()
        raise
    _tune(connection)
    return Link(connection, key)


def _proven(secret: bytes, greeting: _Greeting) -> tuple[int, bytes, bytes]:
    """The rank that an answer proves, 0 if it does not; the key; rank 0's proof."""
    head = greeting.answer[:-_PROOF]
    both = greeting.challenge + head
    right = _proof(secret, b"rank", both)
    known = hmac.compare_digest(greeting.answer[-_PROOF:], right)
    rank = int.from_bytes(head[_CHALLENGE:], "big") if known else 0
    return rank, _proof(secret, b"key", both), _proof(secret, b"rank 0", both)


def _proof(secret: bytes, what: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, what + b"\0" + content, "sha256")


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _ports(secret: bytes) -> list[int]:
    """Where rank 0 may listen: nobody without the secret knows."""
    digest = hashlib.sha256(b"ports" + secret).digest()
    numbers = (int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4))
    return [_FIRST_PORT + number % _NUM_PORTS for number in numbers][:_TRIES]


def _listen(host: str, secret: bytes) -> socket.socket:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    error: OSError | None = None
    for port in _ports(secret):
        try:
            server = socket.create_server((host, port), family=family, backlog=512)
        except OSError as failed:
            error = failed
        else:
            server.setblocking(False)
            return server
    assert error is not None
    raise error


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect a lost machine soon."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Seconds of silence (two names: Linux, macOS), seconds between probes, probes.
    for name, number in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPALIVE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)


# -- supervision --------------------------------------------------------------------

# Waits until standard input closes. If a connection does first, or time is over, it
# prints the message and signals its parent.
_SUPERVISOR = """\
import os, select, sys
parent, signal, seconds, message, *links = sys.argv[1:]
poll = select.poll()
for link in [0, *map(int, links)]:
    poll.register(link, getattr(select, "POLLRDHUP", 0))
if 0 not in dict(poll.poll(float(seconds) * 1000)):
    if message:
        print(message, file=sys.stderr, flush=True)
    if os.getppid() == int(parent):
        os.kill(int(parent), int(signal))
"""


@contextmanager
def supervised(
    links: Iterable[Link], message: str, seconds: float = MEETING
) -> Iterator[None]:
    """End this process with code 1 if a peer ends within the block.

    MLX joins ranks in a call that holds Python's lock and can wait for ever, so another
    process looks after the links.

    Args:
        message: printed to standard error before; empty: nothing.
        seconds: how long the block may take.
    """
    numbers = [each.connection.fileno() for each in links]
    # SIGHUP has the number 1: the C library's _exit, as its handler, exits with that.
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    leave = ctypes.cast(library._exit, ctypes.c_void_p)
    before = library.signal(signal.SIGHUP, leave)
    try:
        with subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _SUPERVISOR),
                *(str(os.getpid()), str(int(signal.SIGHUP)), str(seconds), message),
                *map(str, numbers),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            process_group=0,
        ):
            yield
    finally:
        library.signal(signal.SIGHUP, before)
