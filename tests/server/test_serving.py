"""Strangers: many at once, those who leave, those who do not read, the server's end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from specdec import ConfigError, EngineConfig, SamplingParams, ServerError, SpecDecoder
from specdec.engine.session import Bounds
from specdec.grammar import GrammarCompiler
from specdec.server import app, chat, web
from specdec.server.config import ServerConfig
from specdec.server.errors import RequestError
from specdec.server.running import bind
from specdec.server.service import Service
from tests.scripted import Script
from tests.server.harness import (
    BODIES,
    Running,
    Scripted,
    post,
    running,
    tiny_decoder,
    until,
)
from tests.server.soak import soak

ENDLESS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Go on"}],
    "max_tokens": 3000,
}


class Idling(Script):
    reason = "no draft in 100% of the rounds"


def test_a_draft_that_idles_is_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who named a draft cannot tell that it does nothing; or reads so each time."""
    caplog.set_level(logging.INFO, "specdec.server")
    decoder = tiny_decoder(tmp_path, num_draft_tokens="auto")
    idling: Any = Idling(lambda number: int(number < 3))
    decoder._length = idling

    def notes(most: int, **more: Any) -> int:
        body = {"prompt": "Go on", "max_tokens": most, "min_tokens": most, **more}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return caplog.text.count(f"the draft idles: {Idling.reason}")

    with running(decoder) as server:
        assert notes(60) == 0  # its first rounds draft
        assert notes(9) == 0  # too short to tell
        assert notes(60, num_draft_tokens=0) == 0  # as its client asked
        assert [notes(60), notes(60)] == [1, 1]


def endless(server: Running, **more: Any) -> socket.socket:
    """A client whose request goes on until it leaves."""
    port = int(server.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port))
    most = ENDLESS["max_tokens"]
    body = json.dumps({**ENDLESS, "min_tokens": most, "stream": True, **more}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
    connection.sendall(
        f"{head}application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    connection.sendall(body)
    return connection


@pytest.mark.parametrize("host", ["x" * 5000, "a..b", "\ud800", "a\0b", "\u2024"])
def test_what_is_no_name_of_a_host(host: str) -> None:
    """Python's own encoding of names ended the command with an unexpected error."""
    with pytest.raises(ConfigError, match=r"^host is ") as raised:
        bind(host, 0)
    assert len(str(raised.value)) < 400


def test_five_hundred_at_once(tmp_path: Path) -> None:
    """A text that depends on its neighbours, a request that is lost, a row that stays.

    Every fifth client leaves when it has read something.
    """
    decoder = tiny_decoder(tmp_path, batch_size=32)
    prompts = [f"Prompt {i % 25} of many" for i in range(500)]
    params: list[dict[str, Any]] = [
        {"max_tokens": 3 + i % 5, "temperature": (i % 2) * 1.0, "seed": i % 25}
        for i in range(25)
    ]
    expected = [
        result.text
        for result in decoder.generate(
            prompts[:25],
            [SamplingParams(**p) for p in params],
            ignore_chat_template=True,
        )
    ]

    async def ask(client: httpx.AsyncClient, i: int) -> str | None:
        body = {"prompt": prompts[i], **params[i % 25]}
        if i % 5:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])
        body = {**body, "stream": True, "max_tokens": 200}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if '"text":"' in line:
                    return None
        return None

    async def ask_all(url: str) -> list[str | None]:
        # What a client does for a request takes as long as it has others.
        async with AsyncExitStack() as ends:
            clients = [httpx.AsyncClient(base_url=url, timeout=300) for _ in range(25)]
            for client in clients:
                await ends.enter_async_context(client)
            return await asyncio.gather(*(ask(clients[i % 25], i) for i in range(500)))

    with running(decoder, max_waiting=500) as server:
        texts = asyncio.run(ask_all(server.url))
        for i, text in enumerate(texts):
            assert text is None or text == expected[i % 25]
        until(lambda: server.service.engine.pending == 0)
        until(lambda: server.service.engine.load.running == 0)
        assert server.service.waiting == 0
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "specdec_requests_waiting 0.0" in metrics
        (answered,) = re.findall(r'total.*outcome="answered"} (\d+)', metrics)
        assert int(answered) >= 400
        # A row that has n events with tokens has n - 1 gaps.
        (gaps,) = re.findall(r"specdec_token_gap_seconds_count (\d+)", metrics)
        (rows,) = re.findall(r"specdec_time_to_first_\w+_count (\d+)", metrics)
        (tokens,) = re.findall(r"specdec_generated_tokens_total (\d+)", metrics)
        assert 0 < int(gaps) <= int(tokens) - int(rows)


def test_a_full_queue_and_one_who_leaves(decoder: SpecDecoder) -> None:
    """The next one is refused with a time to wait; the place of the leaver is free."""
    with running(decoder, max_waiting=1) as server:
        clients = [endless(server) for _ in range(5)]
        until(lambda: server.service.engine.pending == 5)
        assert server.service.waiting == 1
        with httpx.Client(base_url=server.url, timeout=60) as client:
            full = client.post("/v1/chat/completions", json=ENDLESS)
            assert full.status_code == 429
            assert full.headers["retry-after"] == "1"
            server.service._row_seconds = 1e6  # rows that last for days
            late = client.post("/v1/chat/completions", json=ENDLESS)
            assert late.headers["retry-after"] == "60"
            assert full.json()["error"]["code"] == "queue_full"
            many = client.post("/v1/chat/completions", json={**ENDLESS, "n": 7})
            assert many.json()["error"]["param"] == "n"
            assert many.status_code == 400
            # One that runs, and one that waits.
            for left in (clients[4], clients[0]):
                rows = server.service.engine.pending
                left.close()
                until(lambda rows=rows: server.service.engine.pending < rows)  # type: ignore[misc]
            short = {**ENDLESS, "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=short).status_code == 200
        for each in clients:
            each.close()
        until(lambda: server.service.engine.pending == 0)


def test_a_page_of_another_site_is_refused(decoder: SpecDecoder) -> None:
    """A name that was rebound to this machine: its pages would use a keyless server.

    A suffix or a beginning of an allowed name is one that anybody can register.
    """
    with running(decoder) as server:
        port = server.url.rpartition(":")[2]
        for host, status in (
            ("evil.example", 403), (f"evil.example:{port}", 403), ("", 403),
            ("evil-localhost", 403), ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403), ("localhost", 200),
            (f"localhost:{port}", 200), ("app.localhost", 200), ("127.0.0.1", 200),
            (f"[::1]:{port}", 200), ("192.168.0.7", 200),
        ):  # fmt: skip
            answer = httpx.get(server.url + "/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
    with running(decoder, api_keys=("k",)) as server:
        headers = {"Host": "proxy.example", "x-api-key": "k"}
        answer = httpx.get(server.url + "/v1/models", headers=headers)
        assert answer.status_code == 200
    # A socket that takes IPv4 and IPv6 has loopback's address in this form.
    both = {"server": ("::ffff:127.0.0.1", 80), "headers": [(b"host", b"evil.example")]}
    assert web._is_rebound(both)


def test_what_clients_do_first(decoder: SpecDecoder) -> None:
    """A look at the models, a key in any of its forms, and a base URL that is wrong."""
    with running(decoder, api_keys=("k",), names=("tiny",)) as server:
        one = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        two: Any = anthropic.Anthropic(
            base_url=server.url, auth_token="k", max_retries=0
        )
        with one, two, httpx.Client(base_url=server.url) as plain:
            for client in (one, two):
                assert [model.id for model in client.models.list()] == ["tiny"]
                assert client.models.retrieve("tiny").id == "tiny"
            said: Any = [{"role": "user", "content": "Hi"}]
            beta = two.beta.messages.create(
                model="tiny", max_tokens=1, messages=said,
                betas=["context-1m-2025-08-07"],
            )  # fmt: skip
            assert beta.usage.output_tokens == 1
            assert plain.head("/").status_code == 200
            lower = {"Authorization": "bearer  k"}
            assert plain.get("/v1/models", headers=lower).status_code == 200
            assert plain.get("/v1/models", headers={"Authorization": "k"}).is_error
            for method, path, body, status, shown in (
                ("POST", "/chat/completions", {}, 404,
                 "did you mean /v1/chat/completions? Check the base URL"),
                ("POST", "/v1/v1/messages", {}, 404, "did you mean /v1/messages?"),
                ("GET", "/v1/chat/completions", {}, 405, "is not possible: use POST"),
                ("POST", "/v1/chat/completions", {"prompt": "a"}, 400,
                 "endpoint: did you mean messages?"),
                ("POST", "/v1/completions", {"messages": "a"}, 400,
                 "endpoint: did you mean prompt?"),
                ("POST", "/v1/responses", {"messages": "a"}, 400,
                 "endpoint: did you mean input?"),
                ("POST", "/v1/chat/completions",
                 {"messages": said, "max_tokens": 1, "max_completion_tokens": 2}, 400,
                 '"param":"max_tokens"'),
            ):  # fmt: skip
                answer = plain.request(method, path, headers=lower, json=body)
                assert answer.status_code == status, path
                assert shown in answer.text


def test_leaving_at_every_phase(decoder: SpecDecoder) -> None:
    """In the headers, in the body, while it waits, and after the answer has begun."""
    with running(decoder, max_waiting=9) as server:
        for _ in range(3):
            port = int(server.url.rpartition(":")[2])
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            kind = b"Content-Type: application/json\r\nContent-Length: 90\r\n\r\n"
            for part in (head, head + kind, head + kind + b'{"prompt": "a"'):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(part)
            clients = [endless(server) for _ in range(6)]
            until(lambda: server.service.waiting == 2)
            assert clients[0].recv(1)
            for each in reversed(clients):
                each.close()
            until(lambda: server.service._rows == 0)
        until(lambda: server.service.engine.load.running == 0)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        text = httpx.get(f"{server.url}/metrics").text
        assert 'endpoint="/v1/completions",outcome="left"} 6.0' in text
        assert 'endpoint="/v1/chat/completions",outcome="left"} 18.0' in text


def test_a_huge_body_holds_nobody_up(server: Running) -> None:
    """Megabytes of messages are looked at beside the event loop, and refused."""
    many = [{"role": "user", "content": "a"}] * 60_000

    async def ask() -> tuple[httpx.Response, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = asyncio.create_task(
                client.post("/v1/chat/completions", json={"messages": many})
            )
            healthy = 0
            while not asked.done():
                healthy += (await client.get("/health")).is_success
            return await asked, healthy

    answer, healthy = asyncio.run(ask())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert healthy > 3


def test_one_who_does_not_read_stops_nobody(server: Running) -> None:
    """An answer that nobody takes ends by itself, and others go on meanwhile."""
    before = server.service.engine.stats.prompts
    # Much of a few tokens: more than sockets hold.
    much = {"logprobs": True, "top_logprobs": 20}
    lazy = endless(server, max_tokens=400, min_tokens=400, **much)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(3):
            answer = client.post(
                "/v1/chat/completions", json={**ENDLESS, "max_tokens": 4}
            )
            assert answer.status_code == 200
    # The row does not wait for its reader.
    until(lambda: server.service.engine.stats.prompts == before + 4)
    lazy.close()
    until(lambda: server.service.waiting == 0 and server.service._rows == 0)


def test_a_place_is_not_kept_by_one_who_never_reads(
    decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few hundred of them would let nobody else in, for good."""
    monkeypatch.setattr(app, "_READ_SECONDS", 0.05)

    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    async def ask() -> bytes:
        async with decoder.serve() as engine:
            service = Service(decoder, engine, ServerConfig(request_timeout=0.5))
            body = {**ENDLESS, "max_tokens": 2, "stream": True}
            answer = app._Answer(service, chat.parse(body, service), "/v1")
            await answer({}, never, never)
            assert service._rows == 0
            return service.metrics.text()

    assert b'endpoint="/v1",outcome="left"} 1.0' in asyncio.run(ask())


def test_the_time_limit_cuts(decoder: SpecDecoder) -> None:
    """An answer that takes too long says so, and is what it had come to."""
    decoder.generate(["Go on"], max_tokens=2)
    with running(decoder, request_timeout=0.4) as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "Go on", "max_tokens": 4000, "min_tokens": 4000}
        answer = httpx.post(url, json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["cut"]) == ("length", "time limit")
    n = answer["usage"]["completion_tokens"]
    assert 0 < n < 4000
    params = SamplingParams(max_tokens=n, min_tokens=n)
    (whole,) = decoder.generate(["Go on"], params, ignore_chat_template=True)
    assert choice["text"] == whole.text


def test_what_fails_before_the_first_token_has_a_status(decoder: SpecDecoder) -> None:
    """A stream of nothing but an error: it cannot be sent to another replica."""

    def fails(prompt: str) -> str:
        raise ServerError("the device is gone")

    with running(Scripted(decoder, fails)) as server:
        for path in BODIES:
            answer = post(server, path, stream=True)
            assert answer.status_code == 500, path
            assert "the device is gone" in answer.json()["error"]["message"]


def test_a_stream_that_waits_stays_open(decoder: SpecDecoder) -> None:
    """A proxy closes what is silent for long: comments, and Anthropic's pings."""
    with running(Scripted(decoder, str, pause=0.3), keep_alive=0.05) as server:
        for path, comment in (
            ("chat/completions", ": keep-alive\n\n"),
            ("messages", 'event: ping\ndata: {"type":"ping"}\n\n'),
        ):
            assert post(server, path, stream=True).text.count(comment) >= 2


@pytest.mark.parametrize("stop_timeout", [30.0, 0.1])
def test_the_end(decoder: SpecDecoder, stop_timeout: float) -> None:
    """Answers end, or are cut when it is time; new requests are refused meanwhile."""
    with running(decoder, stop_timeout=stop_timeout) as server:
        tokens = 300 if stop_timeout > 1 else 4000

        async def ask() -> tuple[Any, Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = {**ENDLESS, "max_tokens": tokens}
                running = asyncio.create_task(
                    client.post("/v1/chat/completions", json=body)
                )
                stats = server.service.engine.stats.generated_tokens
                while server.service.engine.stats.generated_tokens < stats + 3:
                    await asyncio.sleep(0.005)
                assert server.loop is not None
                drained = asyncio.run_coroutine_threadsafe(
                    server.service.drain(), server.loop
                )
                await asyncio.sleep(0.02)
                late = await client.post("/v1/chat/completions", json=body)
                answer = await running
                await asyncio.wrap_future(drained)
                return answer.json(), late

        answer, late = asyncio.run(ask())
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "stopping"
        count = answer["usage"]["completion_tokens"]
        if stop_timeout > 1:
            assert count == tokens
        else:
            assert answer["choices"][0]["cut"] == "shutdown"
            assert 0 < count < tokens
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_an_engine_that_fails(tmp_path: Any) -> None:
    """Clients get an error object, whole or in the stream, and health says so."""
    decoder = tiny_decoder(tmp_path, batch_size=2)

    class Fails:
        def __init__(self, model: Any):
            self.model, self.left = model, 12

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise RuntimeError("the device is gone")
            return self.model(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

    runner: Any = decoder._target
    runner.model = Fails(runner.model)
    with running(decoder) as server:
        url = f"{server.url}/v1/chat/completions"
        text = httpx.post(url, json={**ENDLESS, "stream": True}, timeout=60).text
        assert '"code":"engine_failed"' in text
        assert "[DONE]" not in text
        later = httpx.post(url, json=ENDLESS, timeout=60)
        assert later.status_code == 500
        assert "the device is gone" in later.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").json() == {"status": "failed"}


def test_a_long_prompt_starves_nobody(decoder: SpecDecoder) -> None:
    """Between two chunks of a joining prompt, every running row gets its round.

    The bound of the docs: a running row waits for one chunk of prefill at most.
    """
    session = decoder.session()
    first = session.add([5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0))
    while session.stats.generated_tokens < 10:
        session.step()
    long = session.add(list(range(100, 200)) * 12, SamplingParams(max_tokens=1))
    chunk = decoder.config.prefill_step_size
    steps, tokens = 0, 0
    while session.stats.prefilled < 2:
        steps += 1
        tokens += sum(len(e.token_ids) for e in session.step() if e.index == first)
    assert steps >= 1200 // chunk
    # At least one token in every step but those that fill and drain the pipeline.
    assert tokens >= steps - 4
    session.cancel(first)
    session.cancel(long)


def test_a_bounded_part_of_the_soak() -> None:
    """The long run is ``scripts/soak --server``."""
    counts = soak(seed=1, seconds=0, requests=120)
    assert counts.whole > 75
    assert min(counts.left, counts.refused) > 10


def test_a_bounded_part_of_the_soak_of_agents() -> None:
    """The long run is ``scripts/soak --server --agents``."""
    counts = soak(seed=2, seconds=0, requests=5, agents=True)
    assert counts.whole > 20
    assert counts.left


def test_a_slow_grammar_holds_nobody_up(
    decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts wait for a schema of another client's that takes long to compile."""
    begun, go, make = threading.Event(), threading.Event(), GrammarCompiler._compiled

    def slow(self: GrammarCompiler, grammar: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return make(self, grammar)

    async def ask() -> tuple[Any, Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            path, short = "/v1/chat/completions", {**ENDLESS, "max_tokens": 2}
            format_ = {"response_format": {"type": "regex", "pattern": "slow"}}
            waits = asyncio.create_task(client.post(path, json={**short, **format_}))
            await asyncio.to_thread(begun.wait)
            other = await client.post(path, json=short)
            assert not waits.done()
            go.set()
            return (await waits).json(), other.json()

    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)
    with running(decoder) as server:
        waited, other = asyncio.run(ask())
    assert other["usage"]["completion_tokens"] == 2
    assert waited["choices"][0]["message"]["content"] == "slow"[:2]


def test_who_is_prepared_at_the_end_is_told(decoder: SpecDecoder) -> None:
    """A server that cancels what is being compiled answers in JSON, with 503."""

    async def forever(work: Any) -> Any:
        await asyncio.Event().wait()

    async def closed(work: Any) -> Any:
        raise ServerError("the server is closed")

    async def check() -> None:
        engine: Any = Scripted(decoder, lambda prompt: "")
        engine.tokenize = forever
        service = Service(engine, engine, ServerConfig(stop_timeout=0))
        body = {"messages": [{"role": "user", "content": "a"}]}
        job = chat.parse(body, service).job
        waits = asyncio.create_task(service.prepare(job))
        await asyncio.sleep(0)
        await service.drain()
        waits.cancel()
        with pytest.raises(RequestError, match="stopping") as caught:
            await waits
        assert caught.value.status == 503
        engine.tokenize = closed
        with pytest.raises(RequestError, match="stopping"):
            await service.prepare(job)
        # The engine closes between the two: it has not failed.
        del engine.tokenize
        prepared = await service.prepare(job)
        async with decoder.serve() as real:
            pass
        service.engine = real
        with pytest.raises(RequestError, match="stopping") as caught:
            [event async for event in service.events(prepared)]
        assert caught.value.code == "stopping"

    asyncio.run(check())


def test_the_end_waits_for_nobody_who_has_left(decoder: SpecDecoder) -> None:
    """A server without requests that stops after its whole time to stop."""

    async def check() -> None:
        engine: Any = Scripted(decoder, lambda prompt: "")
        engine.aclose = lambda: asyncio.sleep(0)
        service = Service(engine, engine, ServerConfig(stop_timeout=3600))
        with service.places(2):
            waits = asyncio.create_task(service.drain())
            await asyncio.sleep(0)
            assert not waits.done()
        await asyncio.wait_for(waits, 60)

    asyncio.run(check())


def test_a_request_is_checked_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that are built again, or a second memory plan, on a request's way."""
    counts: Counter[str] = Counter()
    for kind, name in ((SamplingParams, "__post_init__"), (Bounds, "check")):
        real = getattr(kind, name)

        def counted(*args: Any, real: Any = real, name: str = name) -> Any:
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(kind, name, counted)
    for path in ("chat/completions", "completions"):
        assert post(server, path, temperature=1, top_p=0.9).status_code == 200
        assert counts.most_common() == [("__post_init__", 1), ("check", 1)], path
        counts.clear()


def test_only_rows_count_for_the_time_to_wait(server: Running) -> None:
    """What takes no row, or is refused, would say that places are free at once."""
    service = server.service
    before = service._row_seconds
    count = {"model": "tiny", "messages": ENDLESS["messages"]}
    url = f"{server.url}/v1/messages/count_tokens"
    assert httpx.post(url, json=count, timeout=60).is_success
    long = [{"role": "user", "content": "a " * 9000}]
    assert post(server, "messages", messages=long).status_code == 400
    assert service._row_seconds == before
    assert post(server, "messages").is_success
    assert service._row_seconds != before


def test_who_finds_whose_prefixes(decoder: SpecDecoder) -> None:
    """A client that learns, by ``cached_tokens``, what another one has asked before.

    With ``prefix_sharing="client"`` keys keep clients apart, where there are none
    addresses, and the users that requests name; a salt does in any case.
    """

    def cached(text: str, key: str = "", **more: Any) -> int:
        said = [{"role": "user", "content": f"{text}: what a river is, and a lake"}]
        path = "messages" if "user_id" in str(more) else "chat/completions"
        answer = post(server, path, {"x-api-key": key}, messages=said, **more)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        if path == "messages":
            return int(usage["cache_read_input_tokens"])
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with running(decoder) as server:
        assert not cached("Shared")
        assert cached("Shared", user="someone", key="else")
        assert not cached("Shared", cache_salt="mine")
        assert cached("Shared", cache_salt="mine")
        empty = post(server, "completions", cache_salt="")
        assert empty.json()["error"]["param"] == "cache_salt"
    options: dict[str, Any] = {"prefix_sharing": "client", "api_keys": ("a", "b")}
    with running(decoder, **options) as server:
        for more in (
            {},
            {"user": "anna"},
            {"safety_identifier": "anna"},
            {"metadata": {"user_id": "anna"}},
            {"cache_salt": "mine"},
        ):
            for key in "ab":
                assert not cached("Apart", key, **more), (key, more)
            for key in "ab":
                assert cached("Apart", key, **more), (key, more)
    with running(decoder, prefix_sharing="client") as server:
        assert not cached("Shared")
        assert cached("Shared")
        assert not cached("Shared", user="anna")


@pytest.mark.parametrize("sharing", ["all", "client"])
def test_whose_answers_are_drafted_from(decoder: SpecDecoder, sharing: Any) -> None:
    """Each key's and each salt's own, though prefixes may be shared.

    With counts of accepted tokens, one client could read another's answers. Without
    keys there is one client for each salt; a switch keeps no answers.
    """

    def accepted(key: str, salt: str | None = None) -> int:
        answer = post(server, "completions", {"x-api-key": key}, prompt="a b",
                      max_tokens=24, temperature=1, seed=7, ignore_eos=True,
                      cache_salt=salt)  # fmt: skip
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["completion_tokens_details"]
        return int(details["accepted_prediction_tokens"])

    def drafting(*, keep: bool) -> SpecDecoder:
        config = EngineConfig(num_draft_tokens=2, draft_corpus=keep)
        return SpecDecoder(decoder.target, drafter="ngram", config=config)

    clients = [("a", None), ("b", None), ("a", "s"), ("b", "s")]
    with running(
        drafting(keep=True), api_keys=("a", "b"), prefix_sharing=sharing
    ) as server:
        first = [accepted(*client) for client in clients]
        again = [accepted(*client) for client in clients]
    assert len(set(first)) == len(set(again)) == 1
    assert again[0] > first[0] + 5
    with running(drafting(keep=True), prefix_sharing=sharing) as server:
        answers = [accepted(*client) for client in clients]
    assert answers == [first[0], again[0]] * 2
    with running(drafting(keep=False)) as server:
        assert [accepted("a") for _ in range(2)] == first[:2]


@pytest.mark.parametrize("sharing", ["all", "client"])
def test_whose_answers_are_reused(decoder: SpecDecoder, sharing: Any) -> None:
    """A key that learns what another one was answered, or what it asked after that.

    Each finds its own; without keys there is one client. A salt is a client, too.
    """
    beginning = [len(sharing), *(7 + i % 60 for i in range(80))]

    def ask(prompt: list[int], key: str, **more: Any) -> tuple[list[int], int]:
        more = {"guided_regex": "[a-z]{40}", "return_token_ids": True, **more}
        answer = post(server, "completions", {"x-api-key": key}, prompt=prompt,
                      max_tokens=50, **more).json()  # fmt: skip
        usage = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["token_ids"], usage["cached_tokens"]

    for keys in ((), ("a", "b")):
        with running(decoder, api_keys=keys, prefix_sharing=sharing) as server:
            prompt = [len(keys), *beginning]
            answer, _ = ask(prompt, "a")
            longer = [*prompt, *answer, 9, 9, 9]
            others = ask(longer, "b", guided_regex="[A-Z]{40}")[1]
            if keys:
                assert others < len(prompt)
                assert (others > 0) == (sharing == "all")
                assert ask(longer, "a", cache_salt="mine")[1] == 0
            else:
                assert others > len(prompt) + len(answer) - 3
            answer, cached = ask(longer, "a")
            assert cached > len(prompt) + len(answer) - 3
            # What one key's prompt adds to its answer is its own, as well.
            last = [*longer, *answer, 5]
            if keys:
                assert ask(last, "b")[1] <= len(longer)
            assert ask(last, "a")[1] > len(longer) + len(answer) - 3
