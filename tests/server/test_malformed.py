"""Requests that cannot be answered: each is refused in one line that names why."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specdec.server import chat, completions, messages, responses
from specdec.server.schema import Record
from tests.server.harness import BODIES, USER, Running, post, running

KINDS: dict[str, type[Record]] = {
    "chat/completions": chat.ChatRequest,
    "completions": completions.CompletionRequest,
    "messages": messages.MessageRequest,
    "responses": responses.ResponseRequest,
}
ODD: list[Any] = [
    True, -1, 0.5, 10**400, 1e308, -(2**63), "", "\x00", "a" * 300, [], [[]], {},
    [None], [{}], {"type": 5}, {"": None}, [{"role": "user"}], [1, "a"],
    {"type": "json_schema", "json_schema": {}}, [{"type": "function"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{}]}],
    {"function": {"name": "nobody"}, "type": "function"},
]  # fmt: skip
NO_REQUESTS = [
    b"", b"{", b"[]", b"null", b"nan", b'"text"', b"\xff\xfe", b"{}" * 2, b"[" * 5000,
    b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", b'{"a": NaN}', b"1e999",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"9" * 5000,
]  # fmt: skip


def test_odd_requests(server: Running) -> None:
    """An exception that reaches the client, a hang, or a parameter that is dropped.

    Every parameter of every endpoint gets odd values, and every body that is no
    request. A response is an answer or an error object with a line.
    """
    rng = random.Random(0)
    sent = refused = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, kind in KINDS.items():
            good = BODIES[path]
            bodies: list[tuple[str | None, bytes]] = [
                (None, body) for body in NO_REQUESTS
            ]
            for name in sorted(kind.known() - kind.accepted):
                for value in rng.sample(ODD, 6):
                    body = {**good, name: value}
                    bodies.append((name, json.dumps(body).encode()))
            bodies += [
                ("temprature", json.dumps({**good, "temprature": 1}).encode()),
                *((name, json.dumps({k: v for k, v in good.items() if k != name})
                   .encode())
                  for name, field in kind.model_fields.items() if field.is_required()),
            ]  # fmt: skip
            for odd, data in bodies:
                json_type = {"content-type": "application/json"}
                answer = client.post(f"/v1/{path}", content=data, headers=json_type)
                sent += 1
                if answer.status_code == 200:
                    assert odd is not None, data
                    continue
                refused += 1
                # Of a server that lacks a model's feature it is 400, too.
                assert answer.status_code in (400, 404), (path, data[:200], answer.text)
                error = answer.json()["error"]
                assert error["message"].isprintable()
                if odd is not None and path != "messages":
                    where = f"{error['param']} {error['message']}"
                    assert odd.partition("_")[0] in where, (odd, where)
    assert post(server, "completions").is_success
    assert sent >= 300
    assert refused >= 300
    assert server.service.engine.pending == 0
    assert server.service.waiting == 0


@pytest.fixture(scope="module")
def guarded(decoder: Any) -> Iterator[Running]:
    limits = {"max_body_bytes": 3000, "max_prompt_tokens": 50, "max_output_tokens": 40}
    with running(
        decoder,
        api_keys=("other", "secret"),
        names=("small", "tiny"),
        cors=("http://a.b",),
        **limits,
    ) as server:
        yield server


def test_keys_limits_and_origins(guarded: Running) -> None:
    """Each limit is one of its own, named in the error."""
    key = {"authorization": "Bearer secret"}
    long, huge = ([{**USER, "content": "word " * n}] for n in (60, 6000))
    for headers, more, status, code in (
        ({}, {}, 401, "invalid_api_key"),
        ({"authorization": "Bearer no"}, {}, 401, "invalid_api_key"),
        ({"x-api-key": "é".encode("latin-1")}, {}, 401, "invalid_api_key"),
        ({"x-api-key": "secret"}, {}, 200, None),
        (key, {"model": "x"}, 404, "model_not_found"),
        (key, {"max_tokens": 41}, 400, "invalid_value"),
        (key, {"messages": long}, 400, "context_length_exceeded"),
        (key, {"messages": huge}, 413, "request_too_large"),
    ):
        answer = post(guarded, "chat/completions", headers, **more)
        assert answer.status_code == status, (headers, more)
        assert code is None or answer.json()["error"]["code"] == code
    for name, more in (("small", {}), ("tiny", {"model": "tiny"})):
        answer = post(guarded, "chat/completions", key, **more)
        assert answer.json()["model"] == name
    with httpx.Client(base_url=guarded.url, timeout=60, headers=key) as client:
        for path, status in (
            ("/v1/models/tiny", 200), ("/v1/models/x", 404), ("/v1/completions", 405),
            ("/v1/embeddings", 404),
        ):  # fmt: skip
            answer = client.get(path)
            assert (answer.status_code, "error" in answer.json()) == (
                status, status > 200,
            )  # fmt: skip
        assert client.post("/v1/completions", content=b"{}").status_code == 415
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["small", "tiny"]
        metrics = client.get("/metrics").text
        assert "specdec_acceptance_length" in metrics
        assert 'outcome="refused"' in metrics
        for origin, allowed in (("http://a.b", True), ("http://c.d", False)):
            asked = {"origin": origin, "access-control-request-method": "POST",
                     "access-control-request-headers": "content-type"}  # fmt: skip
            answer = client.options("/v1/chat/completions", headers=asked)
            said = answer.headers.get("access-control-allow-origin")
            assert (said == origin) is allowed
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}


def test_a_page_elsewhere_cannot_ask(server: Running) -> None:
    """Without --cors no origin is allowed, so a browser sends no JSON from it."""
    with httpx.Client(base_url=server.url) as client:
        asked = client.options(
            "/v1/completions",
            headers={"origin": "http://a.b", "access-control-request-method": "POST"},
        )
        assert asked.status_code == 405
        assert "access-control-allow-origin" not in asked.headers
