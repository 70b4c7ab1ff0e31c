"""The port at which ranks meet: strangers beside one rank."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from specdec.utils.links import Link, _ports, accept_ranks, reach_rank_0

from .case import Case, fail, kind

HERE = "127.0.0.1"
# Bytes of a rank's answer, and of what rank 0 says first.
ANSWER, CHALLENGE = 68, 32


def odd_bytes(rng: random.Random) -> bytes:
    """What somebody says who is no rank."""
    size = rng.choice((0, 1, 31, 32, ANSWER - 1, ANSWER, ANSWER + 1, 5000))
    return rng.choice(
        (
            rng.randbytes(size),
            bytes(size),
            b"[" * size,
            b'{"a":' * size,
            b"\x80\x04cos\nsystem\n(S'true'\ntR." + bytes(size),
            b"GET /" + b"a" * size + b" HTTP/1.1\r\n\r\n",
            rng.randbytes(32) + (1).to_bytes(4, "big") + rng.randbytes(32),
        )
    )


def stranger(rng: random.Random, secret: bytes, stack: ExitStack) -> None:
    """Connect, and say something whole, slowly, or nothing; perhaps stay."""
    connection = stack.enter_context(
        socket.create_connection((HERE, _ports(secret)[0]), 10)
    )
    said = odd_bytes(rng)
    with suppress(OSError):
        for part in (said,) if rng.random() < 0.7 else (said[:7], said[7:]):
            connection.sendall(part)
        if rng.random() < 0.3:
            connection.shutdown(socket.SHUT_WR)
        if rng.random() < 0.3:
            connection.settimeout(10)
            answer = connection.recv(2 * CHALLENGE)
            if len(said) >= ANSWER and len(answer) > CHALLENGE:
                fail(f"rank 0 proved itself to a stranger: {said[:100]!r}")
        if rng.random() < 0.5:
            connection.close()


@kind
def the_ranks_port(case: Case) -> None:
    """Strangers neither pass for a rank nor keep one from rank 0."""
    rng, secret = case.rng, case.rng.randbytes(32)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        links = pool.submit(accept_ranks, HERE, secret, 2, 30)
        with suppress(OSError):  # it does not listen yet, or at another port
            for _ in range(rng.choice((1, 5, 30))):
                stranger(rng, secret, stack)
                time.sleep(0.001)
        if links.done():
            fail(f"a stranger is a rank, or ended the meeting: {links.exception()}")
        rank = reach_rank_0(HERE, secret, 1, 20)
        stack.callback(rank.close)
        leader: Link = links.result(20)[1]
        stack.callback(leader.close)
        leader.send(b"go")
        if rank.receive(10) != b"go":
            fail("the rank has another connection than rank 0")
