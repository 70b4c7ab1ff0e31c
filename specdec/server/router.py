"""The web application in front of replicas: passes each request to one of them.

No mlx here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import ServerError
from ..utils.data_files import DataError, parse_json
from .config import ServerConfig
from .errors import RequestError
from .rendering import sse
from .replicas import Replica, Replicas
from .routing import Question, blocks_of, choose
from .web import (
    CLIENT_HEADER,
    ENDS_HEADER,
    Headers,
    Sent,
    application,
    check_elements,
    client_of,
    error_response,
    parsed_soon,
    until_gone,
)

#: How many replicas a request is tried on in turn, while nothing has been sent back.
_ATTEMPTS = 2
#: Seconds that a client may take to read its answer, on top of the answer's time limit.
_READ_SECONDS = 120
#: Headers that belong to one connection, and headers that differ on the next one.
_NOT_PASSED_ON = frozenset(
    (b"authorization", b"connection", b"content-length", b"cookie", b"date", b"expect",
     b"host", b"keep-alive", b"origin", b"proxy-authorization", b"request-id", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"x-api-key", b"x-request-id",
     CLIENT_HEADER, ENDS_HEADER)
)  # fmt: skip


def make_router(replicas: Replicas, config: ServerConfig) -> Starlette:
    """A web application that passes each request to one of the replicas.

    Its ``state.service`` is the :class:`Router`.
    """
    return app_of(Router(replicas, config))


def app_of(
    router: Router,
    routes: Sequence[Route] = (),
    paths: Sequence[str] = ("/{path:path}",),
) -> Starlette:
    """The web application of a router.

    Args:
        routes: further routes.
        paths: what is passed on.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with router.replicas:
            yield

    app = application(
        [
            Route("/health", _health),
            Route("/metrics", _metrics),
            *routes,
            *(Route(path, _forward, methods=["GET", "POST"]) for path in paths),
        ],
        router.config,
        lifespan,
    )
    app.state.service = router
    return app


class Router:
    """Passes requests to replicas; used from one event loop.

    Args:
        replicas: the replicas, whose context is entered now or soon.
        config: limits, the same as the replicas'.
    """

    def __init__(self, replicas: Replicas, config: ServerConfig):
        self.replicas = replicas
        self.config = config
        self.created = int(time.time())
        self.again = 0
        self.lost = 0
        self._draining = False

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return bool(self.replicas.ready) and not self._draining

    @property
    def failure(self) -> ServerError | None:
        """Why no replica will answer any more; ``None`` while one may."""
        return self.replicas.failure

    @property
    def pending(self) -> int:
        """How many answers have not ended."""
        return sum(each.running for each in self.replicas.all)

    @property
    def status(self) -> str:
        """The router's state, in one word."""
        if self._draining:
            return "stopping"
        return "ok" if self.healthy else "starting"

    @asynccontextmanager
    async def replica(
        self, question: Question, tried: Sequence[Replica]
    ) -> AsyncIterator[Replica]:
        """Choose a replica for a request, and count the request as its load."""
        if self._draining:
            raise RequestError.stopping()
        ready = [each for each in self.replicas.ready if each not in tried]
        if not ready:
            lost = "the replica that answered has ended, and there is no other one yet"
            why = lost if tried else "no replica is ready"
            raise RequestError.later("no_replica", f"{why}: try again later")
        chosen = choose(ready, question.blocks)
        with self.counted(chosen):
            yield chosen

    @contextmanager
    def counted(self, chosen: Replica) -> Iterator[None]:
        """Count a request as a replica's load."""
        chosen.running += 1
        try:
            yield
        except asyncio.CancelledError:  # its client has left
            chosen.abandon()
            raise
        except BaseException:
            chosen.running -= 1
            raise
        chosen.running -= 1

    async def drain(self) -> None:
        """Accept no more requests, and let the replicas finish running ones."""
        self._draining = True
        await self.replicas.stop(self.config.stop_timeout)


def _router(request: Request) -> Router:
    router: Router = request.app.state.service
    return router


async def _health(request: Request) -> Response:
    router = _router(request)
    replicas = [
        {
            "status": each.status,
            "running": each.running,
            "starts": each.starts,
        }
        for each in router.replicas.all
    ]
    payload = {"status": router.status, "replicas": replicas}
    return JSONResponse(payload, 200 if router.healthy else 503)


# -- requests -----------------------------------------------------------------------


async def _forward(request: Request) -> Response:
    router, body = _router(request), b""
    if request.method == "POST":
        body = await request.app.state.bodies.read(request)
    question = await parsed_soon(body, _question)
    return _Forwarded(router, request, body, question)


def _question(body: bytes) -> Question:
    try:
        check_elements(body, None)
        value = parse_json(body) if body else None
    except (DataError, RequestError):  # the replica will refuse it
        return Question()
    model = value.get("model") if isinstance(value, Mapping) else None
    return Question(blocks_of(value), model if isinstance(model, str) else None)


class _Forwarded(Response):
    """A replica's answer; if the client leaves, the replica ends it, too."""

    def __init__(
        self, router: Router, request: Request, body: bytes, question: Question
    ):
        super().__init__()
        self._router = router
        self._request = request
        self._body = body
        self._question = question

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._router.config.request_timeout + _READ_SECONDS
        await until_gone(self._answer(scope, receive, send), receive, limit)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, path = self._router, self._request.scope["path"]
        tried: list[Replica] = []
        broken = 0
        sent = _Passed(send)
        while True:
            try:
                async with router.replica(self._question, tried) as replica:
                    await self._ask(replica, sent)
                return
            except RequestError as error:
                await error_response(error, path)(scope, receive, send)
                return
            except httpx.ConnectError:  # it has just ended, and received nothing
                tried.append(replica)
            except httpx.TransportError:
                broken, tried = broken + 1, [*tried, replica]
                if sent.started or broken == _ATTEMPTS:
                    break
                router.again += 1
        router.lost += 1
        lost = RequestError(
            f"{tried[-1].name} ended meanwhile: send the request again",
            status=502,
            code="replica_lost",
        )
        if sent.started:
            await sent.fail(lost, path)
        else:
            await error_response(lost, path)(scope, receive, send)

    async def _ask(self, replica: Replica, sent: _Passed) -> None:
        """Pass a replica's answer on.

        Raises:
            httpx.TransportError: the replica ended, or its answer broke off.
        """
        request, client = self._request, replica.client
        if client is None:
            raise httpx.ConnectError("it has just ended")
        # The path as it came: httpx refuses some decoded paths, such as //v1.
        query: bytes = request.scope["query_string"]
        path = request.scope["raw_path"] + (b"?" + query if query else b"")
        try:
            url = httpx.URL("http://localhost").copy_with(raw_path=path)
        except httpx.InvalidURL as error:
            raise HTTPException(404) from error
        client_name = client_of(request.scope, self._router.config.api_keys)
        digest = sha256(client_name.encode()).hexdigest().encode()
        headers = [*_passed_on(request.headers.raw), (CLIENT_HEADER, digest)]
        asked = client.build_request(
            request.method, url, headers=headers, content=self._body
        )
        self._request.state.details = None  # the replica logs it
        answer = await client.send(asked, stream=True)
        try:
            match answer.headers.get(ENDS_HEADER.decode()):
                case "stopping":
                    raise httpx.ConnectError("it accepts no more requests")
                case "engine_failed":
                    raise httpx.RemoteProtocolError("its engine has failed")
            head = _passed_on(answer.headers.raw)
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                await sent.whole(answer.status_code, head, await answer.aread())
                return
            async for data in answer.aiter_raw():
                await sent.events(answer.status_code, head, data)
            await sent.end()
        finally:
            await answer.aclose()


def _passed_on(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    return [(k.lower(), v) for k, v in headers if k.lower() not in _NOT_PASSED_ON]


class _Passed(Sent):
    """A replica's answer while it is passed on; streams are sent in whole events."""

    def __init__(self, send: Send):
        super().__init__(send)
        self._part = b""  # of an event that is not complete
        self._count = 0  # of events sent

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.begin(status, headers)
        await self.more(body, last=True)

    async def events(self, status: int, headers: Headers, data: bytes) -> None:
        whole, end, self._part = (self._part + data).rpartition(b"\n\n")
        if end:
            if not self.started:
                await self.begin(status, headers)
            self._count += whole.count(b"data: ")
            await self.more(whole + end)

    async def end(self) -> None:
        await self.more(self._part, last=True)

    async def fail(self, error: RequestError, path: str) -> None:
        """End a stream with an error, in the form of the path's protocol."""
        if path.startswith("/v1/messages"):
            event = sse(error.anthropic(), "error")
        elif path.startswith("/v1/responses"):
            facts = {"code": error.code, "message": str(error), "param": None}
            number = {"sequence_number": self._count}
            event = sse({"type": "error", **facts, **number}, "error")
        else:
            event = sse(error.openai())
        await self.more(event, last=True)


# -- metrics ------------------------------------------------------------------------


async def _metrics(request: Request) -> Response:
    """The router's metrics, and the replicas', labelled with the replica's number."""
    router = _router(request)
    texts = await asyncio.gather(*map(_metrics_of, router.replicas.all))
    registry = CollectorRegistry()
    registry.register(_Gathered(router, texts))
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(generate_latest(registry), media_type=kind)


async def _metrics_of(replica: Replica) -> str:
    if replica.client is None:
        return ""
    try:
        return (await replica.client.get("/metrics", timeout=5)).text
    except httpx.TransportError:
        return ""


class _Gathered(Collector):
    """Metrics of all replicas."""

    def __init__(self, router: Router, texts: Sequence[str]):
        self._router, self._texts = router, texts

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for i, text in enumerate(self._texts):
            for family in text_string_to_metric_families(text):
                empty = Metric(family.name, family.documentation, family.type)
                metric = metrics.setdefault(family.name, empty)
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(i)}
                    metric.add_sample(sample.name, labels, sample.value)
        yield from metrics.values()
        replicas = self._router.replicas.all
        up = GaugeMetricFamily(
            "specdec_replica_up", "Whether a replica answers.", labels=["replica"]
        )
        starts = CounterMetricFamily(
            "specdec_replica_starts", "Starts of a replica.", labels=["replica"]
        )
        for each in replicas:
            up.add_metric([str(each.index)], float(each.client is not None))
            starts.add_metric([str(each.index)], each.starts)
        yield from (up, starts)
        for name, text, number in (
            ("again", "Requests that a second replica ran.", self._router.again),
            ("lost", "Requests that ended with a replica.", self._router.lost),
        ):
            yield CounterMetricFamily(f"specdec_requests_{name}", text, value=number)
