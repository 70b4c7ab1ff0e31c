"""Connections between ranks: who may connect, what is refused, and what cannot hold."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from specdec import EngineConfig, SamplingParams
from specdec.errors import ConfigError
from specdec.grammar import Grammar
from specdec.prompts import EncodedPrompt
from specdec.utils import links
from specdec.utils.links import Link, _ports, accept_ranks, reach_rank_0
from specdec.utils.wire import decode, encode

HERE = "127.0.0.1"


Links = dict[int, Link]


@contextmanager
def meeting(size: int, seconds: float = 60) -> Iterator[tuple[bytes, Future[Links]]]:
    """Rank 0 that waits for others: the secret, and what it will have."""
    secret = secrets.token_bytes(32)
    with ThreadPoolExecutor(1) as pool:
        links = pool.submit(accept_ranks, HERE, secret, size, seconds)
        yield secret, links
        if links.exception(60) is None:
            for link in links.result().values():
                link.close()


def connected(secret: bytes) -> socket.socket:
    """A connection to rank 0's port, as anybody can make."""
    for _ in range(1000):
        try:
            return socket.create_connection((HERE, _ports(secret)[0]), 10)
        except OSError:
            time.sleep(0.01)
    raise AssertionError("nobody listens")


def test_ranks_meet_in_any_order() -> None:
    """A rank that comes before another one, or two that are mixed up."""
    with meeting(4) as (secret, meets):
        others = {rank: reach_rank_0(HERE, secret, rank, 20) for rank in (3, 1, 2)}
        links = meets.result(20)
        for rank, other in others.items():
            other.send(b"%d" % rank)
            links[rank].send(b"to %d" % rank)
        for rank, other in others.items():
            assert links[rank].receive(20) == b"%d" % rank
            assert other.receive(20) == b"to %d" % rank
            other.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 4000,
        b"\x80\x04" * 200,
        b'{"key": 3}\n' * 20,
        bytes(1000),
    ],
    ids=len,
)
def test_others_are_not_listened_to(said: bytes) -> None:
    """Bytes of somebody else that are parsed, end the run, or pass for a rank."""
    with meeting(2) as (secret, links):
        with connected(secret) as other:
            challenge = other.recv(32, socket.MSG_WAITALL)
            assert len(challenge) == 32
            rest = b""
            with suppress(OSError):
                other.sendall(said)
                other.shutdown(socket.SHUT_WR)
                rest = other.recv(100)
            assert rest == b""
        assert not links.done()
        reach_rank_0(HERE, secret, 1, 20).close()
        assert links.result(20).keys() == {1}


def test_silent_and_slow_connections_hold_nobody() -> None:
    """200 that say nothing, and one that sends a byte now and then."""
    with ExitStack() as stack, meeting(2) as (secret, links):
        for _ in range(200):
            stack.enter_context(connected(secret))
        slow = stack.enter_context(connected(secret))
        slow.sendall(b"x")
        reach_rank_0(HERE, secret, 1, 20).close()
        assert links.result(20).keys() == {1}


@pytest.mark.parametrize(("seconds", "most"), [(0.3, 128), (1000.0, 2)])
def test_a_connection_that_proves_nothing_is_closed(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a descriptor; it is closed in time, or for newer ones."""
    monkeypatch.setattr(links, "_GREETING", seconds)
    monkeypatch.setattr(links, "_MOST_GREETINGS", most)
    with meeting(2) as (secret, meets), ExitStack() as stack:
        silent = [stack.enter_context(connected(secret)) for _ in range(4)]
        for each in silent[:2]:  # the challenge, and the end
            each.settimeout(60)
            assert len(each.recv(32, socket.MSG_WAITALL)) == 32
            with suppress(ConnectionError):
                assert each.recv(1) == b""
        assert not meets.done()
        reach_rank_0(HERE, secret, 1, 20).close()
        assert meets.result(20).keys() == {1}


def test_there_is_one_deadline() -> None:
    """A connection whose every byte puts the end off keeps rank 0 waiting for ever."""
    with meeting(3, seconds=1) as (secret, links), connected(secret) as slow:
        while not links.done():
            with suppress(OSError):
                slow.sendall(b"x")
            time.sleep(0.1)
        assert str(links.exception()) == "rank 1 did not come"


def test_ranks_that_came_are_let_go_at_the_deadline() -> None:
    """A rank that has proven itself waits for ever for messages of rank 0."""
    with meeting(3, seconds=2) as (secret, links):
        other = reach_rank_0(HERE, secret, 2, 20)
        assert str(links.exception(20)) == "rank 1 did not come"
        with pytest.raises(EOFError):
            other.receive(20)
        other.close()


def test_a_rank_that_comes_again_takes_its_place() -> None:
    """The connection before stays open, and its rank waits for ever."""
    with meeting(3) as (secret, links):
        before, after = (reach_rank_0(HERE, secret, 1, 20) for _ in range(2))
        with pytest.raises(EOFError):
            before.receive(20)
        reach_rank_0(HERE, secret, 2, 20).close()
        links.result(20)[1].send(b"x")
        assert after.receive(20) == b"x"
        before.close()
        after.close()


@pytest.mark.parametrize("rank", [0, 2, 2**31])
def test_a_number_that_is_no_rank_s_is_refused(rank: int) -> None:
    """It would take rank 0's place, or one that nobody has."""
    with meeting(2) as (secret, links):
        with pytest.raises(TimeoutError):
            reach_rank_0(HERE, secret, rank, 0.5)
        assert not links.done()
        reach_rank_0(HERE, secret, 1, 20).close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not greet is left after a second."""
    monkeypatch.setattr("specdec.utils.links._GREETING", 1.0)


@pytest.mark.usefixtures("impatient")
def test_rank_0_proves_itself_too() -> None:
    """Others who listen at the port would be told the run's models and prompts."""
    secret = secrets.token_bytes(32)
    heard: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(32))
            heard.append(connection.recv(1000))
            connection.sendall(bytes(32))
            heard.append(connection.recv(1000))

    with socket.create_server((HERE, _ports(secret)[0])) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(TimeoutError, match="no rank 0 with this secret"):
            reach_rank_0(HERE, secret, 1, 0.1)
        thread.join()
    assert len(heard[0]) == 68
    assert secret not in heard[0]
    assert heard[1] == b""


@pytest.mark.usefixtures("impatient")
def test_a_taken_port_is_left_out() -> None:
    """Another program's port ends the run, or is taken for rank 0's."""
    secret = secrets.token_bytes(32)
    with socket.create_server((HERE, _ports(secret)[0])), ThreadPoolExecutor(1) as pool:
        links = pool.submit(accept_ranks, HERE, secret, 2, 60)
        reach_rank_0(HERE, secret, 1, 60).close()
        links.result(20)[1].close()


@pytest.mark.parametrize("change", ["order", "bit", "again", "size"])
def test_only_the_peer_s_messages_are_taken(change: str) -> None:
    """Who can write into a connection can change, repeat or swap what is said."""
    ours, theirs = socket.socketpair()
    written, copy = socket.socketpair()
    with ours, theirs, written, copy:
        sender, receiver = Link(written, b"key", leads=True), Link(theirs, b"key")
        frames = []
        for message in (b"one", b"two"):
            sender.send(message)
            frames.append(bytearray(copy.recv(1000)))
        if change == "order":
            frames.reverse()
        elif change == "again":
            ours.sendall(frames[0])
            assert receiver.receive(10) == b"one"
        elif change == "size":
            frames[0][0] = 255
        else:
            frames[0][-1] ^= 1
        ours.sendall(frames[0])
        with pytest.raises(ConnectionError):
            receiver.receive(10)
        sender._reader.close()
        receiver._reader.close()


def test_both_sides_have_other_codes() -> None:
    """A message that is sent back passes for the peer's own."""
    ours, theirs = socket.socketpair()
    link = Link(ours, b"key", leads=True)
    with theirs:
        link.send(b"one")
        theirs.sendall(theirs.recv(1000))
        with pytest.raises(ConnectionError):
            link.receive(10)
        link.close()


def test_the_end_of_a_peer_is_noticed() -> None:
    """Within a message, or between two."""
    for part in (b"", b"\0" * 20):
        ours, theirs = socket.socketpair()
        link = Link(ours)
        theirs.sendall(part)
        theirs.close()
        with pytest.raises(EOFError):
            link.receive(10)
        link.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_call_that_holds_the_lock_is_ended(ends: bool) -> None:
    """Python's threads and signal handlers cannot: the call has to return first."""
    program = (
        "import ctypes, socket, sys\n"
        "from specdec.utils.links import Link, supervised\n"
        "link = Link(socket.socket(fileno=int(sys.argv[1])))\n"
        "with supervised([link], 'it is over', float(sys.argv[2])):\n"
        "    ctypes.PyDLL(None).sleep(60)\n"  # with the lock
    )
    seconds = "60" if ends else "1"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), seconds],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        if ends:
            time.sleep(1)
            ours.close()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (1, b"it is over\n")


def test_supervision_ends_with_the_block() -> None:
    """A peer that ends later is no failure, and SIGHUP has its handler again."""
    program = (
        "import signal, socket, time\n"
        "from specdec.utils.links import Link, supervised\n"
        "signal.signal(signal.SIGHUP, lambda *_: print('heard'))\n"
        "ours, theirs = socket.socketpair()\n"
        "with supervised([Link(ours)], 'it is over'): pass\n"
        "theirs.close()\n"
        "time.sleep(0.5)\n"
        "signal.raise_signal(signal.SIGHUP)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"heard\n", b"")


def sampler(logprobs: object) -> object:
    """Of a module, as a request may name one."""
    return logprobs


def processor(tokens: object, logits: object) -> object:
    """The same for a logits processor."""
    return logits


def test_what_travels() -> None:
    """A setting that arrives changed, and ranks that part for it."""
    params = SamplingParams(
        temperature=0.7,
        seed=2**63,
        logit_bias={3: -1.5, 4: float("-inf")},
        stop=("a", "\U0001f600\n"),
        stop_token_ids=(5,),
        grammar=Grammar.regex("[0-9]+"),
    )
    functions = SamplingParams(logits_processors=(processor,))
    config = EngineConfig(batch_size=3, num_draft_tokens="auto")
    prompt = EncodedPrompt("né", (1, 2))
    for value in (params, functions, config, prompt, [None, True, 0.1, "x", {"a": 1}]):
        assert decode(encode(value)) == value
    assert decode(encode(SamplingParams(sampler=sampler))).sampler is sampler
    assert decode(encode((1, (2, 3)))) == [1, [2, 3]]
    for table in (
        {"$": "os:system"},
        {"$": "mapping", "items": [[1, 2]]},
        {"$": "mapping", "items": 3},
        {"$": 5, "fields": {"$": {"$": None}}},
        {3: {"$": [sampler]}, "a": {}},
        [{"$": "specdec.sampling_params:SamplingParams", "fields": {}}],
        {"$": "no.module:at_all", "more": 1.5},
        {"": {"$": ""}, "$": {}},
        {None: {"$": {True: "$"}}},
    ):
        assert decode(encode(table)) == table
    for name, content in (("$", 1), ("logit_bias", {"$": 2})):
        message = ["call", {name: content}]
        assert decode(encode(message)) == message
    assert hash(decode(encode(prompt))) == hash(prompt)


def test_what_cannot_travel() -> None:
    """A closure that another rank cannot have, found before anything is sent."""
    for function in (lambda x: x, SamplingParams().updated, object()):
        with pytest.raises(ConfigError, match="make it a function of a module"):
            encode([function])


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:list", "subprocess:Popen", "fractions:Fraction"]
)
def test_reading_calls_nothing_but_records(name: str) -> None:
    """A message that runs what it names."""
    with pytest.raises(ValueError, match="is no record"):
        decode(b'{"$": "%s", "fields": {}}' % name.encode())
