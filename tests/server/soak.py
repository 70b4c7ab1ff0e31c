"""Strangers for as long as is wanted: ``scripts/soak --server --minutes 10``.

Clients of all protocols ask, leave, read slowly and send what is no request. Every
whole answer is compared with ``generate``'s; when all is quiet no row is left, and
memory, descriptors and threads are as many as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from specdec import Grammar, SamplingParams
from tests.server.harness import Running, running, tiny_decoder

CASES = 60
CLIENTS = 24
# In each epoch, after which all is quiet.
REQUESTS = 240
_GROWTH = 64 << 20


GRAMMARS = (
    Grammar.json_schema(
        {"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}},
         "required": ["name"]}
    ),
    Grammar.regex("(river|lake|[a-c]{2})+"),
)  # fmt: skip


@dataclass
class Case:
    """A request, and the text that answers it."""

    messages: list[dict[str, str]]
    params: dict[str, Any]
    grammar: Grammar | None = None
    text: str = ""


@dataclass
class Counts:
    """What was done."""

    epochs: int = 0
    whole: int = 0
    left: int = 0
    refused: int = 0
    levels: list[tuple[int, int, int]] = field(default_factory=list)


def cases(decoder: Any, rng: random.Random) -> list[Case]:
    """Requests of many lengths, greedy and drawn, some of a form that is wanted."""
    words = ["river", "lake", "sea", "hill", "road", "tree", "stone", "wind"]
    made = []
    for i in range(CASES):
        text = " ".join(rng.choices(words, k=rng.choice((1, 5, 60))))
        params: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 12, 40))}
        if i % 2:
            params |= {"temperature": 0.9, "seed": i}
        grammar = GRAMMARS[i // 6 % len(GRAMMARS)] if i % 6 > 3 else None
        made.append(Case([{"role": "user", "content": text}], params, grammar))
    results = decoder.generate(
        [case.messages for case in made],
        [SamplingParams(**case.params, grammar=case.grammar) for case in made],
    )
    for case, result in zip(made, results, strict=True):
        case.text = result.text
    return made


def body_of(case: Case, path: str) -> dict[str, Any]:
    """The request in the protocol of a path."""
    params = {"model": "tiny", "temperature": 0, **case.params}
    if case.grammar is not None:
        kind, text = case.grammar.kind, case.grammar.text
        format_: dict[str, Any] = {"type": kind, "pattern": text}
        if kind == "json_schema":
            format_ = {"type": kind, "name": "x", "schema": json.loads(text)}
        if path == "/v1/chat/completions":
            if kind == "json_schema":
                format_ = {"type": kind, "json_schema": format_}
            params["response_format"] = format_
        else:
            key = "text" if path == "/v1/responses" else "output_config"
            params[key] = {"format": format_}
    if path == "/v1/responses":
        most = params.pop("max_tokens")
        return {**params, "max_output_tokens": most, "input": case.messages}
    return {**params, "messages": case.messages}


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == "/v1/chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    parts = answer["content"] if path == "/v1/messages" else [
        part for item in answer["output"] for part in item["content"]
    ]  # fmt: skip
    return "".join(part["text"] for part in parts)


def piece_of(path: str, event: dict[str, Any]) -> str:
    """The text that an event of a stream adds."""
    if path == "/v1/chat/completions":
        choices = event["choices"]
        return str((choices[0]["delta"].get("content") or "") if choices else "")
    if event["type"] in ("response.output_text.delta",):
        return str(event["delta"])
    return (
        str((event.get("delta") or {}).get("text", ""))
        if path == "/v1/messages"
        else ""
    )


PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


async def one(
    client: httpx.AsyncClient, case: Case, rng: random.Random, counts: Counts
) -> None:
    """One client of some kind, once."""
    path, kind = rng.choice(PATHS), rng.random()
    body = body_of(case, path)
    if kind < 0.1:
        data = json.dumps(body)[: rng.randrange(1, 60)]
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=data, headers=headers)
        assert answer.status_code == 400, answer.text
        counts.refused += 1
        return
    if kind < 0.35:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert text_of(path, answer.json()) == case.text
        counts.whole += 1
        return
    if kind < 0.45:  # it leaves while it waits
        body |= {"max_output_tokens": 2000} if "input" in body else {"max_tokens": 2000}
        try:
            async with asyncio.timeout(rng.random() * 0.2):
                await client.post(path, json=body)
        except TimeoutError:
            pass
        counts.left += 1
        return
    stay = 10**6 if kind < 0.8 else rng.randrange(6)
    pause = 0.005 if rng.random() < 0.2 else 0.0
    text, lines = "", 0
    async with client.stream("POST", path, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                text += piece_of(path, json.loads(line[6:]))
            await asyncio.sleep(pause)
            lines += 1
            if lines > stay:
                break
    if lines > stay:
        assert case.text.startswith(text)
        counts.left += 1
    else:
        assert text == case.text, (path, text, case.text)
        counts.whole += 1


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}}}}}
    for name in ("read", "write", "search")
]  # fmt: skip


async def agent(
    client: httpx.AsyncClient, _: Case, rng: random.Random, counts: Counts
) -> None:
    """A conversation with tools: long turns, cancels, system lines that change.

    What is asked twice is answered twice alike, whatever the prefix cache has.
    """
    path = PATHS[0]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are terse."}]
    for turn in range(rng.randrange(2, 7)):
        if rng.random() < 0.3:
            line = {"role": "system", "content": f"It is {rng.randrange(24)} o'clock."}
            messages[0:1] = [line] if rng.random() < 0.5 else [messages[0], line]
        text = f"turn {turn} " + "the river and the lake " * rng.choice((1, 5, 40))
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "tools": TOOLS[: rng.randrange(1, 4)],
                "max_tokens": rng.choice((1, 12, 40)), "temperature": 0}  # fmt: skip
        if rng.random() < 0.2:  # it leaves, and asks again
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.2):
                    await client.post(path, json={**body, "max_tokens": 2000})
            counts.left += 1
        answer = await client.post(path, json=body)
        if answer.status_code == 400:
            assert "context_length_exceeded" in answer.text, answer.text
            counts.refused += 1
            return
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        if rng.random() < 0.3:
            again = (await client.post(path, json=body)).json()["choices"][0]["message"]
            said = [(each["content"], each.get("reasoning_content"))
                    for each in (again, message)]  # fmt: skip
            assert said[0] == said[1], said
        counts.whole += 1
        messages.append({"role": "assistant", "content": message["content"] or "-"})
        if calls := message.get("tool_calls"):
            messages[-1]["tool_calls"] = calls
            messages += [
                {"role": "tool", "tool_call_id": each["id"], "content": "nothing"}
                for each in calls
            ]


async def epoch(
    url: str,
    known: list[Case],
    rng: random.Random,
    counts: Counts,
    requests: int,
    client_of: Any,
) -> None:
    """Many clients at once, until all have been served."""
    limits = httpx.Limits(max_connections=CLIENTS)
    left = requests

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await client_of(client, rng.choice(known), rng, counts)

        await asyncio.gather(*(work() for _ in range(CLIENTS)))


def level() -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads of this process."""
    if sys.platform != "linux":
        return 0, 0, threading.active_count()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threading.active_count()


def settle(server: Running) -> None:
    """Wait until nothing is left, which has to be soon."""
    end = time.monotonic() + 60
    service = server.service
    while service.engine.pending or service.engine.load.running or service._rows:
        assert time.monotonic() < end, "a row is left"
        time.sleep(0.01)


def soak(
    seed: int, seconds: float, requests: int = REQUESTS, *, agents: bool = False
) -> Counts:
    """Epochs until it is time, two or more."""
    counts, rng = Counts(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        decoder = tiny_decoder(Path(folder), marked=agents, prefix_cache_memory=1 << 20)
        known = [Case([], {})] if agents else cases(decoder, rng)
        client_of = agent if agents else one
        with running(decoder) as server:
            end = time.monotonic() + seconds
            while counts.epochs < 2 or time.monotonic() < end:
                asyncio.run(epoch(server.url, known, rng, counts, requests, client_of))
                settle(server)
                counts.epochs += 1
                counts.levels.append(level())
    first, last = counts.levels[min(3, counts.epochs - 1)], counts.levels[-1]
    assert last[0] <= first[0] + _GROWTH, f"memory grew: {counts.levels}"
    assert last[1] <= first[1] + 4, f"descriptors are left: {counts.levels}"
    assert last[2] <= first[2] + 1, f"threads are left: {counts.levels}"
    return counts


def main() -> None:
    """Print what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--agents", action="store_true", help="conversations with tools"
    )
    options = parser.parse_args()
    counts = soak(options.seed, 60 * options.minutes, agents=options.agents)
    print(
        f"{counts.whole} answers are right, {counts.left} clients left, "
        f"{counts.refused} requests refused; after {counts.epochs} epochs "
        f"{counts.levels[0]} became {counts.levels[-1]} (bytes, descriptors, threads)"
    )


if __name__ == "__main__":
    main()
