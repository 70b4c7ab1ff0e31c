"""The web application of one engine: its routes, and clients that leave."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..decoder import SpecDecoder
from ..prompts import templates
from ..utils.data_files import DataError, parse_json
from ..utils.printable import printable
from . import chat, completions, messages, responses
from .config import ServerConfig
from .errors import RequestError, request_error
from .job import Client, Event, Started
from .rendering import Rendering
from .schema import Notes
from .service import Prepared, Service
from .web import (
    Sent,
    application,
    check_elements,
    client_of,
    described,
    error_response,
    listed,
    parsed_soon,
    until_gone,
)

log = logging.getLogger("specdec.server")

#: Seconds that a client may take to read its answer, on top of the answer's time limit.
_READ_SECONDS = 60
#: The most characters of a header of notes, and notes that are told only once.
_MOST_HEADER, _MOST_TOLD = 1000, 10_000

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Parse = Callable[[Any, Service, Notes, Client], Rendering]
T = TypeVar("T")


def make_app(decoder: SpecDecoder, config: ServerConfig | None = None) -> Starlette:
    """A web application that serves a decoder, for any ASGI server.

    Its ``state.service`` exists while its lifespan runs.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        templates.start()
        async with decoder.serve() as engine:
            app.state.service = Service(decoder, engine, config)
            yield

    return application(
        [
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
        config,
        lifespan,
    )


# -- endpoints that answer at once ---------------------------------------------------


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
    return described(
        name,
        service.created,
        max_model_len=decoder.bounds.context_length,
        draft=decoder.draft_name,
    )


async def _models(request: Request) -> Response:
    service = _service(request)
    return listed([_described(service, name) for name in service.names])


async def _model(request: Request) -> Response:
    service, name = _service(request), request.path_params["name"]
    if name not in service.names:
        service.check_model(None if "*" in service.config.names else name)
    return JSONResponse(_described(service, name))


async def _count_tokens(request: Request) -> Response:
    service = _service(request)
    try:
        parse = partial(messages.parse_count, service=service)
        source = await _read(request, parse)
        with service.places(1):
            (encoded,) = await service.encode([source])
    except Exception as error:
        return error_response(
            request_error(error, messages.NAMES), request.scope["path"]
        )
    return JSONResponse({"input_tokens": len(encoded.prompt.token_ids)})


# -- bodies -------------------------------------------------------------------------


async def _read(request: Request, parse: Callable[[Any], T]) -> T:
    """Read a request's JSON body."""
    data = await request.app.state.bodies.read(request)
    context = _service(request).decoder.bounds.context_length

    def parsed(data: bytes) -> T:
        check_elements(data, context)
        try:
            body = parse_json(data)
        except DataError as error:
            raise RequestError(f"the body: {error}", code="invalid_json") from error
        return parse(body)

    return await parsed_soon(data, parsed)


# -- answers ------------------------------------------------------------------------


def _endpoint(path: str, parse: Parse) -> Route:
    """The route of a path at which jobs are answered."""

    async def endpoint(request: Request) -> Response:
        service = _service(request)
        began = time.monotonic()
        notes, keys = service.notes(), service.config.api_keys
        alone = not keys and bool(request.scope.get("client"))
        client = Client(client_of(request.scope, keys), alone)

        def parsed(body: Any) -> Rendering:
            return parse(body, service, notes, client)

        try:
            rendering = await _read(request, parsed)
        except ClientDisconnect:
            service.metrics.answered(path, "left", time.monotonic() - began)
            raise
        except RequestError as error:
            seconds = time.monotonic() - began
            service.metrics.answered(path, "refused", seconds)
            return error_response(error, path)
        _tell(notes)
        return _Answer(service, rendering, path)

    return Route(path, endpoint, methods=["POST"])


#: Ignored fields and notes that are in the log already.
_told: set[str] = set()


def _tell(notes: Notes) -> None:
    """Log what is new of a request's notes: each is told once."""
    ignored = ", ".join(name for name in notes.ignored if name not in _told)
    texts = [text for text in notes.texts if text not in _told]
    if ignored:
        log.warning("fields that are not known are ignored: %s", ignored)
    for text in texts:
        log.warning("%s", text)
    if len(_told) < _MOST_TOLD:
        _told.update(notes.ignored, texts)


def _headers(notes: Notes) -> dict[str, str]:
    """The headers that say what was ignored, and other notes."""
    values = {"x-specdec-ignored": ", ".join(notes.ignored),
              "x-specdec-note": "; ".join(notes.texts)}  # fmt: skip
    return {
        name: printable(value).encode("ascii", "replace").decode()[:_MOST_HEADER]
        for name, value in values.items()
        if value
    }


class _Answer(Response):
    """Answers one job; if the client leaves, the job ends."""

    def __init__(self, service: Service, rendering: Rendering, path: str):
        super().__init__()
        self._service = service
        self._rendering = rendering
        self._path = path
        self._prepared: Prepared | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        scope.setdefault("state", {})
        outcome = None
        try:
            # A client that does not read must not keep its place longer than others.
            limit = self._service.config.request_timeout + _READ_SECONDS
            answer = self._answer(scope, receive, send)
            outcome = await until_gone(answer, receive, limit)
        finally:
            seconds = time.monotonic() - began
            self._service.metrics.answered(self._path, outcome or "left", seconds)
            scope["state"]["details"] = self._details(outcome or "left")

    def _details(self, outcome: str) -> str:
        """What the request took, and how it ended, for the log."""
        rendering, usage = self._rendering, self._rendering.usage
        facts = [outcome]
        if rendering.outcomes and self._prepared is not None:
            cached = ends = ""
            reasons = [o.ended.reason for o in rendering.outcomes if o.ended]
            if reasons:
                cached = f" ({usage.cached} cached)"
                ends = f", {usage.accepted} of {usage.drafted} drafted accepted, "
                ends += " ".join(dict.fromkeys(reasons))
            facts += [f"{usage.prompt} prompt tokens{cached}",
                     f"{self._prepared.generated.total()} generated{ends}"]  # fmt: skip
        if rendering.streamed:
            facts.append("streamed")
        return f": {', '.join(facts)}"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Send the answer; return how it ended."""
        service, rendering = self._service, self._rendering
        sent = Sent(send)
        try:
            with service.places(rendering.job.choices):
                prepared = await service.prepare(rendering.job, rendering.notes)
                self._prepared = prepared
                async with aclosing(service.events(prepared)) as events:
                    if rendering.streamed:
                        await self._stream(events, sent)
                    else:
                        async for event in events:
                            if event is not None:
                                rendering.take(event)
        except Exception as error:
            answer = request_error(error, rendering.job.names)
            scope["state"]["refused"] = answer
            if answer.status >= 500:
                log.error("a request failed: %s", error)
            if sent.started:
                await sent.more(rendering.failed(answer), last=True)
            else:
                await error_response(answer, self._path)(scope, receive, send)
            return "refused" if answer.status < 500 else "failed"
        if rendering.streamed:
            await sent.more(b"".join(rendering.end()), last=True)
        else:
            headers = _headers(rendering.notes)
            whole = JSONResponse(rendering.whole(), headers=headers)
            await whole(scope, receive, send)
        cut = any(outcome.end.cut for outcome in rendering.outcomes)
        return "cut" if cut else "answered"

    async def _stream(self, events: AsyncIterator[Event | None], sent: Sent) -> None:
        rendering = self._rendering
        held = b""  # until there is a token: an earlier failure gets its own status
        async for event in events:
            if event is None:
                held += rendering.alive()
            else:
                rendering.take(event)
                held += b"".join(rendering.stream(event))
            if not isinstance(event, Started):
                if not sent.started:
                    notes = _headers(rendering.notes).items()
                    more = [(name.encode(), value.encode()) for name, value in notes]
                    await sent.begin(200, [*_EVENTS, *more])
                if held:
                    await sent.more(held)
                held = b""
