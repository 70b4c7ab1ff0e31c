"""Code that both web applications share: keys, hosts, bodies, errors. No mlx here."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .refusal import Refusal

#: Seconds that a body may take to arrive.
_BODY_SECONDS = 60
#: Bodies up to this size are parsed in the event loop.
_SMALL = 1 << 18
T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

#: With this header a replica asks that the request go to another replica.
ENDS_HEADER = b"x-specdec-ends"
#: With this header the front names the client.
CLIENT_HEADER = b"x-specdec-client"
_OPEN = frozenset(("/", "/health"))  # no key is needed
#: Paths that clients add to their base URL.
_PATHS = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip


def middleware(config: ServerConfig) -> list[Middleware]:
    """The middleware that runs before every endpoint."""
    found = [Middleware(_Guard, config=config)]
    if config.cors:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        found.insert(0, cors)
    return found


class _Guard:
    """Names every request, asks for the key, and refuses pages of other sites.

    A page whose host name was rebound to this machine could call a server that has no
    key: browsers allow it, as the page calls its own host name (DNS rebinding).
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
        response = error_response(refusal, scope["path"])
        await response(scope, receive, named)


def _key_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """The key that a request sent. All keys are compared, so timing reveals nothing."""
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


def client_of(scope: Scope, keys: Sequence[str]) -> str:
    """The client's identity: its key, or its address if there are no keys.

    Only the front can reach a replica; it names the client in a header.
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
    assert isinstance(error, Refusal)
    return error_response(error, request.url.path)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    names = (error.headers or {}).get("Allow", "another method")
    # Starlette lists them in any order, and adds HEAD to GET.
    allowed = " or ".join(sorted(n for n in names.split(", ") if n != "HEAD"))
    near = [known for known in _PATHS if known.endswith(path) or path.endswith(known)]
    text = {
        404: f"there is no {path} here: did you mean {near[0]}? Check the base URL"
        if near and len(path) > 1
        else f"there is no {path} here: see {', '.join(_PATHS)}",
        405: f"{method} {path} is not possible: use {allowed}",
    }.get(error.status_code, str(error.detail))
    refusal = Refusal(text, status=error.status_code)
    response = error_response(refusal, path)
    response.headers.update(error.headers or {})
    return response


def error_response(refusal: Refusal, path: str) -> Response:
    """The error response, in the form of the protocol that the path belongs to."""
    anthropic = path.startswith("/v1/messages")
    body = refusal.anthropic() if anthropic else refusal.openai()
    headers = dict(refusal.headers)
    if refusal.code in ("engine_failed", "stopping"):
        headers[ENDS_HEADER.decode()] = refusal.code
    return JSONResponse(body, refusal.status, headers=headers)


# -- bodies -------------------------------------------------------------------------


async def read_body(request: Request, most: int) -> bytes:
    """The bytes of a request's body, at most ``most``."""
    # With other types, a browser would let any site's page send it without asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            "the body must be JSON: send the header Content-Type: application/json",
            status=415,
            code="unsupported_media_type",
        )
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


async def parsed_soon(data: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse a body, a large one in a thread.

    Many megabytes take a second, in which the event loop answers others.
    """
    return parse(data) if len(data) <= _SMALL else await asyncio.to_thread(parse, data)


class Sent:
    """A response that is sent part by part."""

    def __init__(self, send: Send):
        self._send = send
        self.begun = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.begun = True
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


#: How errors that an endpoint raises are answered.
HANDLERS: Mapping[Any, Any] = {Refusal: _refused, HTTPException: _not_there}


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
