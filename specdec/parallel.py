"""The ranks of a tensor-parallel run: rank 0 decides, and all ranks compute.

Each rank holds a shard of the target and runs the same engine. Partial sums go through
``mlx.core.distributed``. Some facts differ between ranks (a clock, a request that
arrives, a cancel). Rank 0 decides these and sends them to the others, from host to
host: a collective would wait for the round that the device is computing. The other
ranks send back the tokens that they commit, and rank 0 compares them with its own.

Ranks that rank 0's command starts inherit a connection. Others meet at a port and prove
that they know the launcher's secret. MLX joins them only then: its ring asks nobody who
he is. A rank that ends closes its connection. The others notice at once, even while
their main thread waits inside a collective.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from . import backend
from .errors import RankError, SpecdecError, is_full, reason_of
from .utils.links import MEETING, Link, accept_ranks, reach_rank_0, supervised
from .utils.printable import shorten
from .utils.wire import decode, encode

if TYPE_CHECKING:
    import mlx.core as mx

T = TypeVar("T")
Facts = Any
#: Says how rank 0's facts and another rank's differ.
Explain = Callable[[Facts, Facts], str]

#: Names the inherited connection to rank 0, by its file descriptor.
LINK = "SPECDEC_RANKS_LINK"
#: The secret of ranks that meet at a port.
SECRET = "SPECDEC_RANKS_SECRET"
# Names rank 0's address, where no launcher does.
_HOST = "SPECDEC_RANKS_HOST"
_LEAST_SECRET = 16
_NO_SECRET = (
    f"ranks that mlx.launch starts need a secret of {_LEAST_SECRET} characters or more "
    f"in common: export {SECRET}=$(openssl rand -hex 32); for other machines add "
    f"--env {SECRET}=${SECRET}"
)
_RANK_0_ENDED = "rank 0 has ended: start all ranks again"
# Variables that mlx.launch sets, or Open MPI with --backend mpi: the rank, the number
# of ranks (Open MPI: also on this host), and files with a list of all ranks.
_RANK = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE = ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
_SIZE_HERE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_LISTS = ("MLX_HOSTFILE", "MLX_IBV_DEVICES")
# Whether MLX collects launches in CUDA graphs. It captures each call of NCCL into one
# of its own, for which NCCL makes a stream and an event.
_GRAPHS = "MLX_USE_CUDA_GRAPHS"
# Seconds that the stepping thread has to notice that the run is over.
PATIENCE = 2.0
_END, _ABORT, _LOST = ["end"], ["abort"], ["lost"]
#: Versions that have to be the same on all ranks.
_VERSIONS = ("specdec", "mlx", "mlx_lm")


def launched_rank() -> int | None:
    """The rank that a launcher gave this process; ``None``: it was started alone."""
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    return int(rank) if rank.isdecimal() else None


class Ranks(ABC):
    """One rank's view of all ranks; made by :meth:`join`.

    Attributes:
        group: the group of ``mlx.core.distributed``.
        rank: this process's rank; rank 0 leads.
        size: number of ranks.
        memory_size: bytes that MLX can use on the rank that has least. Ranks that use
            the same memory share it equally. ``None``: not known.
    """

    group: mx.distributed.Group

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.memory_size: int | None = None

    @staticmethod
    def join(started: Mapping[int, socket.socket] | None = None) -> Ranks | None:
        """Connect to the other processes that a launcher has started.

        Args:
            started: connections to ranks that this process, rank 0, has started.

        Returns:
            ``None`` if there are no others.

        Raises:
            RankError: the others cannot be reached or have other versions, or the
                environment has no secret in common.
        """
        rank = launched_rank()
        size = 1 if rank is None else _launched_size()
        if rank is None or size == 1:
            return None
        try:
            links = _links(rank, size, started)
            if rank == 0:
                return Leader(links)
            return Follower(rank, size, links[0])
        except (OSError, EOFError, ValueError) as error:
            if rank and isinstance(error, EOFError | BrokenPipeError):
                raise RankError(_RANK_0_ENDED) from error
            raise RankError(
                f"rank {rank} of {size} does not find the others "
                f"({shorten(error) or 'one has ended'}): start all ranks again, on "
                "machines that can connect to each other"
            ) from error

    def _join_devices(self, links: Iterable[Link], message: str = "") -> None:
        """Let MLX join the ranks, which know each other now."""
        import mlx.core as mx

        # On CUDA: MLX reads it before its first launch.
        os.environ.setdefault(_GRAPHS, "0")
        try:
            with supervised(links, message):
                self.group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise RankError(
                f"MLX cannot join the ranks ({shorten(error)}): start them with "
                "mlx.launch"
            ) from error
        joined = self.group.rank(), self.group.size()
        if joined != (self.rank, self.size):
            raise RankError(
                f"MLX has rank {joined[0]} of {joined[1]} where the launcher says "
                f"{self.rank} of {self.size}: start all ranks again"
            )

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

    def __init__(self, rank: int, link: Link):
        self.rank, self.link = rank, link
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

    def __init__(self, links: Mapping[int, Link]):
        super().__init__(0, len(links) + 1)
        self.turn = threading.RLock()
        self.failure: RankError | None = None
        self.last_words: Callable[[RankError], None] = _say
        self.broken = False
        self._changed = threading.Condition()
        self._heard = threading.Event()
        self._closing = False
        self._released = False  # the others may end
        self._peers = [_Peer(rank, links[rank]) for rank in sorted(links)]
        self.memory_size = self._meet()
        self._send(["memory", self.memory_size])
        self._join_devices(
            links.values(),
            "specdec: error: the ranks did not come together: start all of them again",
        )
        for peer in self._peers:
            peer.link.receive(MEETING)  # it has joined
            peer.thread = threading.Thread(
                target=self._listen, args=(peer,), name="specdec rank", daemon=True
            )
            peer.thread.start()
        atexit.register(self.close)

    def _meet(self) -> int | None:
        """Compare versions; return the memory that each rank may use."""
        deadline = time.monotonic() + MEETING
        facts = _facts()
        sizes, hosts = [facts.pop("memory_size")], [""]
        for peer in self._peers:
            try:
                seconds = max(1.0, deadline - time.monotonic())
                theirs = decode(peer.link.receive(seconds))
            except EOFError as error:
                raise RankError(
                    f"rank {peer.rank} of {self.size} has ended before it had begun"
                ) from error
            sizes.append(theirs.pop("memory_size"))
            hosts.append(peer.link.other_host)
            if theirs != facts:
                raise RankError(
                    f"rank {peer.rank} has other versions ({_named(theirs)}) than rank "
                    f"0 ({_named(facts)}): install the same"
                )
        if None in sizes:
            return None
        sharing = Counter(hosts)
        if backend.defaults().name == "cuda":  # NCCL needs one GPU per rank
            sharing = Counter(set(hosts))
        shares = (int(n) // sharing[h] for n, h in zip(sizes, hosts, strict=True))
        return min(shares)

    def release(self) -> None:
        with self.turn:
            self._released = True
            self._send(["release"])

    def send(self, *message: Any) -> None:
        """Send a message to the other ranks, which receive them in order.

        Raises:
            ConfigError: it has an object that cannot be sent; nothing was.
            RankError: a rank has ended.
        """
        with self.turn:
            with self._changed:
                self._released = False
                for peer in self._peers:
                    if peer.gone:
                        self._fail(f"rank {peer.rank} of {self.size} has ended")
            self._send(message)

    def _send(self, message: Sequence[Any]) -> None:
        data = encode(message)
        for peer in self._peers:
            with suppress(OSError):  # _listen notices that the rank has ended
                peer.link.send(data)

    def decide(self, what: str, make: Callable[[], T]) -> T:
        decided = make()
        self.send(what, decided)
        return decided

    def check(self, facts: Facts, explain: Explain, *, wait: bool) -> None:
        facts = decode(encode(facts))  # as they arrive from others
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
                difference = explain(mine, theirs)
                self._fail(f"rank {peer.rank} has parted from rank 0: {difference}")

    def _listen(self, peer: _Peer) -> None:
        """Receive a rank's messages until it ends."""
        with suppress(OSError, EOFError):
            while True:
                kind, content = decode(peer.link.receive())
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
            self._send(_ABORT)
        else:
            import mlx.core as mx

            mx.synchronize()
            self._send(_END)
        for peer in self._peers:
            peer.link.finish()
            if peer.thread is not None:
                peer.thread.join(PATIENCE + 1)
        if self.broken:
            _leave(None)


class Follower(Ranks):
    """A rank other than 0."""

    def __init__(self, rank: int, size: int, link: Link):
        super().__init__(rank, size)
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._link = link
        link.send(encode(_facts()))
        self.memory_size = decode(link.receive(MEETING))[1]
        self._join_devices([link])
        link.send(encode(["joined"]))
        threading.Thread(target=self._listen, name="specdec rank", daemon=True).start()
        atexit.register(link.finish)

    def receive(self) -> list[Any]:
        """The next message of rank 0; always ``["end"]`` once rank 0 has ended.

        Raises:
            RankError: rank 0 has ended unexpectedly.
        """
        data = self._inbox.get()
        message: list[Any] = decode(data)
        if message in (_END, _LOST):
            self._inbox.put(data)
        if message == _LOST:
            raise RankError(_RANK_0_ENDED)
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
        self._reply("facts", facts)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Let rank 0 report an error that is raised within the block."""
        try:
            yield
        except Exception as error:
            message = (
                str(error) if isinstance(error, SpecdecError) else reason_of(error)
            )
            if is_full(error):
                message = f"its memory is full, lower the batch size ({shorten(error)})"
            self._reply("error", message)
            raise

    def _reply(self, what: str, content: Facts) -> None:
        with suppress(OSError):  # the listener notices that rank 0 has ended
            self._link.send(encode([what, content]))

    def _listen(self) -> None:
        end, abort = encode(_END), encode(_ABORT)
        data = b""
        with suppress(OSError, EOFError):
            while data not in (end, abort):
                data = self._link.receive()
                if data != abort:
                    self._inbox.put(data)
        if data == abort:
            _leave(0)  # the main thread may wait in a collective
        if data == end:
            return
        self._inbox.put(encode(_LOST))
        time.sleep(PATIENCE)
        _leave(1)


def _links(
    rank: int, size: int, started: Mapping[int, socket.socket] | None
) -> dict[int, Link]:
    """Rank 0's connections to all others, or another rank's to rank 0."""
    if started is not None:
        return {each: Link(started[each], leads=True) for each in started}
    inherited = os.environ.pop(LINK, None)
    if inherited is not None:
        connection = socket.socket(fileno=int(inherited))
        connection.set_inheritable(False)
        return {0: Link(connection)}
    secret = os.environ.get(SECRET, "").encode()
    if len(secret) < _LEAST_SECRET:
        raise RankError(_NO_SECRET)
    if rank == 0:
        return accept_ranks(_address(), secret, size)
    return {0: reach_rank_0(_address(), secret, rank)}


def _launched_size() -> int:
    """The number of ranks, as the launcher tells it."""
    for name in _SIZE:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    for name in _LISTS:
        if path := os.environ.get(name):
            return max(1, len(_listed(path)))
    raise RankError(
        "the launcher does not say how many ranks there are: mlx.launch does"
    )


def _listed(path: str) -> list[Any]:
    """What a launcher's file has for each rank; nothing if there is only one."""
    text = Path(path).read_text("utf-8").strip()
    ranks: list[Any] = json.loads(text) if text else []
    return ranks


def _address() -> str:
    """Rank 0's address, as far as the launcher tells it."""
    for name in (_HOST, "NCCL_HOST_IP", "MLX_JACCL_COORDINATOR"):
        if address := os.environ.get(name):
            return address.rpartition(":")[0] if address.count(":") == 1 else address
    if path := os.environ.get("MLX_HOSTFILE"):
        first: str = _listed(path)[0][0]
        return first.rpartition(":")[0].strip("[]")
    if os.environ.get(_SIZE_HERE) == os.environ.get(_SIZE[1]):
        return "127.0.0.1"
    raise RankError(
        f"the launcher does not say where rank 0 is: set {_HOST} to its address"
    )


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
