"""The ranks of a tensor-parallel run: rank 0 decides, and all ranks compute.

Each rank holds a shard of the target and runs the same engine. Partial sums go through
``mlx.core.distributed``. Some facts differ between ranks (a clock, a request that
arrives, a cancel). Rank 0 decides these and sends them to the others, from host to
host: a collective would wait for the round that the device is computing. The other
ranks send back the tokens that they commit, and rank 0 compares them with its own.

A rank that ends closes its connection. The others notice at once, even while their main
thread waits inside a collective.
"""

from __future__ import annotations

import atexit
import hmac
import ipaddress
import json
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from . import backend
from .errors import RankError, SpecdecError, reason_of
from .utils.printable import shorten

if TYPE_CHECKING:
    import mlx.core as mx

T = TypeVar("T")
Facts = Any
#: Says how rank 0's facts and another rank's differ.
Explain = Callable[[Facts, Facts], str]

# Variables that mlx.launch sets, or Open MPI with --backend mpi.
_RANK = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
# Open MPI's variables for the number of ranks: in all, and on this host.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Seconds that ranks have to connect to rank 0, once it listens.
_MEETING = 60.0
# Seconds that a new connection has to send its greeting.
_GREETING = 5.0
# Seconds that the stepping thread has to notice that the run is over.
PATIENCE = 2.0
# Bytes of the note that says where rank 0 listens.
_NOTE = 512
_END, _ABORT, _LOST = ("end",), ("abort",), ("lost",)
#: Versions that have to be the same on all ranks.
_VERSIONS = ("specdec", "mlx", "mlx_lm")


def launched_rank() -> int | None:
    """The rank that a launcher gave this process; ``None``: it was started alone."""
    found = next((os.environ[name] for name in _RANK if name in os.environ), "")
    return int(found) if found.isdecimal() else None


class Ranks(ABC):
    """One rank's view of all ranks; made by :meth:`join`.

    Attributes:
        group: the group of ``mlx.core.distributed``.
        rank: this process's rank; rank 0 leads.
        size: number of ranks.
        memory_size: bytes that MLX can use on the rank that has least. Ranks that use
            the same memory share it equally. ``None``: not known.
    """

    def __init__(self, group: mx.distributed.Group):
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.memory_size: int | None = None

    @staticmethod
    def join() -> Ranks | None:
        """Connect to the other processes that a launcher has started.

        Returns:
            ``None`` if there are no others.

        Raises:
            RankError: the others cannot be reached, or have other versions.
        """
        if launched_rank() is None:
            return None
        import mlx.core as mx

        try:
            group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise RankError(
                f"the ranks do not find each other ({shorten(error)}): start them "
                "with mlx.launch"
            ) from error
        if group.size() == 1:
            return None
        try:
            return Leader(group) if group.rank() == 0 else Follower(group)
        except (OSError, ValueError) as error:
            raise RankError(
                f"rank {group.rank()} does not reach rank 0 ({shorten(error)}): let "
                "the machines connect to each other"
            ) from error

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def release(self) -> None:  # noqa: B027 - nothing, on most ranks
        """Let the other ranks leave :meth:`specdec.SpecDecoder.follow`.

        They also leave it when rank 0 ends. Afterwards another decoder can be made. On
        a rank other than 0 this does nothing.
        """

    @abstractmethod
    def decide(self, what: str, make: Callable[[], T]) -> T:
        """The result of ``make``, which is called only on rank 0.

        Args:
            what: names the decision; it must be the same on all ranks.
        """

    @abstractmethod
    def check(self, facts: Facts, explain: Explain, *, wait: bool) -> None:
        """Let rank 0 compare facts of all ranks.

        Args:
            facts: this rank's facts.
            explain: says how two facts differ, for the message.
            wait: on rank 0, wait until the facts of all ranks are known.

        Raises:
            RankError: on rank 0, if the facts differ or a rank has ended.
        """


def differing(mine: Mapping[str, Facts], theirs: Mapping[str, Facts]) -> str:
    """Name the facts that differ."""
    return f"another {', '.join(k for k in mine if mine[k] != theirs.get(k))}"


class _Peer:
    """Rank 0's connection to another rank, and the facts to compare."""

    def __init__(self, rank: int, connection: socket.socket, reader: Any):
        self.rank = rank
        self.connection, self.reader = connection, reader
        self.mine: deque[tuple[Facts, Explain]] = deque()
        self.theirs: deque[Facts] = deque()
        self.thread: threading.Thread | None = None
        self.gone = False


class Leader(Ranks):
    """Rank 0.

    Attributes:
        turn: the lock that must be held to step a session or add to one, so that all
            ranks do these things in the same order.
        failure: why the run is over, once it is.
        last_words: reports the failure before the process ends, if the main thread
            cannot.
        broken: a step did not end on this rank, so the others may wait in it for ever.
    """

    def __init__(self, group: mx.distributed.Group):
        super().__init__(group)
        self.turn = threading.RLock()
        self.failure: RankError | None = None
        self.last_words: Callable[[RankError], None] = _say
        self.broken = False
        self._changed = threading.Condition()
        self._heard = threading.Event()
        self._closing = False
        self._released = False  # the others may end
        self._peers = self._meet()
        for peer in self._peers:
            peer.thread = threading.Thread(
                target=self._listen, args=(peer,), name="specdec rank", daemon=True
            )
            peer.thread.start()
        atexit.register(self.close)

    def _meet(self) -> list[_Peer]:
        host, key = _address(), secrets.token_hex(16)
        with socket.create_server((host, 0)) as server:
            server.settimeout(_MEETING)
            where = json.dumps([host, server.getsockname()[1], key]).encode()
            _shared(self.group, where)
            own = _facts()
            peers: list[_Peer] = []
            sizes, hosts = [own.pop("memory_size")], [""]
            while len(peers) < self.size - 1:
                connection, _ = server.accept()
                reader = connection.makefile("rb")
                hello = _greeting(connection, reader, key)
                if hello is None:
                    connection.close()
                    continue
                rank, size = hello.pop("rank"), hello.pop("memory_size")
                if hello != own:
                    raise RankError(
                        f"rank {rank} has other versions ({_named(hello)}) than rank 0 "
                        f"({_named(own)}): install the same"
                    )
                sizes.append(size)
                hosts.append(_host(connection))
                peers.append(_Peer(rank, connection, reader))
        self.memory_size = None
        if None not in sizes:
            sharing = Counter(hosts)
            if backend.defaults().name == "cuda":  # NCCL needs one GPU per rank
                sharing = Counter(set(hosts))
            shares = (n // sharing[h] for n, h in zip(sizes, hosts, strict=True))
            self.memory_size = min(shares)
        for peer in peers:
            _tune(peer.connection)
        peers.sort(key=lambda peer: peer.rank)
        self._send(peers, ("memory", self.memory_size))
        return peers

    def release(self) -> None:
        with self.turn:
            self._released = True
            self._send(self._peers, ("release",))

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message to the other ranks, which receive them in order."""
        with self.turn:
            with self._changed:
                self._released = False
                for peer in self._peers:
                    if peer.gone:
                        self._fail(f"rank {peer.rank} of {self.size} has ended")
            self._send(self._peers, message)

    @staticmethod
    def _send(peers: Sequence[_Peer], message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        for peer in peers:
            with suppress(OSError):  # _listen notices that the rank has ended
                peer.connection.sendall(data)

    def decide(self, what: str, make: Callable[[], T]) -> T:
        decided = make()
        self.send((what, decided))
        return decided

    def check(self, facts: Facts, explain: Explain, *, wait: bool) -> None:
        with self._changed:
            for peer in self._peers:
                peer.mine.append((facts, explain))
                self._compare(peer)
            if wait:
                self._changed.wait_for(
                    lambda: self.failure or not any(p.mine for p in self._peers)
                )
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error that has ended the run, if there is one.

        Raises:
            RankError: the run is over.
        """
        if self.failure is not None:
            raise self._fresh()

    def _fresh(self) -> RankError:
        """A copy of the failure: threads must not share one traceback."""
        self._heard.set()
        return RankError(self.failure)

    def lost(self, error: Exception) -> Exception:
        """The error to raise for a failed step; the run's failure if there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, PATIENCE / 2)
        return error if self.failure is None else self._fresh()

    def _compare(self, peer: _Peer) -> None:
        while peer.mine and peer.theirs:
            (mine, explain), theirs = peer.mine.popleft(), peer.theirs.popleft()
            if mine != theirs:
                found = explain(mine, theirs)
                self._fail(f"rank {peer.rank} has parted from rank 0: {found}")

    def _listen(self, peer: _Peer) -> None:
        """Receive a rank's messages until it ends."""
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            while True:
                kind, content = pickle.load(peer.reader)
                with self._changed:
                    if kind == "error":
                        self._fail(f"rank {peer.rank}: {content}")
                    else:
                        peer.theirs.append(content)
                        self._compare(peer)
                    self._changed.notify_all()
        with self._changed:
            peer.gone = True
            if not self._released:
                self._fail(f"rank {peer.rank} of {self.size} has ended")
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        if self.failure is None and not self._closing:
            self.failure = RankError(f"{why}: start all ranks again")
            threading.Thread(target=self._end_soon, daemon=True).start()

    def _end_soon(self) -> None:
        assert self.failure is not None
        if not self._heard.wait(PATIENCE) and not self._closing:
            with suppress(Exception):
                self.last_words(self.failure)
            _leave(1)

    def close(self) -> None:
        """End the other ranks; called at the end of the process."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        if self.failure is not None:
            _leave(1)  # the device may wait for a rank that has ended
        if self.broken:
            self._send(self._peers, _ABORT)
        else:
            import mlx.core as mx

            mx.synchronize()
            self._send(self._peers, _END)
        for peer in self._peers:
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
            if peer.thread is not None:
                peer.thread.join(PATIENCE + 1)
        if self.broken:
            _leave(None)


class Follower(Ranks):
    """A rank other than 0."""

    def __init__(self, group: mx.distributed.Group):
        super().__init__(group)
        self._inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        host, port, key = json.loads(_shared(group, b""))
        self._connection = socket.create_connection((host, port), _MEETING)
        _tune(self._connection)
        hello = _facts() | {"key": key, "rank": self.rank}
        self._connection.sendall(json.dumps(hello).encode() + b"\n")
        reader = self._connection.makefile("rb")
        threading.Thread(
            target=self._listen, args=(reader,), name="specdec rank", daemon=True
        ).start()
        atexit.register(self._close)
        self.memory_size = self.decide("memory", lambda: None)

    def receive(self) -> tuple[Any, ...]:
        """The next message of rank 0; always ``("end",)`` once rank 0 has ended.

        Raises:
            RankError: rank 0 has ended unexpectedly.
        """
        message = self._inbox.get()
        if message in (_END, _LOST):
            self._inbox.put(message)
        if message == _LOST:
            raise RankError("rank 0 has ended: start all ranks again")
        return message

    def decide(self, what: str, make: Callable[[], T]) -> T:
        message = self.receive()
        if message[0] != what:
            raise RankError(
                f"rank 0 says {message[0]} where rank {self.rank} waits for {what}"
            )
        decided: T = message[1]
        return decided

    def check(self, facts: Facts, explain: Explain, *, wait: bool) -> None:
        self._reply(("facts", facts))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Let rank 0 report an error that is raised within the block."""
        try:
            yield
        except Exception as error:
            ours = isinstance(error, SpecdecError)
            self._reply(("error", str(error) if ours else reason_of(error)))
            raise

    def _reply(self, message: tuple[str, Facts]) -> None:
        with suppress(OSError):  # the listener notices that rank 0 has ended
            self._connection.sendall(pickle.dumps(message))

    def _listen(self, reader: Any) -> None:
        message = None
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            while message not in (_END, _ABORT):
                message = pickle.load(reader)
                if message != _ABORT:
                    self._inbox.put(message)
        if message == _ABORT:
            _leave(0)  # the main thread may wait in a collective
        if message == _END:
            return
        self._inbox.put(_LOST)
        time.sleep(PATIENCE)
        _leave(1)

    def _close(self) -> None:
        """Tell rank 0 at the end of the process."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _shared(group: mx.distributed.Group, note: bytes) -> bytes:
    """Broadcast a short note: rank 0's, returned on every rank."""
    import mlx.core as mx

    assert len(note) <= _NOTE
    own = mx.array([*note, *[0] * (_NOTE - len(note))], mx.int32)
    summed: Any = mx.distributed.all_sum(own, group=group).tolist()
    return bytes(summed).rstrip(b"\0")


def _greeting(
    connection: socket.socket, reader: Any, key: str
) -> dict[str, Any] | None:
    """Another rank's description of itself; ``None``: no valid greeting came."""
    connection.settimeout(_GREETING)
    try:
        hello = json.loads(reader.readline(4096))
        known = hmac.compare_digest(hello.pop("key"), key)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    found: dict[str, Any] = hello
    return found if known else None


def _host(connection: socket.socket) -> str:
    """The address of a rank's host; empty if it is rank 0's host."""
    theirs: str = connection.getpeername()[0]
    here = theirs == connection.getsockname()[0]
    return "" if here or ipaddress.ip_address(theirs).is_loopback else theirs


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect a lost machine soon."""
    connection.settimeout(None)
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


def _address() -> str:
    """Rank 0's address, as far as the launcher tells it."""
    for name in ("NCCL_HOST_IP", "MLX_JACCL_COORDINATOR"):
        if found := os.environ.get(name):
            return found.rpartition(":")[0] if found.count(":") == 1 else found
    hosts = os.environ.get("MLX_HOSTFILE")
    if hosts is None:  # Open MPI's launcher does not say it
        of_all, here = map(os.environ.get, _MPI_SIZES)
        return "127.0.0.1" if here is not None and here == of_all else _outward()
    first: str = json.loads(Path(hosts).read_text("utf-8"))[0][0]
    return first.rpartition(":")[0].strip("[]")


def _outward() -> str:
    """An address of this machine that others can reach.

    If the host name stands for a loopback address, as on Debian, this is the address
    from which the machine would send to others.
    """
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not ipaddress.ip_address(named).is_loopback:
            return named
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
        found: str = probe.getsockname()[0]
        return found
    return socket.gethostname()


def _facts() -> dict[str, Any]:
    described = backend.describe()
    versions = {name: described[name] for name in _VERSIONS}
    return {**versions, "memory_size": backend.memory_size()}


def _named(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _say(error: RankError) -> None:
    """Print the error to standard error, as the command line does."""
    print(f"specdec: error: {error}", file=sys.stderr)


def _leave(code: int | None) -> None:
    """End the process at once, without waiting for the device; ``None`` means 130."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(130 if code is None else code)
