"""A process that stands for a replica: it starts at once, and does what prompts say.

``python -m tests.server.fake_replica NUMBER``; the socket's path is the first line of
its standard input. With ``FAKE_LOADABLE`` in the environment it waits for room first.
Prompts: ``hang`` answers nothing, ``crash`` ends the process,
``stream`` sends two events and a half and hangs, ``step`` sends an event for each
``POST /v1/go``, and ``wait`` waits for one, or for the end; all others are answered
with what was asked. ``/health`` counts the answers that are due.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

NUMBER = sys.argv[1]
due = 0
left = 0
ending = False
steps: asyncio.Queue[int] = asyncio.Queue()


async def hang() -> None:
    """Wait for ever; count those who are not waited for any more."""
    global left
    try:
        await asyncio.Event().wait()
    finally:
        left += 1


async def answer(request: Request) -> Response:
    global due
    due += 1
    try:
        return await answered(request)
    finally:
        due -= 1


async def answered(request: Request) -> Response:
    body = await request.json()
    prompt = body["prompt"]
    if prompt == "crash":
        os._exit(9)
    if prompt in ("stopping", "engine_failed") and NUMBER == "0":
        return JSONResponse({}, 503, {"x-specdec-ends": prompt})
    if prompt == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if prompt == "hang":
        task = asyncio.create_task(hang())
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        task.cancel()
    events: AsyncIterator[bytes]
    if prompt in ("stream", "step"):
        events = streamed() if prompt == "stream" else stepped()
        return StreamingResponse(events, media_type="text/event-stream")
    if prompt == "wait":
        while steps.empty() and not ending:
            await asyncio.sleep(0.01)
        if not ending:
            steps.get_nowait()
    headers = [[k, v] for k, v in request.headers.items()]
    said = {"pid": os.getpid(), "body": body, "headers": headers}
    return JSONResponse({**said, "left": left, "path": str(request.url.path)}, 203)


async def streamed() -> AsyncIterator[bytes]:
    yield b'event: a\ndata: {"n": 0}\n\n'
    yield b'data: {"n": 1}\n\ndata: {"n":'
    await hang()


async def stepped() -> AsyncIterator[bytes]:
    yield b"data: 0\n\n"
    while (step := await steps.get()) >= 0:
        yield b"data: %d\n\n" % step


async def go(request: Request) -> Response:
    steps.put_nowait((await request.json())["step"])
    return Response()


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok", "due": due})


async def metrics(request: Request) -> Response:
    return PlainTextResponse(
        "# HELP specdec_rounds_total Rounds.\n# TYPE specdec_rounds_total counter\n"
        f"specdec_rounds_total {NUMBER}1.0\n"
    )


def end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print("fake", NUMBER, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        global ending
        ending = True
        super().handle_exit(sig, frame)


def main() -> None:
    path = sys.stdin.readline().strip()
    if "FAKE_LOADABLE" in os.environ:
        print("loadable", flush=True)
        sys.stdin.readline()
    threading.Thread(target=end_with_parent, daemon=True).start()
    paths = ("/v1/completions", "/v1/messages", "/v1/responses")
    app = Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path in paths),
            Route("/v1/go", go, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5)
    Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
