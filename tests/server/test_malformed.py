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
from tests.server.harness import Running, running

USER = {"role": "user", "content": "Hello there"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
GOOD: dict[str, tuple[type[Record], dict[str, Any]]] = {
    "/v1/chat/completions": (chat.ChatRequest, {"messages": [USER], "max_tokens": 1}),
    "/v1/completions": (
        completions.CompletionRequest,
        {"prompt": "Hello", "max_tokens": 1},
    ),
    "/v1/messages": (
        messages.MessageRequest,
        {"model": "tiny", "messages": [USER], "max_tokens": 1},
    ),
    "/v1/responses": (
        responses.ResponseRequest,
        {"input": "Hello", "max_output_tokens": 1},
    ),
}
ODD: list[Any] = [
    True, -1, 0.5, 10**400, 1e308, -(2**63), "", "\x00", "a" * 300, [], [[]], {},
    [None], [{}], {"type": 5}, {"": None}, [{"role": "user"}], [1, "a"],
    {"type": "json_schema", "json_schema": {}}, [{"type": "function"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{}]}],
    {"function": {"name": "nobody"}, "type": "function"},
]  # fmt: skip
BODIES = [
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
        for path, (kind, good) in GOOD.items():
            bodies: list[tuple[str | None, bytes]] = [(None, body) for body in BODIES]
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
                found = client.post(
                    path, content=data, headers={"content-type": "application/json"}
                )
                sent += 1
                if found.status_code == 200:
                    assert odd is not None, data
                    continue
                refused += 1
                # Of a server that lacks a model's feature it is 400, too.
                assert found.status_code in (400, 404), (path, data[:200], found.text)
                error = found.json()["error"]
                assert error["message"].isprintable()
                if odd is not None and path != "/v1/messages":
                    where = f"{error['param']} {error['message']}"
                    assert odd.partition("_")[0] in where, (odd, where)
        assert client.post(
            "/v1/completions", json=GOOD["/v1/completions"][1]
        ).is_success
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
    ) as made:
        yield made


def test_keys_limits_and_origins(guarded: Running) -> None:
    """Each limit is one of its own, named in the error."""
    key = {"authorization": "Bearer secret"}
    ask = {"messages": [USER], "max_tokens": 1}
    with httpx.Client(base_url=guarded.url, timeout=60) as client:

        def post(headers: dict[str, str] = key, **more: Any) -> httpx.Response:
            body = {**ask, **more}
            return client.post("/v1/chat/completions", json=body, headers=headers)

        for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "é"}):
            answer = post({k: v.encode("latin-1") for k, v in headers.items()})  # type: ignore[misc]
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/metrics", headers=headers and key).status_code in (
                200,
                401,
            )
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").json() == {"status": "ok"}
        assert post({"x-api-key": "secret"}).status_code == 200
        assert post(model="tiny").json()["model"] == "tiny"
        assert post().json()["model"] == "small"
        assert post(model="x").json()["error"]["code"] == "model_not_found"
        assert post(max_tokens=41).json()["error"]["param"] == "max_tokens"
        long = [{"role": "user", "content": "word " * 60}]
        assert post(messages=long).json()["error"]["code"] == "context_length_exceeded"
        huge = [{"role": "user", "content": "word " * 6000}]
        assert post(messages=huge).status_code == 413
        text = client.post("/v1/completions", content=b"{}", headers=key)
        assert text.status_code == 415
        assert client.get("/v1/completions", headers=key).status_code == 405
        lost = client.post("/v1/embeddings", json={}, headers=key)
        assert (lost.status_code, "error" in lost.json()) == (404, True)
        for origin, allowed in (("http://a.b", True), ("http://c.d", False)):
            asked = client.options(
                "/v1/chat/completions",
                headers={
                    "origin": origin,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "content-type",
                },
            )
            found = asked.headers.get("access-control-allow-origin")
            assert (found == origin) is allowed
        models = client.get("/v1/models", headers=key).json()["data"]
        assert [model["id"] for model in models] == ["small", "tiny"]
        assert client.get("/v1/models/tiny", headers=key).json()["id"] == "tiny"
        assert client.get("/v1/models/x", headers=key).status_code == 404
        metrics = client.get("/metrics", headers=key).text
        assert "specdec_acceptance_length" in metrics
        assert 'outcome="refused"' in metrics


def test_a_page_elsewhere_cannot_ask(server: Running) -> None:
    """Without --cors no origin is allowed, so a browser sends no JSON from it."""
    with httpx.Client(base_url=server.url) as client:
        asked = client.options(
            "/v1/completions",
            headers={"origin": "http://a.b", "access-control-request-method": "POST"},
        )
        assert asked.status_code == 405
        assert "access-control-allow-origin" not in asked.headers
