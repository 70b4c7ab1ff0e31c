"""A program that serves, run by ``tests/test_serving.py`` for how it ends.

``python -m tests.serving_exits closed|open|tokenizing CYCLES`` prints how many threads
the process has after each cycle; ``open`` leaves the last server with a request that
runs, ``tokenizing`` with one whose prompt is tokenized for ever as well.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.engine.async_server import Server
from tests.conftest import _tiny_model
from tests.test_decoder import loaded


async def cycle(decoder: SpecDecoder, *, close: bool) -> Server:
    server = decoder.serve()
    await server.__aenter__()
    params = SamplingParams(max_tokens=6)
    await asyncio.gather(*(server.generate([i, 1], params) for i in range(3)))
    if close:
        await server.aclose()
    else:
        events = server.stream([1], SamplingParams(max_tokens=10**6))
        kept.append(events)
        while not (await anext(events)).token_ids:
            pass
    return server


def main(how: str, cycles: int) -> None:
    target = loaded(_tiny_model("llama"))
    entered = threading.Event()

    class Endless(type(target.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            entered.set()
            threading.Event().wait()
            return []

    target.tokenizer.__class__ = Endless
    decoder = SpecDecoder(target, config=EngineConfig(batch_size=2))
    loops = [asyncio.new_event_loop() for _ in range(cycles)]
    for i, loop in enumerate(loops):
        close = how == "closed" or i < cycles - 1
        server = loop.run_until_complete(cycle(decoder, close=close))
        kept.append(server)
        if how == "tokenizing" and not close:
            kept.append(loop.create_task(server.generate("a prompt")))
            loop.run_until_complete(asyncio.to_thread(entered.wait))
        print(len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0)


kept: list[object] = []

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
