"""Code that both web applications share: keys, hosts, bodies, errors. No mlx here."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import reason_of
from ..utils.printable import one_line, quoted
from .config import ServerConfig
from .errors import RequestError
from .guard import BODY_SECONDS, check_size

#: Bodies up to this size are parsed in the event loop.
_SMALL = 1 << 18
_PARSER = ThreadPoolExecutor(1, "specdec body")
#: How many bodies of the largest size may be arriving at a time.
_AT_A_TIME = 16
#: The most prompts of a request, and tokens of each that are sent as numbers.
MOST_PROMPTS, _MEAN_TOKENS = 2048, 1024
#: Lists and objects that are in no prompt: a schema has up to this many.
_FEW = 1 << 16
#: A context that is not known counts as this many tokens.
_LONG_CONTEXT = 1 << 20
log = logging.getLogger("specdec.server")
#: A line for each request. ``state`` of its scope has ``details``, the end of the line
#: (``None``: another process writes it), and ``refused``, the error that was answered.
requests = logging.getLogger("specdec.requests")
T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

#: With this header a replica asks that the request go to another replica.
ENDS_HEADER = b"x-specdec-ends"
#: With this header the router names the client.
CLIENT_HEADER = b"x-specdec-client"
#: The scheme and the host of an absolute target.
_ABSOLUTE = re.compile(
    rb"https?://(?P<host>(?:\[[\da-f:.]+\]|[\w.-]+)(?::\d*)?)(?=/|$)", re.IGNORECASE
)
_OPEN = frozenset(("/", "/health"))  # no key is needed
#: Paths that clients add to their base URL.
PATHS = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip


def application(
    routes: Sequence[Route],
    config: ServerConfig,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """A web application with what runs before, and instead of, every endpoint.

    Its ``state.bodies`` reads the bodies of requests.
    """
    layers = [Middleware(_Guard, config=config)]
    if config.cors:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
        layers.insert(0, cors)
    app = Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers={RequestError: _refused, HTTPException: _not_there},
        lifespan=lifespan,
    )
    app.state.bodies = Bodies(config.max_body_bytes)
    return app


def described(name: str, created: int, **more: Any) -> dict[str, Any]:
    """A model, as ``/v1/models`` lists it."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "display_name": name,
        "owned_by": "specdec",
        **more,
    }


def listed(data: Sequence[Mapping[str, Any]]) -> Response:
    """The list of models."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})


class _Guard:
    """Names every request, asks for the key, and refuses pages of other sites.

    An exception that nobody has expected is answered here, in the protocol's form.

    A page whose host name was rebound to this machine could call a server that has no
    key: browsers allow it, as the page calls its own host name (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._keys = config.api_keys
        self._logs = config.log_requests
        if self._logs:
            requests.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _with_path(scope)
        name = f"req_{uuid.uuid4().hex}".encode()
        began, status = time.monotonic(), 0
        state = scope.setdefault("state", {})
        # What the router asks for itself, and what it asks for again, is not logged.
        routed = not scope.get("client")
        logged = not routed or any(key == CLIENT_HEADER for key, _ in scope["headers"])

        async def named(message: Message) -> None:
            nonlocal status, logged
            if message["type"] == "http.response.start":
                status = message["status"]
                pairs = message.get("headers", ())
                logged &= not (routed and any(key == ENDS_HEADER for key, _ in pairs))
                headers = [(b"x-request-id", name), (b"request-id", name)]
                message["headers"] = [*pairs, *headers]
            await send(message)

        try:
            await self._answer(scope, receive, named, lambda: bool(status))
        finally:
            details, refused = state.get("details", ""), state.get("refused")
            if refused is not None:
                status = status or refused.status
                details = f"{details or ': refused'}: {refused}"
            if self._logs and logged and details is not None:
                path, seconds = one_line(scope["path"], 100), time.monotonic() - began
                method, status = scope["method"], status or 499
                requests.info(
                    "%s %s %d in %.2f s%s", method, path, status, seconds, details
                )

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, started: Callable[[], bool]
    ) -> None:
        """Call the application, or say why not; ``started``: the answer has begun."""
        failure = None
        is_open = scope["path"] in _OPEN
        if self._keys and not is_open and _key_of(scope, self._keys) is None:
            failure = RequestError(
                "the API key is missing or wrong: send it as Authorization: Bearer "
                "KEY, or as x-api-key",
                status=401,
                code="invalid_api_key",
            )
        elif not self._keys and _is_rebound(scope):
            failure = RequestError(
                "the Host header names another machine: call the server as localhost "
                "or by its address, or start it with --api-key",
                status=403,
                code="wrong_host",
            )
        if failure is None:
            try:
                await self._app(scope, receive, send)
                return
            except ClientDisconnect:
                return
            except Exception as error:
                if started():
                    raise  # the connection is closed
                path, reason = scope["path"], reason_of(error)
                log.error("%s %s failed: %s", scope["method"], path, reason)
                text = f"unexpected {type(error).__name__}: please report it"
                failure = RequestError(text, status=500, code="internal_error")
        response = error_response(failure, scope["path"])
        await response(scope, receive, send)


def _with_path(scope: Scope) -> Scope:
    """A scope whose target is a path; the host of an absolute one counts (RFC 9112)."""
    absolute = _ABSOLUTE.match(scope["raw_path"])
    if absolute is None:
        return scope
    headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
    raw_path = scope["raw_path"][absolute.end() :] or b"/"
    return {
        **scope,
        "raw_path": raw_path,
        "path": unquote(raw_path.decode("latin-1")),
        "headers": [*headers, (b"host", absolute["host"])],
    }


def _key_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """The key that a request sent. All keys are compared, so timing reveals nothing."""
    sent = dict(scope["headers"])
    scheme, _, bearer = sent.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() != b"bearer":
        bearer = b""
    match = None
    for key in keys:
        for value in (bearer.strip(), sent.get(b"x-api-key", b"")):
            if hmac.compare_digest(value, key.encode()):
                match = key
    return match


def client_of(scope: Scope, keys: Sequence[str]) -> str:
    """The client's identity: its key, or its address if there are no keys.

    Only the router can reach a replica; it names the client in a header.
    """
    if not scope.get("client"):  # a Unix socket
        sent: dict[bytes, bytes] = dict(scope["headers"])
        return sent.get(CLIENT_HEADER, b"").decode("latin-1")
    return _key_of(scope, keys) or "" if keys else str(scope["client"][0])


def _is_rebound(scope: Scope) -> bool:
    """Whether a request over the loopback interface names a foreign host."""
    server = scope.get("server")
    if server is None or not _is_address(server[0], loopback=True):
        return False
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]")
    return not (name == "localhost" or name.endswith(".localhost") or _is_address(name))


def _is_address(host: str, *, loopback: bool = False) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket that takes both has IPv4's as ::ffff:127.0.0.1, which is no loopback.
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or not loopback


# -- errors -------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope["path"])


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.scope["path"]
    names = (error.headers or {}).get("Allow", "another method")
    # Starlette lists them in any order, and adds HEAD to GET.
    allowed = " or ".join(sorted(n for n in names.split(", ") if n != "HEAD"))
    near = [known for known in PATHS if known.endswith(path) or path.endswith(known)]
    text = {
        404: f"there is no {path} here: did you mean {near[0]}? Check the base URL"
        if near and len(path) > 1
        else f"there is no {path} here: see {', '.join(PATHS)}",
        405: f"{method} {path} is not possible: use {allowed}",
    }.get(error.status_code, str(error.detail))
    response = error_response(RequestError(text, status=error.status_code), path)
    response.headers.update(error.headers or {})
    return response


def error_response(error: RequestError, path: str) -> Response:
    """The error response, in the form of the protocol that the path belongs to."""
    anthropic = path.startswith("/v1/messages")
    body = error.anthropic() if anthropic else error.openai()
    headers = dict(error.headers)
    if error.code in ("engine_failed", "stopping"):
        headers[ENDS_HEADER.decode()] = error.code
    return _Refusal(error, body, headers)


class _Refusal(JSONResponse):
    """The response that says why a request is refused."""

    def __init__(
        self, error: RequestError, body: Mapping[str, Any], headers: Mapping[str, str]
    ):
        super().__init__(body, error.status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["refused"] = self._error
        await super().__call__(scope, receive, send)


# -- bodies -------------------------------------------------------------------------


class Bodies:
    """Reads the bodies of an application's requests.

    Args:
        most: the most bytes of one; all that arrive at a time have 16 times as many.
    """

    def __init__(self, most: int):
        self.most = most
        self._left = _AT_A_TIME * most

    async def read(self, request: Request) -> bytes:
        """The bytes of a request's body.

        Raises:
            RequestError: it is not JSON by its type, too large, or late.
            ClientDisconnect: the client left.
        """
        # With other types, a browser would let any site's page send it without asking.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                "the body must be JSON: send the header Content-Type: application/json",
                status=415,
                code="unsupported_media_type",
            )
        coding = request.headers.get("content-encoding", "").strip()
        if coding.lower() not in ("", "identity"):
            raise RequestError(
                f"a body of Content-Encoding {quoted(coding)} is not supported: send "
                "it without",
                status=415,
                code="unsupported_media_type",
            )
        length = request.headers.get("content-length", "")
        if re.fullmatch("[0-9]+", length):  # 19 digits are more than any limit
            check_size(int(length.lstrip("0")[:19] or 0), self.most)
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    check_size(len(data) + len(chunk), self.most)
                    if self._left < len(chunk):
                        raise RequestError.later("busy", "too much is being sent to it")
                    self._left -= len(chunk)
                    data += chunk
        except TimeoutError as error:
            raise RequestError("the body did not arrive in time", status=408) from error
        finally:
            self._left += len(data)
        return bytes(data)


def check_elements(data: bytes, context: int | None) -> None:
    """Refuse JSON that has more elements than any request needs, before it is parsed.

    A list takes 30 times as much memory as its two bytes.

    Args:
        context: the target's; a list or an object of a prompt takes a token or more.

    Raises:
        RequestError: there are too many.
    """
    lists = _FEW + (context or _LONG_CONTEXT)
    most = lists + MOST_PROMPTS * _MEAN_TOKENS
    if len(data) <= lists:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    opened = commas = inside = 0
    for begin in range(0, len(plain), _SMALL):
        parts = plain[begin : begin + _SMALL].split(b'"')
        outside = b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2
        opened += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
    if opened <= lists and opened + commas <= most:
        return
    raise RequestError(
        f"the body has more than {lists} lists and objects, or {most} elements: "
        "send fewer",
        code="request_too_large",
    )


async def parsed_soon(data: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse a body, a large one in a thread, where one at a time is parsed.

    Many megabytes take a second, in which the event loop answers others.
    """
    if len(data) <= _SMALL:
        return parse(data)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, parse, data)


class Sent:
    """A response that is sent part by part."""

    def __init__(self, send: Send):
        self._send = send
        self.started = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)

    async def more(self, body: bytes, *, last: bool = False) -> None:
        """Send a part of the body."""
        part = {"type": "http.response.body", "body": body, "more_body": not last}
        await self._send(part)


async def gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(
    answer: Awaitable[T], receive: Receive, seconds: float
) -> T | None:
    """Wait for an answer; ``None``: the client left, or time ran out.

    In both cases the answer is cancelled.
    """
    task = asyncio.ensure_future(answer)
    left = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait(
            {task, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return task.result() if task.done() else None
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)
