"""The web application: routes, keys, limits of bodies, answers that end early."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import templates
from ..decoder import SpecDecoder
from ..utils.data_files import DataError, parse_json
from . import chat, completions, messages, responses
from .config import ServerConfig
from .job import Event
from .refusal import Refusal, refusal_of
from .rendering import Rendering
from .service import Service

log = logging.getLogger("specdec.server")

#: Seconds that a body may take to arrive.
_BODY_SECONDS = 60
#: Seconds that a client may take to read its answer, beside the time that it takes.
_READ_SECONDS = 60
#: A body is parsed in the event loop up to this size.
_SMALL = 1 << 18
_OPEN = frozenset(("/", "/health"))  # no key is asked for
#: What clients add to their base URL, or find in it.
_PATHS = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip

Parse = Callable[[Any, Service], Rendering]
T = TypeVar("T")


def make_app(decoder: SpecDecoder, config: ServerConfig | None = None) -> Starlette:
    """A web application that serves a decoder, for any ASGI server.

    Its ``state.service`` is there while its lifespan runs.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        templates.start()
        async with decoder.serve() as engine:
            app.state.service = Service(decoder, engine, config)
            yield

    middleware = [Middleware(_Guard, config=config)]
    if config.cors:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/v1/models", _models),
            Route("/v1/models/{name:path}", _model),
            _endpoint("/v1/chat/completions", chat.parse),
            _endpoint("/v1/completions", completions.parse),
            _endpoint("/v1/responses", responses.parse),
            _endpoint("/v1/messages", messages.parse),
            Route("/v1/messages/count_tokens", _count_tokens, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={Refusal: _refused, HTTPException: _not_there},
        lifespan=lifespan,
    )


class _Guard:
    """Names every request, asks for the key, and refuses pages of other sites.

    A page whose name was rebound to this machine could call a server that has no key:
    browsers let it, as it calls its own name (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._keys = config.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req_{uuid.uuid4().hex}".encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(b"x-request-id", name), (b"request-id", name)]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal = None
        is_open = scope["path"] in _OPEN
        if self._keys and not is_open and _key_of(scope, self._keys) is None:
            refusal = Refusal(
                "the API key is missing or wrong: send it as Authorization: Bearer "
                "KEY, or as x-api-key",
                status=401,
                code="invalid_api_key",
            )
        elif not self._keys and _is_rebound(scope):
            refusal = Refusal(
                "the Host header names another machine: call the server as localhost "
                "or by its address, or start it with --api-key",
                status=403,
                code="wrong_host",
            )
        if refusal is None:
            await self._app(scope, receive, named)
            return
        response = _error(refusal, scope["path"])
        await response(scope, receive, named)


def _key_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """The key that a request has sent; all are compared, so that time says nothing."""
    sent = dict(scope["headers"])
    scheme, _, bearer = sent.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() != b"bearer":
        bearer = b""
    found = None
    for key in keys:
        for given in (bearer.strip(), sent.get(b"x-api-key", b"")):
            if hmac.compare_digest(given, key.encode()):
                found = key
    return found


def _client_of(scope: Scope, keys: Sequence[str]) -> str:
    """Who asks: by the key, where there are keys, else by the address."""
    host, _ = scope.get("client") or ("", 0)
    return _key_of(scope, keys) or "" if keys else host


def _is_rebound(scope: Scope) -> bool:
    """Whether a request over the loopback interface asks for a name of elsewhere."""
    server = scope.get("server")
    if server is None or not _is_address(server[0], loopback=True):
        return False
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]")
    return not (name == "localhost" or name.endswith(".localhost") or _is_address(name))


def _is_address(host: str, *, loopback: bool = False) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback or not loopback
    except ValueError:
        return False


# -- what answers at once -----------------------------------------------------------


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _page(request: Request) -> Response:
    page = (files(__package__) / "page.html").read_text("utf-8")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    more = "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    headers = {
        "Content-Security-Policy": f"{policy}{more}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


async def _health(request: Request) -> Response:
    healthy = _service(request).healthy
    status = {True: "ok", False: "stopping"}[healthy]
    if _service(request).engine.failure is not None:
        status = "failed"
    return JSONResponse({"status": status}, 200 if healthy else 503)


async def _metrics(request: Request) -> Response:
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(_service(request).metrics.text(), media_type=kind)


def _described(service: Service, name: str) -> dict[str, Any]:
    decoder = service.decoder
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": service.created,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created)),
        "display_name": name,
        "owned_by": "specdec",
        "max_model_len": decoder.bounds.context_length,
        "draft": decoder.draft_name,
    }


async def _models(request: Request) -> Response:
    service = _service(request)
    data = [_described(service, name) for name in service.names]
    first, last = data[0]["id"], data[-1]["id"]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": first,
            "last_id": last,
        }
    )


async def _model(request: Request) -> Response:
    service, name = _service(request), request.path_params["name"]
    if name not in service.names:
        service.check_model(None if "*" in service.config.names else name)
    return JSONResponse(_described(service, name))


async def _count_tokens(request: Request) -> Response:
    service = _service(request)
    try:
        source = await _read(request, messages.parse_count)
        with service.places(1):
            (encoded,) = await service.encode([source])
    except Exception as error:
        return _error(refusal_of(error, messages.NAMES), request.url.path)
    return JSONResponse({"input_tokens": len(encoded.prompt.token_ids)})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error(error, request.url.path)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    near = [known for known in _PATHS if known.endswith(path) or path.endswith(known)]
    text = {
        404: f"there is no {path} here: {near[0]} is meant? Check the base URL"
        if near and len(path) > 1
        else f"there is no {path} here: see {', '.join(_PATHS)}",
        405: f"{method} {path} is not possible: use another method",
    }.get(error.status_code, str(error.detail))
    refusal = Refusal(text, status=error.status_code)
    response = _error(refusal, path)
    response.headers.update(error.headers or {})
    return response


def _error(refusal: Refusal, path: str) -> Response:
    """The error object, in the form of the protocol that the path belongs to."""
    anthropic = path.startswith("/v1/messages")
    body = refusal.anthropic() if anthropic else refusal.openai()
    return JSONResponse(body, refusal.status, headers=refusal.headers)


# -- bodies -------------------------------------------------------------------------


async def _read(request: Request, parse: Callable[[Any, Service], T]) -> T:
    """What a request asks for, by its JSON.

    Raises:
        Refusal: the body is too large, too slow, or no JSON; or what ``parse`` raises.
    """
    data = await _body(request)

    def parsed() -> T:
        try:
            body = parse_json(data)
        except DataError as error:
            raise Refusal(f"the body: {error}", code="invalid_json") from error
        return parse(body, _service(request))

    # Many megabytes take a second, in which the event loop answers others.
    return parsed() if len(data) <= _SMALL else await asyncio.to_thread(parsed)


async def _body(request: Request) -> bytes:
    """The bytes of a request.

    Raises:
        Refusal: they are too many, too slow, or said to be no JSON.
    """
    # Of another type, a page of any site could send it from a browser, unasked.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            "the body must be JSON: send the header Content-Type: application/json",
            status=415,
            code="unsupported_media_type",
        )
    most = _service(request).config.max_body_bytes
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise Refusal(
                        f"the body has more than {most} bytes: shorten it",
                        status=413,
                        code="request_too_large",
                    )
    except TimeoutError as error:
        raise Refusal("the body did not arrive in time", status=408) from error
    return bytes(data)


# -- answers ------------------------------------------------------------------------


def _endpoint(path: str, parse: Parse) -> Route:
    """A path at which jobs are answered."""

    async def endpoint(request: Request) -> Response:
        service = _service(request)
        began = time.monotonic()
        try:
            rendering = await _read(request, parse)
        except ClientDisconnect:
            service.metrics.answered(path, "left", time.monotonic() - began)
            return Response(status_code=499)
        except Refusal as refusal:
            service.metrics.answered(path, "refused", time.monotonic() - began)
            return _error(refusal, path)
        if service.config.prefix_sharing == "client":
            client = _client_of(request.scope, service.config.api_keys)
            rendering.job = rendering.job.of_client(client)
        return _Answer(service, rendering, path)

    return Route(path, endpoint, methods=["POST"])


class _Answer(Response):
    """Answers one job; a client that goes away ends it."""

    def __init__(self, service: Service, rendering: Rendering, path: str):
        super().__init__()
        self._service = service
        self._rendering = rendering
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        answer = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_gone(receive))
        outcome = "left"
        try:
            # One that does not read keeps its place no longer than others.
            limit = self._service.config.request_timeout + _READ_SECONDS
            await asyncio.wait(
                {answer, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                outcome = answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
            seconds = time.monotonic() - began
            self._service.metrics.answered(self._path, outcome, seconds)

    async def _answer(self, send: Send) -> str:
        """Answer; how it went."""
        service, rendering = self._service, self._rendering
        sent = _Sent(send)
        try:
            with service.places(rendering.job.choices):
                prepared = await service.prepare(rendering.job)
                async with aclosing(service.events(prepared)) as events:
                    if rendering.streamed:
                        await self._stream(events, sent)
                    else:
                        async for event in events:
                            if event is not None:
                                rendering.take(event)
        except Exception as error:
            refusal = refusal_of(error, rendering.job.names)
            if refusal.code == "engine_failed":
                log.error("a request failed: %s", error)
            if sent.begun:
                await sent.more(rendering.failed(refusal), last=True)
            else:
                body = rendering.error(refusal)
                await sent.whole(body, refusal.status, refusal.headers)
            return "refused" if refusal.status < 500 else "failed"
        if rendering.streamed:
            await sent.more(b"".join(rendering.end()), last=True)
        else:
            await sent.whole(rendering.whole())
        cut = any(outcome.end.cut for outcome in rendering.outcomes)
        return "cut" if cut else "answered"

    async def _stream(self, events: AsyncIterator[Event | None], sent: _Sent) -> None:
        rendering = self._rendering
        async for event in events:
            if event is None:
                await sent.more(rendering.alive())
                continue
            rendering.take(event)
            await sent.more(b"".join(rendering.stream(event)))


class _Sent:
    """A response on its way."""

    def __init__(self, send: Send):
        self._send = send
        self.begun = False

    async def more(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream of events."""
        if not self.begun:
            await self._begin(200, "text/event-stream; charset=utf-8",
                              {"Cache-Control": "no-cache",
                               "X-Accel-Buffering": "no"})  # fmt: skip
        if data or last:
            part = {"type": "http.response.body", "body": data, "more_body": not last}
            await self._send(part)

    async def whole(
        self,
        payload: object,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a JSON response."""
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        await self._begin(status, "application/json", headers or {})
        await self._send({"type": "http.response.body", "body": text.encode()})

    async def _begin(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.begun = True
        given = {"Content-Type": kind, **headers}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.lower().encode(), value.encode())
                    for name, value in given.items()
                ],
            }
        )


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
