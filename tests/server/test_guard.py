"""Strangers who send nothing, too much or nonsense, before an endpoint is reached."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from specdec import ServerError, SpecDecoder
from specdec.server import guard, running, web
from specdec.server.config import ServerConfig
from specdec.server.errors import RequestError, request_error
from specdec.utils.data_files import parse_json
from tests.server.harness import Running, until
from tests.server.test_serving import ENDLESS, endless


@contextmanager
def guarded(
    *endpoints: Callable[[Request], Awaitable[Response]], most: int = 8, **options: Any
) -> Iterator[tuple[str, int]]:
    """URL and port of a serving process's application, in a thread."""

    async def drain() -> None:
        pass

    routes = [
        Route(f"/{each.__name__}", each, methods=["GET", "POST"]) for each in endpoints
    ]
    app = web.application(routes, ServerConfig(max_body_bytes=1000, **options))
    service = SimpleNamespace(healthy=True, failure=None, pending=0, drain=drain)
    app.state.service = service
    started = threading.Event()
    with pytest.MonkeyPatch.context() as patch, running.bind("127.0.0.1", 0) as port:
        patch.setattr(running, "max_connections", lambda each: most)
        arguments = (app, 1, port, started.set)
        thread = threading.Thread(target=running.run, args=arguments)
        thread.start()
        assert started.wait(60)
        try:
            yield running.url_of(port), port.getsockname()[1]
        finally:
            service.failure = ServerError("the end")
            thread.join(60)
    assert not thread.is_alive()


async def ok(request: Request) -> Response:
    return PlainTextResponse("ok")


async def bodies(request: Request) -> Response:
    return PlainTextResponse(str(len(await web.Bodies(1000).read(request))))


def exchanged(port: int, data: bytes) -> tuple[bytes, bytes]:
    """The status line and the body that bytes are answered with, up to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection."""
    try:
        return not connection.recv(1000, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_idle_connections_keep_nobody_out() -> None:
    """As many as there may be, which send nothing, or a part of a request."""
    parts = (
        b"",
        b"GET /ok HT",
        b"POST /ok HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n",
    )
    with guarded(ok) as (url, port), ExitStack() as stack:
        idle = []
        for i in range(40):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", port))
            )
            connection.sendall(parts[i % 3])
            idle.append(connection)
            if i % 10 == 9:
                assert httpx.get(f"{url}/ok").text == "ok"
        until(lambda: sum(map(ended, idle)) >= 32)
        assert not ended(idle[-1])  # the oldest give way


def test_answers_that_are_due_are_not_cut_for_others() -> None:
    """A running answer gives way to nobody: the next one is told to come later."""
    go, requests = threading.Event(), list[Request]()

    async def slow(request: Request) -> Response:
        requests.append(request)
        await asyncio.to_thread(go.wait)
        return PlainTextResponse("slow")

    with guarded(slow, most=2) as (url, port), ExitStack() as stack:
        ask = b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n"
        both = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(2)
        ]
        for each in both:
            each.sendall(ask)
        until(lambda: len(requests) == 2)
        answer = httpx.get(f"{url}/slow")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "busy"
        assert answer.headers["retry-after"]
        go.set()
        for each in both:
            answered = b""
            while not answered.endswith(b"slow"):  # it may come in several parts
                part = each.recv(1000)
                assert part, answered
                answered += part


def test_a_request_has_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then that holds a connection for good, also after an answer."""
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(guard, "_GRACE", 0.0)
    whole = b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"
    with guarded(ok) as (_, port), ExitStack() as stack:
        late = []
        for begin in (b"", whole[:9], whole + b"GET", body, body + b"a"):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", port))
            )
            connection.sendall(begin)
            late.append(connection)

        def closed() -> bool:
            for each in late:
                with suppress(OSError):
                    each.send(b"a")
            return all(map(ended, late))

        until(closed)


def test_each_state_of_a_connection_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body that may last for ever, or one that pays for the silence before it.

    A connection that is cut right after a long answer, or kept for a client that
    never takes the last bytes.
    """
    clock, go, aborted = [0.0], asyncio.Event(), list[bool]()
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def connect() -> Any:
        go.clear()
        aborted.clear()
        config = uvicorn.Config(app, http=guard.Connection, log_config=None)
        config.load()
        connection: Any = guard.Connection(config, ServerState(), {})
        connection.connection_made(
            SimpleNamespace(
                get_extra_info=lambda name: None,
                is_closing=lambda: False,
                write=lambda data: None,
                close=lambda: None,
                abort=lambda: aborted.append(True),
                pause_reading=lambda: None,
                resume_reading=lambda: None,
                set_protocol=lambda protocol: None,
            )
        )
        return connection

    def lasts(connection: Any, seconds: float) -> bool:
        """Whether it is there after so many seconds."""
        clock[0] += seconds
        guard.close_late([connection])
        return not aborted

    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"

    async def check() -> None:
        with_body = guard.BODY_SECONDS + guard._GRACE
        late = await connect()
        assert lasts(late, guard.HEAD_SECONDS - 1)
        late.data_received(head)
        assert lasts(late, with_body - 1)
        assert not lasts(late, 2)
        answered = await connect()
        answered.data_received(head + b"{}")
        assert lasts(answered, 1000)
        go.set()
        while answered.conn.our_state is not h11.IDLE:
            await asyncio.sleep(0)
        assert lasts(answered, guard.HEAD_SECONDS - 1)
        assert not lasts(answered, 2)
        unread = await connect()
        unread.data_received(head + b"{}")
        unread.transport.is_closing = lambda: True
        assert lasts(unread, guard.BODY_SECONDS - 1)
        assert not lasts(unread, 2)
        go.set()
        refused = await connect()  # and its body is not read, but goes on
        refused.data_received(head + b"{")
        assert lasts(refused, with_body - 1)
        go.set()
        while refused.conn.our_state is not h11.DONE:
            await asyncio.sleep(0)
        assert not lasts(refused, 2)
        await asyncio.gather(*unread.tasks, *late.tasks)

    asyncio.run(check())


def test_a_kind_of_line_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is silent for good about what goes on for days."""
    clock = [0.0]
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    lines = guard._Lines()

    def passes(text: str) -> bool:
        return lines.filter(logging.makeLogRecord({"msg": text}))

    assert [passes("one") for _ in range(9)] == [i < guard._LINES for i in range(9)]
    assert passes("another")
    clock[0] += guard._LINES_SECONDS + 1
    assert passes("one")


def test_what_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A traceback for each, without bound, and an answer that is no JSON.

    The targets once made Starlette's URL fail.
    """

    async def broken(request: Request) -> Response:
        raise KeyError("what nobody\nexpected")

    def asked(port: int, line: bytes) -> tuple[bytes, Any]:
        headers = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        first, body = exchanged(port, line + headers)
        return first, json.loads(body)

    with caplog.at_level(logging.WARNING), guarded(ok, broken) as (_, port):
        for line, status in (
            (b"GET /broken", b"500"),
            (b"GET /ok#/metrics", b"404"),
            (b"GET %2f", b"404"),
            (b"GET http://[/ok", b"404"),
            (b"GET *", b"404"),
        ):
            first, said = asked(port, line)
            assert status in first, (line, first, said)
            assert said["error"]["message"].isprintable()
        for _ in range(30):
            assert asked(port, b"GET /broken")[1]["error"]["code"] == "internal_error"
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"\x00\r\n\r\n")
                connection.recv(100)
    texts = [record.getMessage() for record in caplog.records]
    assert 2 <= len(texts) <= 2 * guard._LINES, texts
    assert all(text.isprintable() for text in texts)
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /ok HTTP/1.1\r\n\r\n",
        b"POST /ok HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
        b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n\xff\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_json(data: bytes) -> None:
    """A client shows the reason only if the error has its protocol's form."""
    with guarded(ok) as (_, port):
        _, body = exchanged(port, data)
    assert body.endswith(b"}}"), body
    said = json.loads(body[body.rindex(b'{"error"') :])["error"]
    assert said["code"] == "invalid_http"
    assert "https://" in said["message"]


def test_a_target_may_name_the_host() -> None:
    """RFC 9112, 3.2.2: a server accepts absolute targets, whose host then counts."""
    with guarded(ok, bodies) as (_, port):
        for target, host, status in (
            (b"http://localhost/ok", b"localhost", b"200"),
            (b"HTTP://127.0.0.1:80/ok?x=/y", b"a.example", b"200"),
            (b"https://[::1]/o%6b", b"localhost", b"200"),
            (b"http://localhost", b"localhost", b"404"),
            (b"http://localhost?x", b"localhost", b"404"),
            (b"http://evil.example/ok", b"localhost", b"403"),
            (b"ftp://localhost/ok", b"localhost", b"404"),
        ):
            lines = b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
            first, body = exchanged(port, lines % (target, host))
            assert status in first, (target, first, body)


@pytest.mark.parametrize("size", [b"3ee", b"80000000", b"f" * 16, b"f" * 20, b"f" * 21])
def test_a_chunk_that_is_too_large_is_not_awaited(
    size: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that cannot be taken holds its connection until its time is over.

    The log takes what the connection has refused for a client that has left.
    """
    head = (
        b"POST /bodies HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with guarded(bodies, log_requests=True) as (_, port):
        for before in (b"", b"5\r\n[1,2]\r\n"):
            for after in (b"", b"[1,2"):
                first, body = exchanged(port, head + before + size + b"\r\n" + after)
                if len(size) <= 20:
                    assert first == b"HTTP/1.1 413 Request Entity Too Large"
                    assert json.loads(body)["error"]["code"] == "request_too_large"
                else:  # no size at all
                    assert first == b"HTTP/1.1 400 Bad Request"
        whole = b"3e8\r\n" + b"1" * 1000 + b"\r\n0\r\n\r\n"
        assert exchanged(port, head + whole) == (b"HTTP/1.1 200 OK", b"1000")
    lines = [r.getMessage() for r in caplog.records if r.name == "specdec.requests"]
    assert " 200 in " in lines.pop()
    why = "413 in .* s: refused: the body has more than 1000"
    if len(size) > 20:
        why = "400 in .* s: refused: the request is no HTTP"
    assert len(lines) == 4
    assert all(re.search(why, line) for line in lines), lines


def test_nobody_names_an_address_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is another one, by a header that proxies send."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def who(request: Request) -> Response:
        return PlainTextResponse(web.client_of(request.scope, ()))

    with guarded(who) as (url, _):
        headers = {"X-Forwarded-For": "192.0.2.1"}
        assert httpx.get(f"{url}/who", headers=headers).text == "127.0.0.1"


def test_connections_fit_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap is useless if descriptors run out before it."""
    limits = [(1024, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: limits.append(new))
    for each, fewest, most in ((1, 512, 1024), (2, 256, 512)):
        assert fewest < guard.max_connections(each) <= most
    limits[:] = [(256, 1 << 20)]
    assert guard.max_connections(2) == 4096
    soft, hard = limits[-1]
    assert 8192 < soft < hard == 1 << 20


# -- bodies -------------------------------------------------------------------------


class Client:
    """Sends a part of a body again and again, or once, and never the end."""

    def __init__(
        self,
        part: bytes,
        kind: str = "application/json",
        *,
        once: bool = False,
        **headers: str,
    ):
        self.part, self.once, self.sent = part, once, 0
        headers = {"content-type": kind, **headers}
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        self.request = Request({"type": "http", "headers": pairs}, self.receive)

    async def receive(self) -> Any:
        if not self.part or (self.once and self.sent):
            await asyncio.Event().wait()
        self.sent += len(self.part)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": self.part, "more_body": True}


def refusal(bodies: web.Bodies, client: Client) -> RequestError:
    with pytest.raises(RequestError) as raised:
        asyncio.run(bodies.read(client.request))
    return raised.value


def test_a_body_is_limited_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no end, that says that it is too long, or that never comes."""
    bodies = web.Bodies(1000)
    endless = Client(b"a" * 300)
    assert refusal(bodies, endless).status == 413
    assert endless.sent == 1200
    for length in ("1001", "9" * 20, "0" * 30 + "1001"):
        said = Client(b"a", content_length=length)
        assert refusal(bodies, said).status == 413
        assert said.sent == 0
    monkeypatch.setattr(web, "BODY_SECONDS", 0.01)
    assert refusal(bodies, Client(b"")).status == 408


def test_all_bodies_are_limited_together() -> None:
    """Thousands of clients that send a large body each, and do not end it."""

    async def ask() -> list[Any]:
        bodies = web.Bodies(1000)
        clients = [Client(b"a" * 900, once=True) for _ in range(40)]
        tasks = [asyncio.create_task(bodies.read(each.request)) for each in clients]
        await asyncio.sleep(0.05)
        refused = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert bodies._left == 16_000  # nothing of it is lost
        return refused

    refused = asyncio.run(ask())
    assert len(refused) == 40 - 17
    assert all(isinstance(e, RequestError) and e.code == "busy" for e in refused)


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "text/plain; application/json", "multipart/form-data",
     "application/x-www-form-urlencoded", "text/json", "application/jsonp"],
)  # fmt: skip
def test_only_json_is_taken(kind: str) -> None:
    """A page of another site may post these without asking the server."""
    assert refusal(web.Bodies(1000), Client(b"{}", kind)).status == 415


@pytest.mark.parametrize(
    ("coding", "status"),
    [("gzip", 415), ("identity", 413), ("Identity", 413), ("", 413)],
)
def test_a_body_that_is_packed_is_refused_as_such(coding: str, status: int) -> None:
    """It was called no JSON, which the client's author believed to send.

    Names of encodings have no case (RFC 9110, 8.4.1); what is not packed is read.
    """
    refused = refusal(web.Bodies(1000), Client(b"a" * 300, content_encoding=coding))
    assert refused.status == status
    assert ("gzip" in str(refused)) == (status == 415)


def test_elements_are_counted_before_they_are_parsed() -> None:
    """16 MB of empty lists become 350 MB, while nothing else can run.

    What may be many is not refused: prompts, tokens, texts that look like lists.
    """
    size = 16 << 20
    for part in (b"[],", b'"a":1,', b'[{"a":"[]"}],'):
        data = b"[" + part * (size // len(part)) + b"1]"
        tracemalloc.start()
        try:
            with pytest.raises(RequestError, match="lists and objects"):
                web.check_elements(data, 1 << 17)
            assert tracemalloc.get_traced_memory()[1] < 3 * size
        finally:
            tracemalloc.stop()
    tricky = ["[" * 1000, ",{" * 1000, '\\"', '"', "\\", '\\\\",[' * 100]
    for value in (
        {"prompt": ["a"] * web.MOST_PROMPTS},
        {"prompt": [list(range(900))] * web.MOST_PROMPTS},
        {"prompt": tricky * 300},
        {"messages": [{"role": "user", "content": "a"}] * 60_000},
    ):
        data = json.dumps(value).encode()
        web.check_elements(data, 4096)
        assert parse_json(data) == value
    # They are counted outside texts, whatever those hold.
    with pytest.raises(RequestError):
        web.check_elements(json.dumps(tricky * 9 + [[]] * 200_000).encode(), 4096)


def test_too_many_elements_over_http(server: Running) -> None:
    """A check that no endpoint calls."""
    body = b'{"messages": [' + b"[]," * 300_000 + b"[]]}"
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
        answer = httpx.post(server.url + path, content=body, headers=headers)
        assert answer.status_code == 400
        assert "lists and objects" in answer.text


# -- what the router reads ----------------------------------------------------------


def test_only_the_engine_ends_a_replica() -> None:
    """One request that fails in another way, by which the router gives a replica up."""
    for error in (RuntimeError("can't start new thread"), MemoryError(),
                  ClientDisconnect(), OSError(24, "Too many open files")):  # fmt: skip
        refused = request_error(error, {})
        assert (refused.status, refused.code) == (500, "internal_error")
        headers = web.error_response(refused, "/v1").headers
        assert web.ENDS_HEADER.decode() not in headers
    ends = request_error(ServerError("its engine failed"), {})
    assert web.error_response(ends, "/v1").headers["x-specdec-ends"] == "engine_failed"


def test_all_rows_of_one_who_leaves_end(decoder: SpecDecoder, server: Running) -> None:
    """Several choices, of which only the first is cancelled."""
    engine = server.service.engine
    before = engine.stats.generated_tokens
    client = endless(server, n=3)
    until(lambda: engine.pending == 3)
    client.close()
    until(lambda: engine.pending == 0)
    until(lambda: engine.load.running == 0)
    # None of them ran to its end.
    assert engine.stats.generated_tokens - before < ENDLESS["max_tokens"]


def test_one_line_for_a_request_of_several_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A check of the router's, or a refusal after which it asks another replica."""

    async def ending(request: Request) -> Response:
        return web.error_response(RequestError.stopping(), "/ending")

    async def ask(client: Any) -> None:
        transport = httpx.ASGITransport(app, client=client)
        url = "http://localhost"
        async with httpx.AsyncClient(transport=transport, base_url=url) as asking:
            for path in ("/ok", "/ending"):
                for headers in ({}, named):
                    await asking.get(path, headers=headers)

    routes = [Route("/ok", ok), Route("/ending", ending)]
    app = web.application(routes, ServerConfig(log_requests=True))
    named = {web.CLIENT_HEADER.decode(): "client"}
    for client, lines in ((None, ["/ok 200"]), (("::1", 1), ["/ok 200", "/ok 200",
                          "/ending 503", "/ending 503"])):  # fmt: skip
        caplog.clear()
        asyncio.run(ask(client))
        records = [r for r in caplog.records if r.name == "specdec.requests"]
        assert [" ".join(r.getMessage().split()[1:3]) for r in records] == lines
