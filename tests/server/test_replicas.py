"""Replicas behind one port: those that end, those that stream, where requests go."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from specdec import SpecDecoder, backend
from specdec.cli import main
from specdec.cli.replica import command, environments, within_share
from specdec.config import EngineConfig
from specdec.server import replicas as supervision
from specdec.server import routing
from specdec.server.config import ServerConfig
from specdec.server.errors import RequestError
from specdec.server.replicas import Replica, ReplicaCommand, Replicas
from specdec.server.router import Router, _passed_on, make_router
from specdec.server.routing import (
    BILLING,
    Blocks,
    Question,
    ReplicaLoad,
    blocks_of,
    choose,
)
from specdec.server.web import CLIENT_HEADER, ENDS_HEADER
from tests.models.folders import write_folder
from tests.server.harness import Running, until
from tests.server.test_command import let_go, line_of, specdec

# -- where requests go --------------------------------------------------------------


def talk(first: str, turns: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{first} {'and so on ' * 80}"}]
    for i in range(turns):
        said += [
            {"role": "assistant", "content": f"{first} {i} " * 99},
            {"role": "user", "content": f"more {i} " * 99},
        ]
    return {"messages": said, "system": "You are terse. " * 99}


def test_a_prompt_goes_where_its_beginning_is() -> None:
    """A turn that leaves its conversation; one that follows who merely shares a system.

    Keys of a body have no order, and Claude Code's line that always changes is no
    beginning.
    """
    replicas = [ReplicaLoad() for _ in range(4)]
    rng = random.Random(5)
    homes: dict[str, ReplicaLoad] = {}
    for turns in range(4):
        names = [f"talk {i}" for i in range(12)]
        rng.shuffle(names)
        for name in names:
            body = talk(name, turns)
            body = dict(rng.sample(sorted(body.items()), len(body)))
            body["temperature"] = rng.random()
            chosen = choose(replicas, blocks_of(body))
            assert homes.setdefault(name, chosen) is chosen
            chosen.running += turns == 0  # the first turns are spread
    assert len(set(map(id, homes.values()))) >= 3
    assert max(each.running for each in replicas) <= 5
    line = "x-anthropic-billing-header: cc={}\n"
    for i in range(2):
        assert BILLING.match(line)
        changing = [{"type": "text", "text": line.format(i)}, {"text": "Help. " * 300}]
        body = {"system": changing, "messages": []}
        assert blocks_of(body) == blocks_of({**body, "system": [
            {"type": "text", "text": ""}, changing[1]]})  # fmt: skip
    odd: Any
    for odd in (None, 3, [], "x" * 9999, {"messages": {"a": [None, 1.5, True]}}):
        blocks_of(odd)


def test_a_block_counts_after_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of another conversation is taken for a beginning.

    Or the first block is forgotten before those that are useless without it.
    """

    def blocks(*letters: str) -> Blocks:
        return blocks_of({"prompt": "".join(letter * 512 for letter in letters)})

    place = ReplicaLoad()
    place.note(blocks("a", "b"))
    place.note(blocks("c", "d"))
    assert place.matching(blocks("a", "b", "d")) == 2
    assert place.matching(blocks("a", "d")) == 1
    assert place.matching(blocks("b", "a")) == 0
    # What follows a block that was forgotten is useless.
    assert place.matching([-1, *blocks("a", "b")]) == 0
    monkeypatch.setattr(routing, "_KEPT", 3)
    place.note(blocks("e", "f", "g", "h"))
    assert place.matching(blocks("e", "f", "g", "h")) == 3
    for letter in "ijkilm":  # the first of them is used again
        place.note(blocks(letter))
    assert [place.matching(blocks(letter)) for letter in "ijk"] == [1, 0, 0]


def test_what_decides_where_no_prefix_does() -> None:
    """One of two idle replicas gets all requests; keys of a part count by order."""
    replicas = [ReplicaLoad(), ReplicaLoad()]
    assert choose(replicas, ()) is not choose(replicas, ())
    part = {"role": "user", "content": "a" * 600}
    asked = [{"messages": [dict(items)]} for items in (part, reversed(part.items()))]
    assert blocks_of(asked[0]) == blocks_of(asked[1])


def test_a_prefix_of_all_keeps_no_replica_idle() -> None:
    """Affinity without a bound sends everything to one replica."""
    replicas = [ReplicaLoad() for _ in range(4)]
    blocks = blocks_of(talk("everyone", 3))
    rng = random.Random(7)
    for _ in range(2000):
        chosen = choose(replicas, blocks)
        chosen.running += 1
        total = sum(each.running for each in replicas)
        assert chosen.running <= 1.25 * total / 4 + 1
        if total > 60:
            rng.choice([r for r in replicas if r.running]).running -= 1
    for each in replicas:
        each.forget()
        each.running = 3
    replicas[2].running = 2
    assert choose(replicas, blocks) is replicas[2]


# -- processes that stand for replicas ----------------------------------------------


def fake(index: int, path: str) -> ReplicaCommand:
    program = [sys.executable, "-m", "tests.server.fake_replica", str(index)]
    return ReplicaCommand(program, {"PYTHONWARNINGS": ""}, f"{path}\n".encode())


@contextmanager
def routed(
    count: int = 2, start: supervision.Start = fake, **options: Any
) -> Iterator[tuple[httpx.Client, Router]]:
    config = replace(ServerConfig(request_timeout=30), **options)
    server = Running(make_router(Replicas(count, start, 30), config))
    server.start()
    router: Router = server.app.state.service
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client, router
    finally:
        server.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[httpx.Client, Router]]:
    with routed(cors=("http://a.example",)) as parts:
        yield parts


@pytest.fixture
def ready(two: tuple[httpx.Client, Router]) -> Iterator[tuple[httpx.Client, Router]]:
    """Two replicas that answer and have nothing to do, before a test and after it."""
    _, router = two
    until(lambda: all(map(answers, router.replicas.all)))
    assert router.pending == 0
    yield two
    until(lambda: router.pending == 0)


def pids(router: Router) -> list[int]:
    return [r.process.pid for r in router.replicas.all if r.process is not None]


def socket_of(client: httpx.AsyncClient) -> str:
    """The path of a replica's socket."""
    transport: Any = client._transport
    return str(transport._pool._uds)


def direct(replica: Replica) -> httpx.Client:
    """A client of a replica alone."""
    assert replica.client is not None
    path = httpx.HTTPTransport(uds=socket_of(replica.client))
    return httpx.Client(base_url="http://localhost", transport=path)


def answers(replica: Replica) -> bool:
    """Whether a replica answers: one that was just killed may seem ready.

    A process that is ending may still take a connection, and then answer nothing.
    """
    if (client := replica.client) is None:
        return False
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(socket_of(client))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return bool(connection.recv(1))
    return False


def answering(router: Router) -> tuple[Replica, int]:
    """The replica that has an answer to give, and its process."""
    until(lambda: router.pending > 0)
    (replica,) = [r for r in router.replicas.all if r.running]
    with direct(replica) as client:
        until(lambda: client.get("/health").json()["due"])
    assert replica.process is not None
    return replica, replica.process.pid


def go(replica: Replica, step: int = 0) -> None:
    """Let a replica go on."""
    with direct(replica) as client:
        client.post("/v1/go", json={"step": step})


@contextmanager
def asking(client: httpx.Client, prompt: str) -> Iterator[socket.socket]:
    """A request whose client leaves when the block ends."""
    body = json.dumps({"prompt": prompt}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = client.base_url.host, client.base_url.port or 80
    with socket.create_connection(address) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def after(act: Callable[[], Any], call: Callable[[], Any]) -> Any:
    """What ``call`` returns, while ``act`` happens."""

    async def both() -> Any:
        called = asyncio.create_task(asyncio.to_thread(call))
        await asyncio.to_thread(act)
        return await called

    return asyncio.run(both())


def test_a_request_and_its_answer_pass_as_they_are(
    ready: tuple[httpx.Client, Router],
) -> None:
    """A body that is written anew, a lost status, a key that is passed on."""
    client, _ = ready
    text = '{"prompt":"plain",  "x": 1e0, "u": "\\u00e9"}'
    headers = {"content-type": "application/json", "authorization": "Bearer k",
               "anthropic-version": "7", "origin": "http://a.example",
               "x-specdec-client": "somebody else"}  # fmt: skip
    answer = client.post("/v1/completions?beta=true", content=text, headers=headers)
    assert answer.status_code == 203
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    assert len(answer.headers.get_list("x-request-id")) == 1
    said = answer.json()
    assert said["body"] == {"prompt": "plain", "x": 1.0, "u": "é"}
    sent = dict(said["headers"])
    assert sent["anthropic-version"] == "7"
    assert sent["content-length"] == str(len(text.encode()))
    assert not {"authorization", "origin", "transfer-encoding"} & sent.keys()
    # By which a replica keeps clients apart: the address, not what a client says.
    assert sent["x-specdec-client"] == sha256(b"127.0.0.1").hexdigest()
    for path in ("/v1/nothing", "//v1/models", "/v1/%00", "/v1/a%2Fb?x=%20"):
        assert client.get(f"{client.base_url}{path}").status_code == 404, path
    assert client.delete("/v1/completions").status_code == 405
    assert client.post("/v1/completions", content="x").status_code == 415
    wrong = client.get("/health", headers={"Host": "evil.example"})
    assert wrong.status_code == 403
    health = client.get("/health").json()
    assert health["status"] == "ok"
    assert [each["status"] for each in health["replicas"]] == ["ok", "ok"]
    text = client.get("/metrics").text
    for line in (
        'specdec_rounds_total{replica="0"} 1.0',
        'specdec_rounds_total{replica="1"} 11.0',
        'specdec_replica_up{replica="1"} 1.0',
    ):
        assert line in text


def test_a_target_that_is_no_path(ready: tuple[httpx.Client, Router]) -> None:
    """What httpx cannot pass on ended in a 500."""
    client, _ = ready
    for target in ("/health#/metrics", "%2f", "x#", "//a#b", "#", "/a?b#c"):
        address = client.base_url.host, client.base_url.port or 80
        with socket.create_connection(address) as connection:
            connection.sendall(
                f"GET {target} HTTP/1.1\r\nHost: localhost\r\n"
                "Connection: close\r\n\r\n".encode()
            )
            data = b""
            while part := connection.recv(1 << 16):
                data += part
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.split()[1][:1] == b"4", (target, data)
        assert "error" in json.loads(body), target


def test_events_come_one_by_one(ready: tuple[httpx.Client, Router]) -> None:
    """A router that waits for more of a stream than there is."""
    client, router = ready
    with client.stream("POST", "/v1/completions", json={"prompt": "step"}) as answer_to:
        (replica,) = [r for r in router.replicas.all if r.running]
        lines = answer_to.iter_lines()
        for step in range(3):
            go(replica, step) if step else None
            assert next(lines) == f"data: {step}"
            assert next(lines) == ""
        go(replica, -1)
        assert list(lines) == []


def test_a_replica_that_ends_before_the_first_byte(
    ready: tuple[httpx.Client, Router],
) -> None:
    """A request that is lost though another replica could run it, or runs twice."""
    client, router = ready
    first, second = router.replicas.all

    async def chosen(*tried: Replica) -> Replica:
        async with router.replica(Question(), tried) as replica:
            return replica

    assert asyncio.run(chosen(first)) is second
    assert asyncio.run(chosen(second)) is first
    with pytest.raises(RequestError, match="there is no other one yet"):
        asyncio.run(chosen(first, second))
    again = router.again
    starts = sum(each.starts for each in router.replicas.all)

    def kill() -> None:
        pid = answering(router)[1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: router.again == again + 1)  # the other one has it, and hangs
        until(lambda: pid not in pids(router) and len(router.replicas.ready) == 2)
        os.kill(answering(router)[1], signal.SIGKILL)
        until(lambda: router.pending == 0)

    for path in ("/v1/completions", "/v1/messages"):
        lost, again = router.lost, router.again
        answer = after(kill, partial(client.post, path, json={"prompt": "hang"}))
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert "send the request again" in error["message"]
        assert error["type"] == (
            "server_error" if path == "/v1/completions" else "api_error"
        )
        assert (router.lost, router.again) == (lost + 1, again + 1)
        starts += 2
        until(lambda n=starts: sum(r.starts for r in router.replicas.all) == n)  # type: ignore[misc]
        until(lambda: len(router.replicas.ready) == 2)
    # One that runs to its end at the other replica is whole.
    again = router.again

    def kill_one() -> None:
        os.kill(answering(router)[1], signal.SIGKILL)
        until(lambda: router.again == again + 1)
        go(answering(router)[0])

    answer = after(
        kill_one, lambda: client.post("/v1/completions", json={"prompt": "wait"})
    )
    assert answer.json()["body"] == {"prompt": "wait"}
    assert router.again == again + 1


def test_a_replica_that_is_about_to_end(ready: tuple[httpx.Client, Router]) -> None:
    """Its refusal reached the client, though another replica could run the request."""
    client, router = ready
    for prompt, more in (("stopping", 0), ("engine_failed", 1)):
        again, second = router.again, router.replicas.all[1]
        second.running += 1  # so that the first one is asked first
        answer = client.post("/v1/completions", json={"prompt": prompt})
        second.running -= 1
        assert answer.json()["body"] == {"prompt": prompt}
        assert router.again == again + more


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/completions", '{"error":{"message":'),
        ("/v1/messages", '{"type":"error","error":{"type":"api_error"'),
        ("/v1/responses", '{"type":"error","code":"replica_lost"'),
    ],
)
def test_a_replica_that_ends_in_mid_stream(
    ready: tuple[httpx.Client, Router], path: str, error: str
) -> None:
    """Half an event, a stream that breaks off, or one that begins anew."""
    client, router = ready
    with client.stream("POST", path, json={"prompt": "stream"}) as stream:
        parts = stream.iter_raw()
        text = b""
        while text.count(b"\n\n") < 2:
            text += next(parts)
        (replica,) = [r for r in router.replicas.all if r.running]
        replica.signal(signal.SIGKILL)
        text += b"".join(parts)
    first, second, last, end = text.decode().split("\n\n")
    assert (first, second, end) == ('event: a\ndata: {"n": 0}', 'data: {"n": 1}', "")
    assert last.rpartition("data: ")[2].startswith(error)
    if path == "/v1/responses":
        assert '"sequence_number":2' in last
    assert last.startswith("event: error") == (path != "/v1/completions")


def test_a_client_that_leaves_is_left_by_the_replica(
    ready: tuple[httpx.Client, Router],
) -> None:
    """A row that runs on for nobody: before the first byte, and in mid-stream."""
    client, router = ready
    ends = dict.fromkeys(pids(router), 0)
    with asking(client, "hang"):
        answering(router)
    until(lambda: router.pending == 0)
    with asking(client, "stream") as connection:
        assert connection.recv(1)
    until(lambda: router.pending == 0)

    def look() -> bool:
        said = client.post("/v1/completions", json={"prompt": "x" * 9}).json()
        ends[said["pid"]] = said["left"]
        return sum(ends.values()) == 2

    until(look)
    assert len(ends) == 2  # the same processes


def test_a_replica_that_does_not_answer_is_replaced(
    ready: tuple[httpx.Client, Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lives and hangs would take requests for ever."""
    client, router = ready
    monkeypatch.setattr(supervision, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "_ANSWER_SECONDS", 0.3)
    before = [each.starts for each in router.replicas.all]

    def restarted(times: int) -> bool:
        pairs = zip(router.replicas.all, before, strict=True)
        return all(each.starts >= n + times for each, n in pairs)

    # Both begin their looks anew, with the times of this test.
    for pid in pids(router):
        os.kill(pid, signal.SIGKILL)
    # On a busy machine, others may be late as well.
    until(lambda: restarted(1))
    until(lambda: len(router.replicas.ready) == 2)
    answer = client.post("/v1/completions", json={"prompt": "stop"})
    # The second one stops as well.
    assert answer.status_code in (502, 503)
    until(lambda: restarted(2))


@pytest.mark.parametrize("suspect_seconds", [0.1, 1000])
def test_a_hung_replica_gets_no_more_requests(
    ready: tuple[httpx.Client, Router],
    monkeypatch: pytest.MonkeyPatch,
    suspect_seconds: float,
) -> None:
    """Clients that give up lower its load, so that it gets the next request, too.

    It is suspected after one check; until then what it has not answered counts.
    """
    client, router = ready
    monkeypatch.setattr(supervision, "_LOOK_SECONDS", 1000)
    monkeypatch.setattr(supervision, "_SUSPECT_SECONDS", suspect_seconds)
    first, second = router.replicas.all
    for each in router.replicas.all:
        each.doubt.set()  # the present looks end, and the next ones are long
    until(lambda: not any(each.doubt.is_set() for each in router.replicas.all))
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        second.running += 1  # so that the first one is asked first
        with asking(client, "x"):
            until(lambda: first.running == 1)
        second.running -= 1
        until(lambda: first._abandoned == 1)
        assert first.running == 1
        until(lambda: first.suspect == (suspect_seconds < 1))
        assert second.process is not None
        for i in range(4):
            said = client.post("/v1/completions", json={"prompt": f"{i}"}).json()
            assert said["pid"] == second.process.pid
        assert router.replicas.ready == (
            [second] if suspect_seconds < 1 else [first, second]
        )
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    until(lambda: first.running == 0 and not first.suspect)
    assert router.replicas.ready == [first, second]


def test_a_replica_that_never_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that hangs while it is loaded: a replica less, for good."""
    monkeypatch.setattr(supervision, "_LEAST_LOADING", 0.0)
    monkeypatch.setattr(supervision, "_LEAST_PAUSE", 0.01)
    indices = []

    def start(index: int, path: str) -> ReplicaCommand:
        indices.append(index)
        hangs = indices == [0, 1]
        program = [sys.executable, "-c", "import time; time.sleep(100)"]
        return ReplicaCommand(program, {}, b"") if hangs else fake(index, path)

    with routed(start=start) as (_, router):
        until(lambda: len(router.replicas.ready) == 2)
    assert indices[:3] == [0, 1, 1]


def test_the_end_and_the_beginning(tmp_path: Path) -> None:
    """An answer that is cut for nothing, a process that stays, a key that is not asked.

    While no replica is ready yet, requests are refused, not lost.
    """
    gate = tmp_path / "go"
    waits = f'until [ -e {gate} ]; do sleep 0.02; done; exec "$@"'

    def start(index: int, path: str) -> ReplicaCommand:
        child = fake(index, path)
        return replace(child, arguments=["sh", "-c", waits, "sh", *child.arguments])

    with routed(start=start, api_keys=("k",)) as (client, router):
        early = client.get("/v1/models", headers={"x-api-key": "k"})
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "no_replica"
        assert early.headers["retry-after"]
        assert client.get("/health").status_code == 503
        gate.touch()
        until(lambda: len(router.replicas.ready) == 2)
        assert client.get("/v1/models").status_code == 401
        all_pids = pids(router)
        headers = {"x-api-key": "k"}

        def drain() -> None:
            answering(router)
            loop = router.replicas._tasks[0].get_loop()
            asyncio.run_coroutine_threadsafe(router.drain(), loop).result(30)

        body = {"prompt": "wait"}
        answer = after(
            drain, lambda: client.post("/v1/completions", json=body, headers=headers)
        )
        assert answer.json()["body"] == body
        late = client.post("/v1/completions", json=body, headers=headers)
        assert late.json()["error"]["code"] == "stopping"
        assert pids(router) == []
        for pid in all_pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


# -- the command --------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_folder(path, "llama")
    return path


def children(pid: int) -> list[int]:
    """Processes of ``specdec.cli.replica`` that a process has started."""
    processes = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
            words = (entry / "cmdline").read_bytes() if stat else b""
        except OSError:
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == pid:
            processes += [int(entry.name)] * (b"specdec.cli.replica" in words)
    return processes


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_serve_replicas(model: Path) -> None:
    """The texts of one process; a replica that is killed, and comes back; the end."""
    process = specdec(
        "serve", "--target", str(model), "--replicas", "2", "--port", "0", "--temp",
        "0", "--stop-timeout", "0.2",
    )  # fmt: skip
    try:
        assert process.stderr is not None
        # Before a model is loaded, which can take minutes.
        assert "specdec: starting 2 replicas: " in "".join(islice(process.stderr, 2))
        url = line_of(process.stderr, r"http://\S+")
        decoder = SpecDecoder.from_pretrained(model)
        with httpx.Client(base_url=url, timeout=60) as client:

            def ready() -> int:
                said = client.get("/health").json()["replicas"]
                return sum(each["status"] == "ok" for each in said)

            until(lambda: ready() == 2)
            prompts = [f"{i} {'Go on. ' * 75}" for i in range(3)]
            params: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0}
            for i, prompt in enumerate(prompts * 2):
                body = {"prompt": prompt, "seed": i, **params}
                answer = client.post("/v1/completions", json=body).json()
                (expected,) = decoder.generate(
                    [prompt], seed=i, ignore_chat_template=True, **params
                )
                assert answer["choices"][0]["text"] == expected.text
                # The second time it goes where it is kept.
                details = answer["usage"]["prompt_tokens_details"]
                assert bool(details["cached_tokens"]) == (i >= len(prompts))
            before = sorted(children(process.pid))  # replica 0 was the first to start
            # Greedily, it does not end by chance.
            body = {
                "prompt": "On",
                "max_tokens": 9999,
                "temperature": 0,
                "stream": True,
            }
            with client.stream("POST", "/v1/completions", json=body) as answer_to:
                lines = answer_to.iter_lines()
                assert next(lines).startswith("data: ")
                health = client.get("/health").json()["replicas"]
                loads = [each["running"] for each in health]
                assert sorted(loads) == [0, 1]
                os.kill(before[loads.index(1)], signal.SIGKILL)
                text = "\n".join(lines)
            assert '"code":"replica_lost"' in text
            assert "[DONE]" not in text
            # The other one serves, and ends as asked, while a new one loads.
            until(lambda: len(set(children(process.pid)) - set(before)) == 1)
            with client.stream("POST", "/v1/completions", json=body) as answer_to:
                lines = answer_to.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                text = "\n".join(lines)
            assert text.rstrip().endswith("data: [DONE]")
        assert process.wait(30) == 0
    finally:
        let_go(process)


def test_replicas_of_one_device_share_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that plans with all of it: together they hold more than there is."""
    monkeypatch.setattr(backend, "memory_size", lambda sharing: 9000 // sharing)
    places: list[dict[str, str]] = [{"D": "0"}, {"D": "1"}, {"D": "0"}]
    limits = []
    for i in range(3):
        greeting = command({}, ServerConfig(), places, i, "/nowhere/s").greeting
        *_, sharing, _ = pickle.loads(greeting)
        limits.append(within_share(None, sharing).memory_limit)
    assert limits == [4500, None, 4500]
    named = EngineConfig(memory_limit=8000)
    assert within_share(named, 2) is named


def test_replicas_keep_their_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is started again would count the cores of the others as busy."""
    monkeypatch.setattr("specdec.cli.replica.own_threads", lambda n: {"T": str(8 // n)})
    places = environments(4)
    monkeypatch.setattr("specdec.cli.replica.own_threads", lambda n: {"T": "1"})
    for _ in range(2):
        child = command({}, ServerConfig(), places, 3, "/nowhere/s")
        assert child.environment["T"] == "2"


def test_the_first_replica_alone_says_what_it_notes() -> None:
    """The same notes from each of eight, or some in spite of --quiet."""
    for quiet, silent in ((False, [False, True]), (True, [True, True])):
        start = partial(command, {}, ServerConfig(), [{}, {}], quiet=quiet)
        greetings = [start(i, "/nowhere/s").greeting for i in range(2)]
        assert [pickle.loads(each)[3] for each in greetings] == silent


def test_no_replica_outlives_its_parent(model: Path) -> None:
    """A GPU that stays full after the server was killed."""
    child = command({"target": str(model)}, ServerConfig(), [{}], 0, "/nowhere/s")
    process = subprocess.Popen(child.arguments, stdin=subprocess.PIPE)
    process.communicate(child.greeting, timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_a_model_that_cannot_be_loaded_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each replica, or replicas that are started for ever."""
    monkeypatch.setenv("PYTHONWARNINGS", "")
    arguments = ["--target", str(tmp_path / "none"), "--replicas", "3", "--port", "0"]
    done = CliRunner().invoke(main, ["serve", "--quiet", *arguments])
    assert done.exit_code == 2, done.output
    (line,) = (capfd.readouterr().err + done.output).splitlines()
    assert line.startswith("specdec: error: ")
    assert "none" in line


def test_what_no_replica_is_told() -> None:
    """A key that every replica's log could hold, or a client that names another."""
    headers = [
        *((b"X-API-Key", b"k"), (b"Authorization", b"Bearer k"), (b"Cookie", b"c")),
        *((CLIENT_HEADER.upper(), b"another"), (ENDS_HEADER, b"stopping")),
        (b"Accept", b"*/*"),
    ]
    assert _passed_on(headers) == [(b"accept", b"*/*")]


def test_a_replica_that_was_restarted_has_no_prompts(
    ready: tuple[httpx.Client, Router],
) -> None:
    """Requests go to where their prefix was, and to nobody who has it now."""
    replica, starts = ready[1].replicas.all[0], ready[1].replicas.all[0].starts
    until(lambda: replica.process is not None and replica.client is not None)
    replica.note([1, 2])
    assert replica.matching([1, 2, 3]) == 2
    assert replica.process is not None
    os.kill(replica.process.pid, signal.SIGKILL)
    until(lambda: replica.starts > starts and replica.client is not None)
    assert replica.matching([1, 2, 3]) == 0
