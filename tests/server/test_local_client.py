"""The HTTP client for a Unix socket: what a peer that fails, or is slow, becomes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from specdec.server.local_client import local_client

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, and close the connection."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD + b"ok")
    writer.close()


async def breaks_off(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """End in the midst of the answer."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD)
    writer.close()


async def stays_silent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Take the request, and do not answer."""
    await reader.read()
    writer.close()


async def asked(path: str, peer: Peer | None, times: int) -> list[str]:
    """What so many requests in turn get from a peer; ``None``: nobody listens."""
    answers = []
    server = peer and await asyncio.start_unix_server(peer, path)
    async with local_client(path, read_seconds=0.2) as client:
        for _ in range(times):
            try:
                answers.append((await client.get("/")).text)
            except httpx.TransportError as error:
                answers.append(type(error).__name__)
            await asyncio.sleep(0.05)  # the connection's end arrives
    if server:
        server.close()
    return answers


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (answers, "ok"),
        (breaks_off, "RemoteProtocolError"),
        (stays_silent, "ReadTimeout"),
        (None, "ConnectError"),
    ],
)
def test_what_a_peer_becomes(peer: Peer | None, expected: str, tmp_path: Path) -> None:
    """An idle connection that has ended is used again, or an error has another kind."""
    path = str(tmp_path / "s")
    assert asyncio.run(asked(path, peer, 2)) == [expected] * 2


def test_a_socket_that_does_not_accept_yet(tmp_path: Path) -> None:
    """A connection that waits for its turn counts as made, and its request fails."""
    path = str(tmp_path / "s")

    async def ask(listener: socket.socket, before: socket.socket) -> str:
        listener.bind(path)
        listener.listen(0)
        before.connect(path)  # no other connection fits
        async with local_client(path, read_seconds=5) as client:
            with pytest.raises(httpx.ConnectTimeout):
                await client.get("/", timeout=0.1)
            asking = asyncio.create_task(client.get("/"))
            await asyncio.sleep(0.05)
            assert not asking.done()
            listener.accept()[0].close()
            async with await asyncio.start_unix_server(answers, sock=listener):
                return (await asking).text

    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        assert asyncio.run(ask(one, other)) == "ok"


def test_an_idle_connection_that_was_reset_is_not_used(tmp_path: Path) -> None:
    """The next request fails, although its replica serves."""

    async def ask(listener: socket.socket) -> list[str]:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            for _ in range(2):
                peer, _ = await loop.sock_accept(listener)
                await loop.sock_recv(peer, 1)  # what is left unread resets it
                await loop.sock_sendall(peer, HEAD + b"ok")
                peer.close()

        serving = asyncio.create_task(serve())
        texts = []
        async with local_client(str(tmp_path / "s"), read_seconds=5) as client:
            for _ in range(2):
                texts.append((await client.get("/")).text)
                await asyncio.sleep(0.05)
        await serving
        return texts

    with socket.socket(socket.AF_UNIX) as listener:
        assert asyncio.run(ask(listener)) == ["ok", "ok"]
